"""With an empty kernel cache a start compiles its kernels in parallel before any kernel runs, and none later."""

import json
import os
import subprocess
import sys

import pytest
import torch

from tests import tiny
from tests.bench.shapes import few_layers, write_folder

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")]


FULL = {"load_format": "dummy", "max_num_seqs": 0, "max_num_batched_tokens": 0, "num_gpu_blocks_override": 4096}
CASES = {
    "qwen3": {"dtype": "bfloat16"},
    "qwen3 in float32": {"dtype": "float32"},
    "omni": {"dtype": "bfloat16"},
    "8b": FULL,
    "0.6b": FULL,
    "8b in long steps": {**FULL, "max_num_batched_tokens": 4096},
    "8b with the same bits": {**FULL, "deterministic": True},
}


@pytest.mark.parametrize("case", CASES)
def test_all_of_a_models_kernels_are_compiled_at_start(case, tmp_path):
    """Also with real shapes, whose products use different kernels for different numbers of rows."""
    name, settings = case.split()[0], CASES[case]
    real = "load_format" in settings
    folder = write_folder(tmp_path / "model", few_layers(name)) if real else tiny.checkpoint(name)
    command = [sys.executable, "-m", "tests.engine.compiled_at_start", str(folder), json.dumps(settings)]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "kernels")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    print(f"{len(found['at_start'])} kernels in {found['startup']['kernels']:.1f} s, later {found['later']}")
    assert len(found["at_start"]) >= 15
    assert not found["later"]
