"""Runs the same requests in every state of a busy server; results must be equal to the last bit. For exact engines.

In: a running engine with a prefix cache, fewer blocks than all rows need, and steps shorter than some prompts. Each
watched request runs alone, uncached and cached. Then it runs together with other requests: uncached, where the others'
tokens cut it into chunks; with its prefix cached; and as the last request, which is preempted first.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from engine import Engine, Request
from tests.engine_kit import answer, answer_deltas, quiet, text_request


def drawn(count: int, vocab: int, length: tuple[int, int], tokens: int, seed: int, **rules: Any) -> list[Request]:
    """Requests with random prompts; `length` is the range of prompt lengths."""
    draw = np.random.default_rng(seed)
    prompts = [draw.integers(2, vocab, draw.integers(*length, endpoint=True), np.int32) for _ in range(count)]
    return [text_request(ids, tokens, ignore_eos=True, **rules) for ids in prompts]


async def collected(engine: Engine, request: Request) -> list[tuple[Any, ...]]:
    """Every token with its log-probabilities, exact to the bit."""
    deltas = (await answer_deltas(engine, request))[0]
    entries = [entry for delta in deltas for entry in delta.logprobs or ()]
    return [(entry.token_id, entry.logprob, *entry.top_ids, *entry.top_logprobs) for entry in entries]


async def same_in_every_circumstance(engine: Engine, watched: list[Request], others: list[Request]) -> None:
    """Fails unless every watched request has the same tokens and log-probabilities each time."""
    alone = [await collected(engine, request) for request in watched]
    assert all(len(each) == request.sampling.max_tokens for each, request in zip(alone, watched))
    hits = engine.stats.prefix_hits
    assert [await collected(engine, request) for request in watched] == alone, "cached"
    assert engine.stats.prefix_hits > hits
    for circumstance, fresh, place in (
        ("in company", True, len(others) // 2),
        ("in company, cached", False, len(others) // 2),
        ("in company, behind all others", True, len(others)),  # the last arrival is preempted first
    ):
        await quiet(engine)
        assert not fresh or await engine.reset_prefix_cache()
        preempted = engine.stats.preemptions
        beside = [asyncio.create_task(answer(engine, request)) for request in others[:place]]
        mine = [asyncio.create_task(collected(engine, request)) for request in watched]
        beside += [asyncio.create_task(answer(engine, request)) for request in others[place:]]
        got = await asyncio.gather(*mine)
        await asyncio.gather(*beside)
        assert got == alone, circumstance
        assert engine.stats.preemptions > preempted, f"{circumstance}: the room was enough for all"
