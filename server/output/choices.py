"""Choices: turns the engine's Deltas into text and events, and makes the bodies of finished choices and of `usage`.

Owner: the loop; one ChoiceStream per choice of a request. In: Delta. Out: Piece (text that can be sent, the tokens and
log-probabilities that belong to it, and at the end the reason), and plain dicts ready for orjson.

    Delta (token ids) -> ChoiceStream.take -> Piece -> a chunk of a stream, or gathered into one body
                             └ stop string found: Piece.stop_engine: the caller must end the choice
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from _fast.detok import TokenTable
from engine.base.request import Delta, FinishReason, Progress, TokenLogprob
from server.output.events import Call, Event
from server.output.parser import OutputParser
from server.output.repetition import Repetition, RepetitionWatch
from server.output.text import StopStrings, TextStream
from server.render.prompt import Prompt
from server.render.tokenizer import Tokenizer

# Ends by a token that is not part of the text.
ENDED_BY_TOKEN = (FinishReason.STOP, FinishReason.STOP_TOKEN)


@dataclass(slots=True)
class Piece:
    """The text, tokens and end that one Delta adds to a choice."""

    text: str
    token_ids: list[int]  # up to and including the one that completed a stop string
    logprobs: list[TokenLogprob] | None = None  # one per token id
    finish_reason: str | None = None
    stop_reason: int | str | None = None  # the stop token's id or the stop string; None for EOS
    events: list[Event] | None = None  # the parser's events for the text
    stop_engine: bool = False  # the text has ended, but not in the engine: call TokenStream.stop_choice


class ChoiceStream:
    """One choice as it grows. `parser` turns its text into events; `table` then has a character for each marker."""

    __slots__ = (
        "_feed",
        "_gated",
        "_include_stop",
        "_runs_free",
        "_watch",
        "ended",
        "index",
        "parser",
        "plain",
        "text",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        index: int = 0,
        stop: Sequence[str] | StopStrings = (),
        *,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        repetition: Repetition | None = None,
        parser: OutputParser | None = None,
        table: TokenTable | None = None,
    ) -> None:
        self.index = index
        self.ended = False
        self.parser = parser
        self.text = TextStream(
            tokenizer,
            stop,
            include_stop=include_stop,
            skip_special_tokens=skip_special_tokens,
            min_tokens=min_tokens,
            table=table,
        )
        self._include_stop = include_stop
        self._watch = None if repetition is None else RepetitionWatch(repetition, min_tokens)
        self._feed = self.text.feed
        self._runs_free = self._watch is None and self.text.stops.compiled is None  # only the engine can end the choice
        # Stop strings are the client's rule about the answer, and reasoning is not part of it.
        self._gated = parser is not None and self.text.stops.compiled is not None
        if parser is not None and self._gated and not parser.answering:
            parser.gate()
            self.text.pause()
        self.plain = self._runs_free and parser is None  # and its text is sent unchanged

    @property
    def num_tokens(self) -> int:
        """Number of generated tokens, including the one that ended the choice."""
        return self.text.machine.num_tokens

    def grow(self, delta: Delta) -> str | None:
        """The new text, if nothing can end with this Delta; None if `take` must be called instead. Once per token."""
        if not self.plain or delta.finish_reason or self.ended:
            return None
        return self._feed(delta.token_ids)

    def parse(self, delta: Delta) -> list[Event] | None:
        """The new events of a parsed choice, if nothing can end with this Delta; None as for `grow`."""
        parser = self.parser
        if parser is None or not self._runs_free or delta.finish_reason or self.ended:
            return None
        for token_id in delta.token_ids:
            parser.feed(self._feed((token_id,)))
        return parser.take()

    def take(self, delta: Delta) -> Piece:
        """Process the next Delta of this choice. A Delta after a stop string adds nothing."""
        if self.ended:
            return Piece("", [])
        runs_on, before = not delta.finish_reason, self.num_tokens
        if self._watch is not None and (said := self._watch.feed(delta.token_ids)):
            delta = _repeated(delta, said)
        ids, reason = delta.token_ids, delta.finish_reason
        read = self._feed if self.parser is None else self._parse
        if reason in ENDED_BY_TOKEN and not self._include_stop:
            text = read(ids[:-1])
            self.text.skip(len(ids[-1:]))
        else:
            text = read(ids)
        if reason and self.text.stopped is None:
            text += self.text.finish() if self.parser is None else self._rest(reason is FinishReason.LENGTH)
        if self.text.stopped is not None:
            return self._stopped(delta, text, self.num_tokens - before, runs_on)
        piece = Piece(text, ids, delta.logprobs, stop_engine=runs_on and bool(reason))
        if self.parser is not None:
            piece.events = self._events(bool(reason), reason is FinishReason.LENGTH)
        if reason:
            self.ended = True
            piece.finish_reason = reason.wire
            piece.stop_reason = delta.stop_token_id if reason is FinishReason.STOP_TOKEN else None
            if self.text.stopped is not None:
                piece.finish_reason, piece.stop_reason = "stop", self.text.stopped
        return piece

    def _parse(self, ids: Sequence[int]) -> str:
        """The text of tokens. Feeds the parser token by token, so that it can count the tokens of reasoning."""
        assert self.parser is not None
        texts = []
        for token_id in ids:
            texts.append(self._feed((token_id,)))
            self.parser.feed(texts[-1])
            if self._gated:
                self._switch(texts)
            if self.text.stopped is not None:
                break
        return "".join(texts)

    def _switch(self, texts: list[str]) -> None:
        """Match stop strings if the newest text is of the answer, and none in reasoning; updates the newest of the
        `texts`.
        """
        assert self.parser is not None
        more = ""
        if self.parser.answering and self.text.paused:
            again, mark = self.parser.given_back(), self.parser.end_mark
            more = self.text.resume(mark if mark in self.text.stops.forms else again)  # clients may stop at the marker
            texts[-1] = texts[-1][: max(0, len(texts[-1]) - len(again))]
        elif not self.parser.answering and not self.text.paused:
            more = self.text.pause()
        texts[-1] += more
        self.parser.feed(more)

    def _rest(self, cut: bool) -> str:
        """End the text; returns the text that was held back, after feeding it to the parser. A call that is `cut` ends
        without half a character.
        """
        assert self.parser is not None
        text = self.text.finish()
        if cut and self.parser.in_call:
            text = text.rstrip("\ufffd")
        if text:
            self.parser.feed(text)
        return text

    def _events(self, ended: bool, cut: bool = False) -> list[Event] | None:
        """The parser's events since the last call."""
        if self.parser is None:
            return None
        if ended:
            self.parser.finish(cut)
            if self._gated and (again := self.parser.given_back()):  # only the end decided that it is no reasoning
                self.parser.feed(self.text.resume(again))
                self.parser.finish(cut)
        return self.parser.take()

    def _stopped(self, delta: Delta, text: str, num_tokens: int, runs_on: bool) -> Piece:
        self.ended = True
        return Piece(
            text,
            delta.token_ids[:num_tokens],
            None if delta.logprobs is None else delta.logprobs[:num_tokens],
            "stop",
            self.text.stopped,
            events=self._events(True),
            stop_engine=runs_on,
        )


def _repeated(delta: Delta, said: int) -> Delta:
    """The Delta up to the token that completed a repetition; if the Delta itself ends at that token, it is
    unchanged.
    """
    if delta.finish_reason and said == len(delta.token_ids):
        return delta
    logprobs = None if delta.logprobs is None else delta.logprobs[:said]
    return Delta(delta.index, delta.token_ids[:said], FinishReason.REPETITION, logprobs=logprobs)


def reasoning_names(field: str) -> tuple[str, ...]:
    """The field names under which chat sends reasoning."""
    return ("reasoning", "reasoning_content") if field == "both" else (field,)


def chat_message(
    content: str | None,
    *,
    role: str = "assistant",
    reasoning: str | None = None,
    reasoning_field: str = "both",
    tool_calls: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """`message` of a chat choice. Reasoning is sent under both names, unless the server is set to one."""
    message: dict[str, Any] = {"role": role, "content": content, "refusal": None}
    if reasoning is not None:
        message.update(dict.fromkeys(reasoning_names(reasoning_field), reasoning))
    if tool_calls:
        message["tool_calls"] = list(tool_calls)
    return message


def chat_call(call: Call) -> dict[str, Any]:
    """One entry of `tool_calls` of a message."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def chat_choice(
    index: int,
    message: dict[str, Any],
    finish_reason: str | None,
    stop_reason: int | str | None = None,
    *,
    logprobs: dict[str, Any] | None = None,
    token_ids: list[int] | None = None,
) -> dict[str, Any]:
    """One entry of `choices` of a chat completion."""
    choice: dict[str, Any] = {
        "index": index,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": finish_reason,
        "stop_reason": stop_reason,
    }
    if token_ids is not None:
        choice["token_ids"] = token_ids
    return choice


def completion_choice(
    index: int,
    text: str,
    finish_reason: str | None,
    stop_reason: int | str | None = None,
    *,
    logprobs: dict[str, Any] | None = None,
    prompt_logprobs: list[Any] | None = None,
    prompt_token_ids: list[int] | None = None,
    token_ids: list[int] | None = None,
) -> dict[str, Any]:
    """One entry of `choices` of a text completion, whole or a chunk."""
    choice: dict[str, Any] = {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": finish_reason,
        "stop_reason": stop_reason,
        "prompt_logprobs": prompt_logprobs,
    }
    if prompt_token_ids is not None:
        choice["prompt_token_ids"] = prompt_token_ids
    if token_ids is not None:
        choice["token_ids"] = token_ids
    return choice


def usage(
    prompt_tokens: int,
    completion_tokens: int,
    *,
    cached_tokens: int = 0,
    multimodal_tokens: Mapping[str, int] | None = None,
    reasoning_tokens: int = 0,
) -> dict[str, Any]:
    """`usage` of generation endpoints; both details are always included."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": max(0, min(cached_tokens, prompt_tokens - 1)),
            "multimodal_tokens": dict(multimodal_tokens) if multimodal_tokens else None,
        },
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }


def progress_of(progress: Progress) -> dict[str, Any]:
    """`prompt_progress` of streams, in the form of llama.cpp's server."""
    total, cached, computed, seconds = progress
    return {
        "prompt_progress": {"total": total, "cache": cached, "processed": computed, "time_ms": round(1000 * seconds, 3)}
    }


def echo_text(tokenizer: Tokenizer, prompt: Prompt) -> str:
    """The prompt for `echo`: the client's text, or the decoded token ids."""
    return prompt.text if prompt.text is not None else tokenizer.decode(prompt.token_ids)
