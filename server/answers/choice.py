"""Choice: one choice of an answer as it grows.

Owner: loop. In: Deltas of the engine; most plain tokens bypass it through a lane (_fast/lane), which shares its
detokenizer and its clock. Out: text or a parser's events, token ids and log-probabilities that are not sent yet,
merged, and the reason of its end.
"""

from __future__ import annotations

import numpy as np

from _fast.lane import Lane
from engine.base.request import Delta, TokenLogprob
from server.jobs.job import Job
from server.output.choices import ChoiceStream
from server.output.events import CallEnd, CallStart, Content, Event, merged


class Choice:
    """Unsent text, tokens and log-probabilities are merged until `drain`. Owner: loop."""

    __slots__ = (
        "_events",
        "_last_at",
        "_logprobs",
        "_texts",
        "_token_ids",
        "finish_reason",
        "first_at",
        "index",
        "job",
        "lane",
        "num_calls",
        "owed",
        "routed_experts",
        "said",
        "started",
        "stop_reason",
        "stream",
    )

    def __init__(self, index: int, job: Job, stream: ChoiceStream) -> None:
        self.index = index
        self.job = job
        self.stream = stream
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.owed: tuple[str, int | str | None] | None = None  # end reasons until its experts come
        self.routed_experts: np.ndarray | None = None  # [prompt and at least its tokens, layers, experts of each]
        self.said: list[str] | None = None  # its text so far, if answers are logged
        self.started = False  # whether its first chunk has been framed
        self.lane: Lane | None = None  # the lane of most of its tokens, which also counts and times them
        self.first_at = 0.0  # time.monotonic() of the first token
        self._last_at = 0.0
        self.num_calls = 0  # tool calls, if a parser reads the answer
        self._events: list[Event] = []
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []

    @property
    def num_tokens(self) -> int:
        return self.stream.num_tokens

    def take(self, delta: Delta) -> bool:
        """Add a delta. Returns whether the caller must stop the choice in the engine, because only its text
        has ended.
        """
        text = self.stream.grow(delta)
        if text is not None:
            if text:
                self._texts.append(text)
            self._token_ids += delta.token_ids
            if delta.logprobs:
                self._logprobs += delta.logprobs
            return False
        parses = self.stream.parser is not None and self.said is None
        if parses and (events := self.stream.parse(delta)) is not None:
            self._add_events(events, "")
            self._token_ids += delta.token_ids
            if delta.logprobs:
                self._logprobs += delta.logprobs
            return False
        piece = self.stream.take(delta)
        if piece.events is not None:
            self._add_events(piece.events, piece.text)
        elif piece.text:
            self._texts.append(piece.text)
        self._token_ids += piece.token_ids
        if piece.logprobs:
            self._logprobs += piece.logprobs
        if piece.finish_reason is not None:
            self.finish_reason, self.stop_reason = piece.finish_reason, piece.stop_reason
        return piece.stop_engine

    def wait_for_experts(self) -> None:
        """Hold back the end of a choice that has ended by its text, until `settle`."""
        assert self.finish_reason is not None
        self.owed = self.finish_reason, self.stop_reason
        self.finish_reason = self.stop_reason = None

    def settle(self) -> None:
        """End the choice with the reasons that were held back."""
        assert self.owed is not None
        (self.finish_reason, self.stop_reason), self.owed = self.owed, None

    def _add_events(self, events: list[Event], text: str) -> None:
        if events:
            self.num_calls += sum(type(event) is CallStart for event in events)
            self._events += events
        if self.said is not None:
            self.said.append(text)

    @property
    def reasoning_tokens(self) -> int:
        return 0 if self.stream.parser is None else self.stream.parser.reasoning_tokens

    @property
    def last_at(self) -> float:
        """time.monotonic() of the newest token."""
        return self._last_at if self.lane is None else self.lane.last_at

    @last_at.setter
    def last_at(self, now: float) -> None:
        if self.lane is None:
            self._last_at = now
        else:
            self.lane.last_at = now

    @property
    def num_held(self) -> int:
        """Number of tokens not sent yet."""
        return len(self._token_ids)

    @property
    def is_plain(self) -> bool:
        """Whether its tokens are only counted and detokenized."""
        return self.stream.plain and self.said is None

    @property
    def has_text(self) -> bool:
        """Whether text or an event waits to be sent; the end of a call is sent with the next event."""
        return bool(self._texts) or any(type(event) is not CallEnd for event in self._events)

    def held_bytes(self) -> int:
        """The approximate size of the unsent part, for the bound on slow readers."""
        return 64 * len(self._token_ids) + sum(len(entry.top_ids) + 4 for entry in self._logprobs) * 96

    def drain(self) -> tuple[str, list[int], list[TokenLogprob]]:
        """(text, token ids, log-probabilities) since the last call."""
        texts, self._texts = self._texts, []
        ids, self._token_ids = self._token_ids, []
        logprobs, self._logprobs = self._logprobs, []
        if self.said is not None:
            self.said += texts
        return (texts[0] if len(texts) == 1 else "".join(texts)), ids, logprobs

    def drain_events(self) -> tuple[list[Event], list[int], list[TokenLogprob]]:
        """(events, token ids, log-probabilities) since the last call; without a parser all text is content."""
        if self.stream.parser is None:
            text, ids, logprobs = self.drain()
            return ([Content(text)] if text else []), ids, logprobs
        events, self._events = self._events, []
        ids, self._token_ids = self._token_ids, []
        logprobs, self._logprobs = self._logprobs, []
        return (merged(events) if len(events) > 1 else events), ids, logprobs

    def drain_text(self) -> str:
        """The text of `drain`, for requests without token ids and log-probabilities."""
        texts = self._texts
        text = texts[0] if len(texts) == 1 else "".join(texts)
        if self.said is not None:
            self.said.append(text)
        texts.clear()
        self._token_ids.clear()
        return text
