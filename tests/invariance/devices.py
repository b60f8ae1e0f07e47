"""Where the cases of this room run, and what "the same tokens" means there.

On a CPU every token is the same, always. On an accelerator sums are taken in another order in another company, so with
its default kernels nearly every answer is the same, and one that is not departs from the other where the two likeliest
tokens are closer than MARGIN; `exact` settings take even that away (RELIABILITY.md, R10).
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine import Engine, Request
from tests.engine_kit import answer_deltas, running

MARGIN = 0.05  # of log-probabilities
SHARE = 0.99  # of the answers must be the same


@dataclass(frozen=True, slots=True)
class Answer:
    """Tokens of a request served alone; `margins`: how much likelier each was than the next (none on a CPU)."""

    tokens: list[int]
    margins: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Device:
    """ "cpu" or "cuda"; float32 on both."""

    name: str

    @property
    def exact(self) -> dict[str, Any]:
        """Settings with which company never changes a bit."""
        return {} if self.name == "cpu" else {"deterministic": True}

    @property
    def rules(self) -> dict[str, Any]:
        """Sampling rules of requests that are served alone."""
        return {} if self.name == "cpu" else {"logprobs": 2}

    def running(self, folder: Path, **settings: Any) -> AbstractAsyncContextManager[Engine]:
        return running(folder, **{"device": self.name, "dtype": "float32", **settings})

    async def alone(self, engine: Engine, request: Request) -> Answer:
        """The first choice's answer; `request` was made with `rules`."""
        tokens, margins = [], []
        for delta in (await answer_deltas(engine, request))[0]:
            tokens += delta.token_ids
            for entry in delta.logprobs or ():
                margins.append(entry.top_logprobs[0] - entry.top_logprobs[1])
        return Answer(tokens, margins)

    def check(self, got: list[list[int]], wanted: list[Answer], label: str = "") -> None:
        """Fails unless the answers are the same, as far as they must be here."""
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
