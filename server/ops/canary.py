"""Canary: a request of our own by which an idle server checks that the engine still answers (S41).

Owner: loop. In: the engine's step count, read every --canary-interval seconds. Out: `late` if a token did not come
within --step-timeout, and `wrong` if it differs from the first canary's token; the probes read both. If the step count
has grown, the engine answers its clients and no canary is sent; a canary costs a step of four tokens. If a model's
prompts need media, the canary only waits for a turn of the device thread.

    look (steps went on) .. look (none) -> canary -> token: right | wrong | late .. look (steps went on): right again
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

import numpy as np

from engine.base.errors import EngineError
from engine.base.request import FinishReason, Flow, PoolingParams, Request, SamplingParams
from engine.engine import Engine

log = logging.getLogger("omniloop")

PROMPT = np.arange(4, dtype=np.int32)
WRONG = 2  # wrong answers in a row after which the server is not ready; a tie of two tokens may cause one
NEAR = 0.05  # relative tolerance of vectors: batches of other sizes round differently


@dataclass(slots=True)
class Answer:
    """The result of a canary."""

    token: int = -1
    pooled: np.ndarray | None = None

    def equals(self, other: Answer) -> bool:
        if self.pooled is None or other.pooled is None:
            return self.token == other.token
        return self.pooled.shape == other.pooled.shape and np.allclose(self.pooled, other.pooled, NEAR, NEAR)


class Canary:
    """Sends canaries between `start` and `close`."""

    def __init__(self, engine: Engine, interval: float) -> None:
        """`interval`: seconds between two checks; 0: no checks."""
        self.late = False
        self.wrong = 0  # wrong answers in a row
        self.answered = 0  # canaries answered; each took one step
        self._engine = engine
        self._interval = interval
        self.right: Answer | None = None
        self._steps = -1
        self._timer: asyncio.TimerHandle | None = None
        self._asking: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._interval:
            self._timer = asyncio.get_running_loop().call_later(self._interval, self._look)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._asking is not None:
            self._asking.cancel()

    def _look(self) -> None:
        engine = self._engine
        steps = engine.stats.steps - engine.stats.failed_steps - self.answered
        if steps != self._steps:
            self._steps, self.late = steps, False
        elif engine.state == "ready" and not engine.is_paused and (self._asking is None or self._asking.done()):
            self._asking = asyncio.get_running_loop().create_task(self.ask())
        self.start()

    async def ask(self) -> None:
        """Send one canary and record its result."""
        engine, answer = self._engine, Answer()
        try:
            async with asyncio.timeout(engine.config.step_timeout):
                answer = await answer_of(engine)
            self.answered += answer.token >= 0 or answer.pooled is not None
        except (TimeoutError, EngineError) as error:
            if engine.state == "ready":
                self.late = True
                log.error("the engine does not answer: %s", error or "no token within --step-timeout")
            return
        self.late = False
        self.right = self.right or answer
        self.wrong = 0 if answer.equals(self.right) else self.wrong + 1
        if self.wrong:
            log.error("the engine answers a check with %s, before it was %s", answer, self.right)


async def answer_of(engine: Engine) -> Answer:
    """The engine's answer to a canary. Raises EngineError if it ends with an error.

    If the model's prompts need media, the engine only has to end a turn.
    """
    found = Answer()
    if engine.model.encoder_prefix or engine.model.adds_media:
        await engine.turn()
        return found
    async with engine.submit(request(engine)) as stream:
        async for delta in stream:
            if delta.error is not None:
                raise delta.error
            if delta.token_ids:
                found.token = delta.token_ids[0]
            if delta.finish_reason is not FinishReason.NONE:
                found.pooled = delta.pooled
    return found


def request(engine: Engine) -> Request:
    """A request for one token, or one pooled input; its cache entries are separate from those of clients."""
    sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    pooling = PoolingParams(np.array([0, len(PROMPT)])) if engine.limits.pools else None
    ids = PROMPT % engine.limits.num_embeddings
    return Request(ids, sampling, cache_salt=b"canary", flow=Flow("canary"), pooling=pooling)
