"""Requests of every kind that an engine handles differently, for tests of what first requests compile or allocate.

In: a running engine; an engine with --max-logprobs -1 also gets requests for the whole vocabulary. Prompts have many
lengths, alone and together, up to a step and longer, cached, and at times more than an engine has rows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from engine import Engine, Request
from tests.engine_kit import answer, quiet, text_request

DRAWN = {"temperature": 0.9, "seed": 3}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": DRAWN,
    "top-p": {**DRAWN, "top_p": 0.9},
    "small top-p": {**DRAWN, "top_p": 0.2},
    "top-k": {**DRAWN, "top_k": 5},
    "min-p": {**DRAWN, "min_p": 0.05},
    "all cuts": {**DRAWN, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "top-n-sigma": {**DRAWN, "top_n_sigma": 1.0},
    "XTC": {**DRAWN, "xtc_probability": 0.5, "xtc_threshold": 0.05},
    "DRY": {"dry_multiplier": 0.8},
    "bias": {"logit_bias": ((5, 3.0),)},
    "allowed": {"allowed_token_ids": (7, 8, 9)},
    "bad words": {"bad_words": ((7,), (30, 31))},
    "least tokens": {"min_tokens": 2, "eos_token_ids": (0, 5), "ignore_eos": False},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.2},
    "repetition": {**DRAWN, "repetition_penalty": 1.1},
    "own logprob": {"logprobs": 0},
    "logprobs": {"logprobs": 20},
    "named logprobs": {"logprobs": 1, "logprob_token_ids": (3, 4)},
    "prompt logprobs": {"prompt_logprobs": 2},
    "all of it": {**DRAWN, "top_p": 0.9, "repetition_penalty": 1.2, "logit_bias": ((5, 1.0),), "logprobs": 3},
}
WHOLE: dict[str, dict[str, Any]] = {  # for the whole vocabulary, so with few tokens only
    "every logprob": {"logprobs": -1},
    "every prompt logprob": {"prompt_logprobs": -1, "logprobs": -1, "repetition_penalty": 1.1},
}
LENGTHS = (1, 9, 70, 300)  # prompt lengths
TOGETHER = (3, 40, 130)  # numbers of requests sent together


def made(rules: Mapping[str, Any], length: int, first: int = 0, tokens: int = 3) -> Request:
    """A request; prompts with equal beginnings hit the prefix cache after the first."""
    return text_request((np.arange(length) + first) % 100, tokens, **{"ignore_eos": True, **rules})


def rounds(longest: int, step: int, whole: bool) -> Iterator[list[Request]]:
    """Lists of requests; a list is sent together. Prompts have up to `longest` tokens; `step`: tokens of a step."""
    for rules in KINDS.values():
        for length in LENGTHS:
            yield [made(rules, length)]
    for rules in WHOLE.values() if whole else ():  # more positions exceed the allocated pinned memory
        yield [made(rules, 3, tokens=2)]
    for length in (*LENGTHS, step, step + 1, 2 * step + 17):
        for first in (0, length % 100, length % 100):  # a new prompt, and twice one that is then cached
            yield [made(rules, min(length, longest), first) for rules in KINDS.values()]
    for number in TOGETHER:
        for special in (False, True):
            kinds = list(KINDS.values()) if special else [{}, DRAWN]
            yield [made(kinds[k % len(kinds)], 2 + k % 7, first=k, tokens=2) for k in range(number)]


async def every_kind(engine: Engine) -> None:
    runtime = engine.inspect().runtime
    assert runtime is not None
    longest, whole = runtime.sizes.max_model_len - 4, runtime.limits.max_logprobs == -1
    for requests in rounds(longest, runtime.sizes.max_tokens, whole):
        await asyncio.gather(*[answer(engine, request) for request in requests])
    await quiet(engine)
