"""The devices of the cases in this folder, and the meaning of "the same tokens" on each device.

On a CPU all tokens must be equal. On a GPU the order of floating-point sums depends on the other requests of the batch.
With default kernels nearly all answers must be equal. An answer may differ after a token whose two likeliest candidates
are closer than MARGIN. With the `exact` settings no answer may differ (RELIABILITY.md, R10).
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine import Engine, Request
from tests.engine_kit import answer_deltas, running

MARGIN = 0.05  # difference of log-probabilities
SHARE = 0.99  # of the answers must be equal


@dataclass(frozen=True, slots=True)
class Answer:
    """Tokens of a request served alone; `margins`: log-probability above the second likeliest token (GPU only)."""

    tokens: list[int]
    margins: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Device:
    """ "cpu" or "cuda"; float32 on both."""

    name: str

    @property
    def exact(self) -> dict[str, Any]:
        """Settings with which other requests never change a bit of an answer."""
        return {} if self.name == "cpu" else {"deterministic": True}

    @property
    def rules(self) -> dict[str, Any]:
        """Sampling parameters of requests that are served alone."""
        return {} if self.name == "cpu" else {"logprobs": 2}

    def running(self, folder: Path, **settings: Any) -> AbstractAsyncContextManager[Engine]:
        return running(folder, **{"device": self.name, "dtype": "float32", **settings})

    async def alone(self, engine: Engine, request: Request) -> Answer:
        """The answer of the first choice; the request's sampling parameters include `rules`."""
        tokens, margins = [], []
        for delta in (await answer_deltas(engine, request))[0]:
            tokens += delta.token_ids
            for entry in delta.logprobs or ():
                margins.append(entry.top_logprobs[0] - entry.top_logprobs[1])
        return Answer(tokens, margins)

    def check(self, got: list[list[int]], wanted: list[Answer], label: str = "") -> None:
        """Fails unless the answers are equal, within the tolerance of this device."""
        assert len(got) == len(wanted)
        if self.name == "cpu":
            assert got == [each.tokens for each in wanted], label
            return
        others = 0
        for number, (tokens, each) in enumerate(zip(got, wanted)):
            if tokens == each.tokens:
                continue
            assert len(tokens) == len(each.tokens), (label, number, tokens, each.tokens)
            first = next(k for k, (a, b) in enumerate(zip(tokens, each.tokens)) if a != b)
            assert each.margins[first] < MARGIN, (label, number, first, each.margins[first], tokens, each.tokens)
            others += 1
        assert others <= max(1, (1 - SHARE) * len(got)), f"{label}: {others} of {len(got)} answers differ"
