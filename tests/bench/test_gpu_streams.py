"""gpu_streams on a tiny model with states: rates, a long prompt, and the scores of two dtypes of states."""

import argparse

import numpy as np
import pytest

from tests import tiny
from tests.bench import gpu_streams
from tests.bench.gpu_streams import measured


async def test_streams_a_prompt_and_dtypes_of_states(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_streams, "DRAWN", 3)
    folder = tmp_path / "model"
    folder.symlink_to(tiny.checkpoint("qwen3_5_text-states"))
    asked = argparse.Namespace(folder=str(folder), device="cpu", streams="1,2", prompts="512", states="float32")
    asked.answers = str(tmp_path / "answers.npy")
    first, second = await measured(asked, "float32"), await measured(asked, "bfloat16")
    for name in ("1 streams, tok/s", "2 streams, first token p50, ms", "prompt of 32, first token, ms", "64 rows, ms"):
        assert first[name] > 0
    name = "mean log-probability of answers"
    assert np.load(asked.answers).shape == (3, 64 + 16)
    assert second[name] == pytest.approx(first[name], abs=0.01)
    assert second[name] != first[name]
