"""Runs the Triton cases in separate processes: the interpreter must be chosen before any kernel file is imported.

A process takes 3 s to import and collect, so several files share one; a failure names its file. The groups take about
equally long; the longest comes first. In `make test` runs share Triton's cache: it names each compiled kernel by a hash
of all that it is made of, so a later run compiles only what has changed.
"""

import hashlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).parent / "accelerator"
HOW = hashlib.sha256((CASES / "targets.py").read_bytes()).hexdigest()[:16]
COMPILED = Path(__file__).parents[2] / "build" / f"triton-{HOW}"
NAMES = sorted(path.stem.removeprefix("cases_") for path in CASES.glob("cases_*.py"))
GROUPS = [
    ("interpreter_states", "interpreter_replay", "interpreter_moe_float8", "interpreter_sampling", "interpreter_lora",
     "interpreter_mixers"),
    ("interpreter", "interpreter_image", "interpreter_whisper", "interpreter_dry", "interpreter_step",
     "interpreter_drafts", "interpreter_drafter", "interpreter_stripes", "interpreter_parallel",
     "interpreter_rank_tokens", "interpreter_quantised", "interpreter_gemm", "interpreter_moe",
     "interpreter_moe_codes", "interpreter_codes"),
    ("compile_moe", "compile_image", "compile_attention", "compile_codes", "compile_quantised", "compile_step"),
    ("compile_states", "compile_moe_float8", "compile_lora", "compile_parallel", "compile_gemm", "compile",
     "compile_sampling", "precompile", "compile_drafter"),
    ("compile_start",),  # a group of its own: its simulated device stays in the process
]  # fmt: skip

HAS_TRITON = importlib.util.find_spec("triton") is not None
pytestmark = [
    pytest.mark.skipif(not HAS_TRITON, reason="triton has no wheel for this platform"),
    pytest.mark.slow,
]


def run(names: tuple[str, ...], folder: Path, which: str) -> subprocess.CompletedProcess[str]:
    """Runs the cases of these files that the marks of `which` select; `not full`: compiled quickly (targets.py)."""
    interpret = "1" if names[0].startswith("interpreter") else "0"
    command = [sys.executable, "-m", "pytest", "-q", "--maxfail=5", "--durations=5", "-p", "no:cacheprovider"]
    command += ["-p", "pytest_asyncio.plugin", "-p", "pytest_timeout", "-m", which]
    quick = which == "not full"
    settings = {"TRITON_INTERPRET": interpret, "TRITON_CACHE_DIR": str(COMPILED if quick else folder)}
    settings |= {"OMNILOOP_QUICK_CASES": "1" if quick else "0", "OMP_NUM_THREADS": "1"}
    settings["TRITON_DEFAULT_FP_FUSION"] = "1"  # the old default: setting it avoids a warning
    settings["TRITON_DISABLE_LINE_INFO"] = "1"  # saves a sixth of the compiler's time and changes no instruction
    settings["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # Hypothesis alone takes a second to load
    environment = {**os.environ, **settings}
    command += [str(CASES / f"cases_{name}.py") for name in names]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    print(done.stdout[-2000:])
    return done


def test_every_file_is_in_one_group():
    assert sorted(name for names in GROUPS for name in names) == NAMES


@pytest.mark.timeout(900)
@pytest.mark.parametrize("names", GROUPS, ids=" ".join)
def test_triton_cases(names, tmp_path):
    done = run(names, tmp_path, "not full")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", NAMES)
def test_the_other_triton_cases(name, tmp_path):
    """All cases that compile, because `make test` compiles them quickly; of the interpreter's those left out there."""
    done = run((name,), tmp_path, "full" if name.startswith("interpreter") else "full or not full")
    assert done.returncode in (0, pytest.ExitCode.NO_TESTS_COLLECTED), done.stdout[-4000:] + done.stderr[-2000:]
