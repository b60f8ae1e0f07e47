"""A server whose model is dealt out over simulated ranks, and starts that are refused."""

from __future__ import annotations

import asyncio

import pytest
import torch

from tests import tiny
from tests.end_to_end.process import SMALL, ServerProcess, serving
from tests.end_to_end.wire import ask, greedy

QWEN2 = tiny.checkpoint("qwen2")
PROMPTS = [[*range(5 * length, 5 * length + 3 * length)] for length in (1, 4, 9)]


async def test_answers_of_four_ranks_equal_transformers():
    with serving("--model", str(QWEN2), "--device", "cpu", "-tp", "4", *SMALL) as server:
        bodies = [greedy(prompt, 12) for prompt in PROMPTS]
        replies = await asyncio.gather(*(ask(server.port, "POST", "/v1/completions", body) for body in bodies))
        assert "4 ranks are simulated on the CPU, for tests" in server.log
    oracle = tiny.reference(QWEN2)
    for prompt, reply in zip(PROMPTS, replies):
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            made = oracle.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=-1, pad_token_id=0)
        assert reply.json()["choices"][0]["token_ids"] == made[0, len(prompt) :].tolist()


@pytest.mark.full
def test_a_number_that_does_not_divide_the_heads_is_refused_with_the_numbers_that_do():
    server = ServerProcess("--model", str(QWEN2), "--device", "cpu", "-tp", "3", *SMALL).spawn()
    assert server.wait() != 0
    assert "--tensor-parallel-size 3: 4 heads and 2 key-value heads" in server.log
    assert "possible: 1, 2, 4" in server.log
    server.close()
