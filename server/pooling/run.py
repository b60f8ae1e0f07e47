"""PooledAnswer: the inputs of one HTTP request in the engine, and the arrays that it returns.

Owner: loop, the handler's task. In: token ids of each input. Out: a float32 array for each, in their order. All inputs
are one engine request; leaving it (disconnect, deadline, an error of one input) ends all of them.

    places held -> tokens counted -> Engine.submit -> Delta with an array, for each input -> arrays
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

import numpy as np

from engine.base.errors import EngineError
from engine.base.request import IDLE, Delta, Flow, PoolingParams, Request, SamplingParams
from server.errors import ApiError, from_engine
from server.http.exchange import Exchange
from server.jobs.job import scope_of
from server.pooling.tokens import PooledInputs

ONE = SamplingParams(max_tokens=1, temperature=0.0)


class PooledAnswer:
    """One pooling request. Leaving the `with` block aborts what still runs and releases everything."""

    def __init__(self, exchange: Exchange, name: str) -> None:
        self.exchange, self.state = exchange, exchange.state
        self._name = name
        self._close: Callable[[], None] | None = None
        self._tokens = 0
        self._registered = False
        self._arrays: list[np.ndarray | None] = []
        self._left = 0
        self._finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def arrays(
        self,
        inputs: PooledInputs,
        *,
        per_token: bool = False,
        salt: str = "",
        priority: int = 0,
    ) -> list[np.ndarray]:
        """The engine's arrays for the inputs. Raises ApiError."""
        state, exchange = self.state, self.exchange
        count = len(inputs.ids)
        lengths = np.fromiter(map(len, inputs.ids), np.int64, count)
        starts = np.concatenate([np.zeros(1, np.int64), lengths.cumsum()])
        self._tokens = int(starts[-1])
        await state.running.wait()  # an operator may have paused the server
        request = Request(
            prompt_token_ids=np.concatenate(inputs.ids),
            sampling=ONE,
            media=inputs.media,
            positions=inputs.positions,
            n=count,
            priority=IDLE if exchange.places.idle else priority,
            cache_salt=scope_of(exchange, salt),
            arrival=exchange.arrival,
            pooling=PoolingParams(starts, inputs.seconds, inputs.pool_starts, per_token, inputs.adapters),
            flow=Flow(exchange.client, state.keys.weight(exchange.key_name)),
            deadline=math.inf if exchange.places.idle else time.monotonic() + state.config.limits.queue_timeout,
            lora=exchange.adapter,
        )
        tokens, self._tokens = self._tokens, 0
        exchange.places.take_tokens(tokens)
        self._tokens = tokens
        self._arrays, self._left = [None] * count, count
        try:
            stream = state.engine.submit(request)
        except EngineError as error:
            raise from_engine(error, exchange.places.retry_after()) from None
        self._close = stream.close
        stream.subscribe(self._take)
        for known in (self._name, exchange.request_id):
            state.live.setdefault((exchange.key_name, known), set()).add(self)
        self._registered = True
        exchange.answer_open = self
        await self._wait()
        self._observe(lengths)
        return [array for array in self._arrays if array is not None]

    async def _wait(self) -> None:
        limits, idle = self.state.config.limits, self.exchange.places.idle
        seconds = math.inf if idle else limits.queue_timeout
        if limits.request_timeout and not idle:
            seconds = min(seconds, limits.request_timeout - (time.monotonic() - self.exchange.arrival))
        try:
            await asyncio.wait_for(self._finished, max(seconds, 0.001) if seconds < math.inf else None)
        except TimeoutError:
            self._unfinished("error")
            raise ApiError(504, "deadline", "the inputs took longer than --queue-timeout") from None

    def _take(self, delta: Delta) -> None:
        if self._finished.done():
            return
        if delta.queued is not None:
            self.exchange.begin()
            self.state.metrics.observe("request_queue_time_seconds", delta.queued)
        if delta.encode_s:
            self.state.metrics.observe("mm_encode_seconds", delta.encode_s)
        if delta.pooled is not None:
            self._arrays[delta.index] = delta.pooled
            self._left -= 1
            if not self._left:
                self._finished.set_result(None)
        elif delta.finish_reason:
            error = (
                ApiError(500, "aborted", "the request was ended") if delta.error is None else from_engine(delta.error)
            )
            self.fail(error)

    def _observe(self, lengths: np.ndarray) -> None:
        metrics, exchange = self.state.metrics, self.exchange
        took = time.monotonic() - exchange.arrival
        for length in lengths.tolist():
            metrics.observe("request_prompt_tokens", length)
        metrics.observe("e2e_request_latency_seconds", took)
        metrics.finished["stop"] += len(lengths)

    @property
    def done(self) -> bool:
        return self._finished.done()

    def fail(self, error: ApiError) -> None:
        """End every input with an error."""
        if not self._finished.done():
            self._unfinished("error")
            self.exchange.reason = error.reason
            self._finished.set_exception(error)

    def abort(self) -> None:
        """End every input, for /abort_requests."""
        self._unfinished("abort")
        self.fail(ApiError(499, "aborted", "the request was aborted"))

    def _unfinished(self, reason: str) -> None:
        """Count the inputs without an array, once."""
        self.state.metrics.finished[reason] += self._left
        self._left = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._close is not None:
            self._close()
        self._unfinished("abort")
        self.exchange.places.give_tokens(self._tokens)
        if self._registered:
            for known in {self._name, self.exchange.request_id}:
                named = self.state.live.get((self.exchange.key_name, known), set())
                named.discard(self)
                if not named:
                    self.state.live.pop((self.exchange.key_name, known), None)
        self._finished.cancel()
        self.exchange.answer_open = None
