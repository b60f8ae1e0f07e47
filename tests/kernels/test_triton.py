"""Runs the Triton cases in processes of their own: the interpreter is chosen before any kernel file is imported."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).parent / "accelerator"
NAMES = sorted(path.name for path in CASES.glob("cases_*.py"))

HAS_TRITON = importlib.util.find_spec("triton") is not None
pytestmark = [
    pytest.mark.skipif(not HAS_TRITON, reason="triton has no wheel for this platform"),
    pytest.mark.slow,
]


def run(name: str, folder: Path, which: str) -> subprocess.CompletedProcess[str]:
    interpret = "1" if name.startswith("cases_interpreter") else "0"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--durations=5"]
    settings = {"TRITON_INTERPRET": interpret, "TRITON_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    settings["TRITON_DEFAULT_FP_FUSION"] = "1"  # as it was before the default moved: saves a warning
    environment = {**os.environ, **settings}
    command += ["-m", which, str(CASES / name)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    print(done.stdout[-2000:])
    return done


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", NAMES)
def test_triton_cases(name, tmp_path):
    done = run(name, tmp_path, "not full")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", NAMES)
def test_the_other_triton_cases(name, tmp_path):
    done = run(name, tmp_path, "full")
    assert done.returncode in (0, pytest.ExitCode.NO_TESTS_COLLECTED), done.stdout[-4000:] + done.stderr[-2000:]
