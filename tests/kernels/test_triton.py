"""Runs the Triton cases in processes of their own: the interpreter is chosen before any kernel file is imported."""

import importlib.util
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

CASES = Path(__file__).parent / "accelerator"

HAS_TRITON = importlib.util.find_spec("triton") is not None
pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="triton has no wheel for this platform")


def run(name: str, folder: Path) -> subprocess.CompletedProcess[str]:
    interpret = "1" if name.startswith("cases_interpreter") else "0"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(CASES / name)]
    settings = {"TRITON_INTERPRET": interpret, "TRITON_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    settings["TRITON_DEFAULT_FP_FUSION"] = "1"  # as it was before the default moved: saves a warning
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **settings}, check=False)


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """Every file that was asked for, as many at a time as there are cores: each keeps one busy for a minute."""
    names = {item.callspec.params["name"] for item in request.session.items if item.path == Path(__file__)}
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        yield {name: pool.submit(run, name, tmp_path_factory.mktemp("triton")) for name in sorted(names)}
        pool.shutdown(wait=False, cancel_futures=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", sorted(path.name for path in CASES.glob("cases_*.py")))
def test_triton_cases(name, runs):
    done = runs[name].result()
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
