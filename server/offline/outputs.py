"""Outputs, with the names and fields of vLLM's.

Owner: the caller's, plain values. In: a finished Answer. Out: RequestOutput.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from engine.base.request import TokenLogprob
from server.answers.answer import Answer
from server.output.choices import echo_text
from server.render.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of a token at a place."""

    logprob: float
    rank: int | None  # 1: the likeliest; None: of a token of logprob_token_ids
    decoded_token: str


Logprobs = list[dict[int, Logprob]]


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer to a prompt."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: Logprobs | None  # for each token: itself and the likeliest, by id
    cumulative_logprob: float | None
    finish_reason: str | None
    stop_reason: int | str | None  # the stop token or the stop text


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The answers to a prompt."""

    request_id: str
    prompt: str
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    finished: bool = True


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """A vector."""

    embedding: list[float]


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """The vector of an input."""

    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    finished: bool = True


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """A score."""

    score: float


@dataclass(frozen=True, slots=True)
class ScoringRequestOutput:
    """The score of a pair."""

    outputs: ScoringOutput
    finished: bool = True


def output_of(answer: Answer, top: int | None, prompt_top: int | None) -> RequestOutput:
    """The output of a prompt; `top`, `prompt_top`: log-probabilities per place that were asked for."""
    (job,), tokenizer = answer.jobs, answer.state.tokenizer
    outputs = []
    for choice in answer.choices:
        text, token_ids, entries = choice.drain()
        logprobs = None if top is None else [logprobs_at(entry, top, tokenizer) for entry in entries]
        total = None if top is None else float(np.sum([entry.logprob for entry in entries]))
        reasons = choice.finish_reason, choice.stop_reason
        outputs.append(CompletionOutput(choice.index, text, token_ids, logprobs, total, *reasons))
    listed, found = answer.prompt_logprobs[0], None
    if prompt_top is not None and listed is not None:
        found = [None if entry is None else logprobs_at(entry, prompt_top, tokenizer) for entry in listed]
    return RequestOutput(
        request_id=answer.exchange.request_id,
        prompt=echo_text(tokenizer, job.prompt),
        prompt_token_ids=job.request.prompt_token_ids.tolist(),
        prompt_logprobs=found,
        outputs=outputs,
        num_cached_tokens=answer.usage()["prompt_tokens_details"]["cached_tokens"],
    )


def logprobs_at(entry: TokenLogprob, top: int, tokenizer: Tokenizer) -> dict[int, Logprob]:
    """The log-probabilities of one place by token id: the `top` likeliest, requested ids, and the token itself."""
    name: Callable[[int], str] = lambda token: tokenizer.decode([token])  # noqa: E731
    found: dict[int, Logprob] = {}
    for at, (token, value) in enumerate(zip(entry.top_ids, entry.top_logprobs)):
        found.setdefault(token, Logprob(value, at + 1 if at < top or top == -1 else None, name(token)))
    found[entry.token_id] = Logprob(entry.logprob, entry.rank, name(entry.token_id))
    return found
