"""One step for each prompt: the log-probabilities of given tokens at the place behind it.

Owner: loop, the handler's task. In: Jobs, and for each the token ids to report. Out: Measures in the same order. Where
the prompts begin with the same long text, the first runs alone; the others begin when its prompt is computed, and find
the blocks of the text in the prefix cache.

    first job -> computed -> the others, together
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np

from engine.base.request import SamplingParams
from server.answers.answer import Answer
from server.errors import ApiError
from server.http.exchange import Exchange
from server.jobs.job import Job
from server.jobs.sampling import Asked
from server.state import AppState

# Greedy, without the model's sampling defaults: the reported log-probabilities are those of the model.
GREEDY = SamplingParams(max_tokens=1, temperature=0.0, logprobs=0, ignore_eos=True)
ONE_STEP = Asked(
    params=GREEDY,
    max_tokens=1,
    n=1,
    stop=(),
    include_stop=False,
    stream=False,
    include_usage=False,
    continuous_usage=False,
    interval=1,
)
Labelled = tuple[Job, Sequence[int]]  # a job and the token ids to report
MIN_SHARED = 2  # blocks of a common beginning from which the first job runs alone


@dataclass(frozen=True, slots=True)
class Measure:
    """The result of one prompt."""

    job: Job
    logprobs: dict[int, float]  # token id -> log-probability; or logit, by --logprobs-mode
    likeliest: int  # the likeliest token of all
    cached_tokens: int


def is_shared(state: AppState, length: int) -> bool:
    """Whether a common beginning of `length` tokens should be computed before the other prompts are submitted."""
    return state.engine.config.enable_prefix_caching and length >= MIN_SHARED * state.engine.block_size


async def measured(
    exchange: Exchange, first: Sequence[Labelled], later: Callable[[], Awaitable[list[Labelled]]], name: str
) -> list[Measure]:
    """The measures of `first`, and then of the jobs that `later` makes while the first are computed."""
    found: list[Measure] = []
    with closing(answer_of(exchange, first)) as answer:
        await answer.submit(name, exchange.request_id)
        others = await later()
        await answer.wait()
        found += measures(answer)
    if others:
        with closing(answer_of(exchange, others)) as answer:
            await answer.submit(name, exchange.request_id)
            await answer.wait()
            found += measures(answer)
    exchange.details["prompt"] = sum(each.job.num_tokens for each in found)
    exchange.details["generated"] = len(found)
    return found


def answer_of(exchange: Exchange, labelled: Sequence[Labelled]) -> Answer:
    """The Answer of these jobs, each of which reports its own tokens."""
    jobs = []
    for job, labels in labelled:
        params = replace(job.request.sampling, logprob_token_ids=tuple(labels))
        jobs.append(replace(job, request=replace(job.request, sampling=params)))
    return Answer(exchange, ONE_STEP, jobs)


def measures(answer: Answer) -> list[Measure]:
    """The measures of a finished answer."""
    found = []
    for at, choice in enumerate(answer.choices):
        _, _, entries = choice.drain()
        if not entries:  # an operator or another request of the key has ended it
            raise ApiError(500, "aborted", "the request was ended")
        entry = entries[0]
        values = dict(zip(entry.top_ids, entry.top_logprobs))
        cached = max(0, min(answer.cached_tokens[at], choice.job.num_tokens - 1))
        found.append(Measure(choice.job, values, entry.token_id, cached))
    return found


def softmax(logprobs: Sequence[float]) -> np.ndarray:
    """float64 [labels]: the shares of the labels among each other."""
    values = np.asarray(logprobs, np.float64)
    powers = np.exp(values - values.max())
    return powers / powers.sum()


def own_probability(state: AppState, logprobs: Sequence[float]) -> float | None:
    """The share of these tokens in the whole vocabulary; None if --logprobs-mode reports logits."""
    if state.config.model.logprobs_mode.endswith("_logits"):
        return None
    return float(np.exp(np.asarray(logprobs, np.float64)).sum())
