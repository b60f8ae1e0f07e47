"""SGLang's answers: an object for each choice, whole or as events, each of which has the whole text so far.

Owner: loop, one SglangEvents per answer. In: the choices of an Answer. Out: bytes. What repeats in every event is
encoded once and grows as bytes, so an event costs a copy and not another encoding of the text.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from engine.base.request import Progress, TokenLogprob
from server.answers.answer import Answer
from server.answers.choice import Choice
from server.dialects.sglang.asking import One
from server.errors import ApiError
from server.http.sse import DONE, SSE
from server.output.choices import progress_of
from server.output.logprobs import finite
from server.routes.models import WEIGHTS

dumps = orjson.dumps
Triple = tuple[float | None, int, str | None]  # log-probability, token id, text


@dataclass(slots=True)
class Grown:
    """An answer so far: the inside of JSON strings and lists."""

    text: bytearray = field(default_factory=bytearray)
    ids: bytearray = field(default_factory=bytearray)
    logprobs: bytearray = field(default_factory=bytearray)
    tops: bytearray = field(default_factory=bytearray)
    by_id: bytearray = field(default_factory=bytearray)
    last: int = -1  # the newest token


def extend(inside: bytearray, values: Sequence[Any]) -> None:
    """Append values to the inside of a JSON list."""
    if values:
        if inside:
            inside += b","
        inside += dumps(values)[1:-1]


class SglangEvents:
    """The objects of one answer."""

    form = SSE
    done = DONE

    def __init__(self, answer: Answer, ones: Sequence[One], names: Sequence[str], texts: bool, is_list: bool) -> None:
        """`names`: the id of each choice; `texts`: log-probabilities have texts; `is_list`: several objects."""
        self.answer = answer
        self.ones = ones
        self.names = names
        self.texts = texts
        self.is_list = is_list
        self.n = answer.asked.n
        self.grown = [Grown() for _ in answer.choices]
        self.prompts: dict[int, dict[str, Any]] = {}  # log-probabilities of prompts, by number

    def chunks(self, choice: Choice) -> bytes:
        silent = self.ones[choice.index // self.n].is_silent
        if choice.finish_reason is None and (silent or not choice.num_held):
            return b""
        choice.started = True
        return b"data: " + self.object(choice) + b"\n\n"

    def plain(self, choice: Choice) -> tuple[bytes, bytes] | None:
        return None  # each event counts the tokens

    def progress(self, choice: Choice, progress: Progress) -> bytes:
        return b"data: " + self.object(choice)[:-1] + b"," + dumps(progress_of(progress))[1:] + b"\n\n"

    def usage(self) -> bytes:
        return b""

    def error(self, error: ApiError) -> bytes:
        return b"data: " + error.body() + b"\n\n"

    def whole(self) -> bytes:
        """The object of the one choice, or a list of all."""
        made = [self.object(choice) for choice in self.answer.choices]
        return b"[" + b",".join(made) + b"]" if self.is_list else made[0]

    def object(self, choice: Choice) -> bytes:
        """The choice as it is now."""
        one, grown = self.ones[choice.index // self.n], self.grown[choice.index]
        text, token_ids, entries = choice.drain()
        if token_ids:
            grown.last = token_ids[-1]
        if not one.is_silent:
            grown.text += dumps(text)[1:-1]
            extend(grown.ids, token_ids)
            if one.has_logprobs:
                self.add_logprobs(grown, one, entries)
        head = b'{"index":%d,"text":"' % choice.index if self.is_list else b'{"text":"'
        about = head + grown.text + b'","output_ids":[' + grown.ids + b'],"meta_info":'
        return about + dumps(self.meta(choice, one))[:-1] + self.lists(one, grown) + b"}}"

    def add_logprobs(self, grown: Grown, one: One, entries: Sequence[TokenLogprob]) -> None:
        extend(grown.logprobs, [self.triple(entry.token_id, entry.logprob) for entry in entries])
        extend(grown.tops, [self.tops(entry, one.top) for entry in entries] if one.top else [])
        if one.token_ids:
            extend(grown.by_id, [self.by_id(entry, one) for entry in entries])

    def lists(self, one: One, grown: Grown) -> bytes:
        """The log-probabilities of the answer as fields of `meta_info`."""
        if not one.has_logprobs:
            return b""
        found = b',"output_token_logprobs":[' + grown.logprobs + b"]"
        if one.top:
            found += b',"output_top_logprobs":[' + grown.tops + b"]"
        if one.token_ids:
            found += b',"output_token_ids_logprobs":[' + grown.by_id + b"]"
        return found

    def meta(self, choice: Choice, one: One) -> dict[str, Any]:
        """`meta_info`, without the log-probabilities of the answer."""
        at, ended = choice.index // self.n, choice.finish_reason is not None
        found: dict[str, Any] = {
            "id": self.names[choice.index],
            "finish_reason": self.ending(choice, one) if ended else None,
            "prompt_tokens": choice.job.num_tokens,
            "completion_tokens": 0 if one.is_silent else choice.num_tokens,
            "cached_tokens": max(0, self.answer.cached_tokens[at]),
            "weight_version": WEIGHTS,
        }
        if ended:
            found["e2e_latency"] = time.monotonic() - self.answer.exchange.arrival
        if ended and choice.routed_experts is not None:
            length = choice.job.num_tokens + choice.num_tokens - 1  # the newest token has not been computed
            experts = choice.routed_experts[:length].astype("<i4")
            found["routed_experts"] = base64.b64encode(experts.tobytes()).decode()
        return found | (self.of_prompt(at, choice, one) if one.has_logprobs else {})

    def ending(self, choice: Choice, one: One) -> dict[str, Any]:
        """The cause of the end: a length, or the token or the text that matched."""
        reason, matched = choice.finish_reason, choice.stop_reason
        if one.is_silent or reason == "length":
            return {"type": "length", "length": 0 if one.is_silent else choice.num_tokens}
        if reason != "stop":
            return {"type": reason, "message": "the answer was ended before its end"}
        last = self.grown[choice.index].last
        if matched is None and last in one.asked.params.eos_token_ids:
            matched = last
        return {"type": "stop", "matched": matched}

    def of_prompt(self, at: int, choice: Choice, one: One) -> dict[str, Any]:
        """The log-probabilities of a prompt from `logprob_start_len` on; the first token has none, as in SGLang."""
        if at not in self.prompts:
            entries = self.answer.prompt_logprobs[at] if one.start >= 0 else None
            ids = choice.job.request.prompt_token_ids[one.start :].tolist() if entries else []
            rest = [entry for entry in (entries or [])[one.start + 1 :] if entry is not None]
            values = [None, *(entry.logprob for entry in rest)]
            made: dict[str, Any] = {"input_token_logprobs": [self.triple(*pair) for pair in zip(ids, values)]}
            if one.top:
                made["input_top_logprobs"] = [None, *(self.tops(entry, one.top) for entry in rest)][: len(ids)]
            if one.token_ids:
                made["input_token_ids_logprobs"] = [None, *(self.by_id(entry, one) for entry in rest)][: len(ids)]
            self.prompts[at] = made
        return self.prompts[at]

    def tops(self, entry: TokenLogprob, top: int) -> list[Triple]:
        return [self.triple(*pair) for pair in zip(entry.top_ids[:top], entry.top_logprobs[:top])]

    def by_id(self, entry: TokenLogprob, one: One) -> list[Triple]:
        """The tokens that the client named."""
        found = dict(zip(entry.top_ids[one.top :], entry.top_logprobs[one.top :]))
        return [self.triple(token, found[token]) for token in one.token_ids]

    def triple(self, token: int, logprob: float | None) -> Triple:
        text = self.answer.state.tokenizer.token_text(token) if self.texts else None
        return None if logprob is None else finite(logprob), token, text
