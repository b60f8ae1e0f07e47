"""The check of exact engines on a GPU, run on a CPU: there the other requests of a batch never change a bit."""

import pytest

from tests import tiny
from tests.engine.circumstances import drawn, same_in_every_circumstance
from tests.engine_kit import running

TIGHT = {"max_num_batched_tokens": 40, "num_gpu_blocks_override": 22, "max_num_seqs": 16, "max_model_len": 128}


RANKS = {"tensor_parallel": 2, "deterministic": True}


@pytest.mark.parametrize(
    ("name", "settings"), [("qwen3_moe", {}), ("qwen3", {"kv_cache_dtype": "fp8"}), ("qwen3_moe", RANKS)]
)
async def test_a_busy_cpu_changes_no_bit(name, settings):
    async with running(tiny.checkpoint(name), device="cpu", dtype="float32", **TIGHT, **settings) as engine:
        vocab = tiny.FIRST_SPECIAL
        watched = drawn(3, vocab, (20, 60), 8, seed=1, logprobs=2)
        await same_in_every_circumstance(engine, watched, drawn(12, vocab, (1, 40), 20, seed=2))


async def test_a_bit_that_differs_is_found(monkeypatch):
    async with running(tiny.checkpoint("qwen3"), device="cpu", dtype="float32", **TIGHT) as engine:
        watched = drawn(1, tiny.FIRST_SPECIAL, (20, 60), 4, seed=1, logprobs=2)
        real, calls = engine.submit, []

        def other_prompt_later(request):
            calls.append(request)
            return real(request if len(calls) == 1 else drawn(1, 90, (20, 20), 4, seed=9, logprobs=2)[0])

        monkeypatch.setattr(engine, "submit", other_prompt_later)
        with pytest.raises(AssertionError, match="cached"):
            await same_in_every_circumstance(engine, watched, [])
