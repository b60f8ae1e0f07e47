"""Runs the Triton cases in processes of their own: the interpreter is chosen before any kernel file is imported."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).parent / "accelerator"

HAS_TRITON = importlib.util.find_spec("triton") is not None
pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="triton has no wheel for this platform")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", sorted(path.name for path in CASES.glob("cases_*.py")))
def test_triton_cases(name, tmp_path):
    interpret = "1" if name.startswith("cases_interpreter") else "0"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(CASES / name)]
    settings = {"TRITON_INTERPRET": interpret, "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    settings["TRITON_DEFAULT_FP_FUSION"] = "1"  # as it was before the default moved: saves a warning
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **settings}, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
