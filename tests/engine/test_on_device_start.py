"""With an empty kernel cache a start compiles its kernels side by side before anything runs, and later none."""

import json
import os
import subprocess
import sys

import pytest
import torch

from tests import tiny

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")]


@pytest.mark.parametrize(("name", "dtype"), [("qwen3", "bfloat16"), ("qwen3", "float32"), ("omni", "bfloat16")])
def test_all_of_a_models_kernels_are_compiled_ahead(name, dtype, tmp_path):
    command = [sys.executable, "-m", "tests.engine.compiled_at_start", str(tiny.checkpoint(name)), dtype]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    print(f"{len(found['ahead'])} kernels in {found['startup']['kernels']:.1f} s, later {found['later']}")
    assert len(found["ahead"]) >= 15
    assert not found["later"]
