"""AnswerMetrics: the times and counts of one answer, for the metrics and for the log line of its exchange.

Owner: loop, one per Answer. In: events of the choices. Out: observations in server/ops/metrics.py, `first_token` and
`details` of the Exchange. A lane times its own tokens (_fast/lane), in the same histogram of gaps.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from server.answers.choice import Choice
from server.http.exchange import Exchange
from server.jobs.job import Job
from server.jobs.sampling import Asked
from server.ops.request_times import Generation


class AnswerMetrics:
    """Metrics of one answer. Owner: loop."""

    __slots__ = ("_encode_s", "_exchange", "_metrics", "_n", "_observe_gap")

    def __init__(self, exchange: Exchange, asked: Asked) -> None:
        self._exchange = exchange
        self._metrics = exchange.state.metrics
        self._n = asked.n
        self._encode_s = 0.0  # sum over the answer's prompts
        self._observe_gap = self._metrics.gaps.observe

    def queued(self, seconds: float) -> None:
        """Record the seconds that the request waited for its first step."""
        self._metrics.observe("request_queue_time_seconds", seconds)
        self._exchange.queued_s = seconds

    def encoded(self, seconds: float) -> None:
        """Record the seconds that encoders ran for media that this request was the first to send."""
        self._metrics.observe("mm_encode_seconds", seconds)
        self._encode_s += seconds
        self._exchange.details["media_encode_ms"] = round(self._encode_s * 1000, 1)

    def tokens(self, choice: Choice, count: int) -> None:
        """Record that the engine generated `count` tokens for a choice."""
        now = time.monotonic()
        if choice.first_at:
            self._observe_gap((now - choice.last_at) / count)
        else:
            choice.first_at = now
            self.first_token(now)
        choice.last_at = now

    def first_token(self, now: float) -> None:
        """Record that the engine generated a token for this answer; only the first call counts."""
        exchange = self._exchange
        if not exchange.first_token:
            exchange.first_token = now
            self._metrics.observe("time_to_first_token_seconds", now - exchange.arrival)

    def choice_ended(self, choice: Choice) -> None:
        metrics, arrival, count = self._metrics, self._exchange.arrival, choice.num_tokens
        metrics.finished[choice.finish_reason or "stop"] += 1
        metrics.observe("e2e_request_latency_seconds", time.monotonic() - arrival)
        metrics.observe("request_generation_tokens", count)
        metrics.observe("request_prompt_tokens", choice.job.num_tokens)
        metrics.observe("request_max_num_generation_tokens", count)
        metrics.observe("request_params_max_tokens", choice.job.request.sampling.max_tokens)
        metrics.observe("request_params_n", self._n)
        if metrics.adapters is not None:
            metrics.adapters.ended(self._exchange.adapter, choice.job.num_tokens, count)
        if choice.first_at:
            decode = choice.last_at - choice.first_at
            metrics.observe("request_prefill_time_seconds", choice.first_at - arrival)
            metrics.observe("request_decode_time_seconds", decode)
            metrics.observe("request_inference_time_seconds", choice.last_at - arrival)
            if count > 1:
                metrics.observe("request_time_per_output_token_seconds", decode / (count - 1))

    def unfinished(self, reason: str, count: int) -> None:
        """Count choices that ended together, for `reason`, before they were complete."""
        self._metrics.finished[reason] += count

    def describe(self, jobs: Sequence[Job], choices: Sequence[Choice], cached_tokens: int) -> None:
        """Set the counts for the log line, and for tracing."""
        exchange = self._exchange
        details = exchange.details
        details["prompt"] = sum(job.num_tokens for job in jobs)
        details["generated"] = sum(choice.num_tokens for choice in choices)
        if exchange.queued_s >= 0.0:
            details["queued_ms"] = round(exchange.queued_s * 1000, 1)
        if exchange.first_token:
            details["first_ms"] = round((exchange.first_token - exchange.arrival) * 1000, 1)
        if exchange.state.follows_requests and jobs:
            exchange.generation = self._generation(jobs, choices, cached_tokens)

    def _generation(self, jobs: Sequence[Job], choices: Sequence[Choice], cached_tokens: int) -> Generation:
        """The answer's counts and parameters for trace spans."""
        asked = jobs[0].request.sampling
        return Generation(
            submitted=self._exchange.submitted,
            queued_s=self._exchange.queued_s,
            prompt_tokens=sum(job.num_tokens for job in jobs),
            cached_tokens=cached_tokens,
            generated_tokens=sum(choice.num_tokens for choice in choices),
            finish_reasons=tuple(choice.finish_reason or "abort" for choice in choices),
            n=self._n,
            max_tokens=asked.max_tokens,
            temperature=asked.temperature,
            top_p=asked.top_p,
            top_k=asked.top_k,
            presence_penalty=asked.presence_penalty,
            frequency_penalty=asked.frequency_penalty,
            seed=asked.seed,
        )
