"""llama.cpp's answers: events while an answer grows, or one object for each prompt.

Owner: loop, one LlamaEvents per answer. In: the choices of an Answer, one per prompt. Out: frames, or dicts for orjson.
A stream has no [DONE]: the last event of a prompt has `stop`, the reason of the end and the times.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import orjson

from engine.base.request import Progress, TokenLogprob
from server.answers.answer import Answer
from server.answers.choice import Choice
from server.errors import ApiError
from server.http.sse import SSE
from server.output.choices import echo_text, progress_of
from server.output.logprobs import TokenNames

dumps = orjson.dumps
STOPS = {"stop": "eos", "length": "limit"}  # finish reason -> stop_type


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the client wants in its answer."""

    model: str
    settings: dict[str, Any]  # generation_settings
    top: int | None  # likeliest tokens at each place; None: no log-probabilities
    tokens: bool  # ids of the tokens
    fields: tuple[str, ...]  # names of fields; (): all
    silent: bool  # the client wants no text, only the prompt to be computed


class LlamaEvents:
    """The frames and bodies of one answer."""

    form = SSE
    done = b""

    def __init__(self, answer: Answer, wanted: Wanted) -> None:
        self.answer = answer
        self.wanted = wanted
        self.names = TokenNames(answer.state.tokenizer)

    def chunks(self, choice: Choice) -> bytes:
        ended = choice.finish_reason is not None
        if not ended and (self.wanted.silent or not choice.has_text):
            return b""
        choice.started = True
        text, token_ids, entries = choice.drain()
        event = {**self.head(choice), **self.grown("" if self.wanted.silent else text, token_ids, entries)}
        if not ended:
            return b"data: " + dumps({**event, "stop": False, **self.counts(choice)}) + b"\n\n"
        first = b""
        if event["content"]:
            first = b"data: " + dumps({**event, "stop": False, **self.counts(choice)}) + b"\n\n"
            event = {**self.head(choice), **self.grown("", [], [])}
        return first + b"data: " + dumps(self.selected({**event, **self.ending(choice)})) + b"\n\n"

    def plain(self, choice: Choice) -> tuple[bytes, bytes] | None:
        return None  # each event counts the tokens

    def progress(self, choice: Choice, progress: Progress) -> bytes:
        event = {**self.head(choice), **self.grown("", [], []), "stop": False, **self.counts(choice)}
        return b"data: " + dumps(event | progress_of(progress)) + b"\n\n"

    def usage(self) -> bytes:
        return b""

    def error(self, error: ApiError) -> bytes:
        return b"data: " + error.body() + b"\n\n"

    def whole(self, as_list: bool) -> Any:
        """The answer of one prompt, or of a list of prompts."""
        made = [self.selected(self.body(choice)) for choice in self.answer.choices]
        return made if as_list else made[0]

    def body(self, choice: Choice) -> dict[str, Any]:
        text, token_ids, entries = choice.drain()
        ids = token_ids if self.wanted.tokens else []
        grown = self.grown("" if self.wanted.silent else text, ids, entries)
        return {**self.head(choice), **grown, **self.ending(choice)}

    def head(self, choice: Choice) -> dict[str, Any]:
        return {"index": choice.index, "id_slot": -1}

    def grown(self, text: str, token_ids: list[int], entries: list[TokenLogprob]) -> dict[str, Any]:
        """The text, its tokens and their log-probabilities."""
        found: dict[str, Any] = {"content": text, "tokens": [] if self.wanted.silent else token_ids}
        if self.wanted.top is not None and entries and not self.wanted.silent:
            found["completion_probabilities"] = [self.probability(entry, self.wanted.top) for entry in entries]
        return found

    def probability(self, entry: TokenLogprob, top: int) -> dict[str, Any]:
        pairs = zip(entry.top_ids[:top], entry.top_logprobs[:top])
        likeliest = [{"id": token, **self.names.token(token, logprob)} for token, logprob in pairs]
        return {"id": entry.token_id, **self.names.token(entry.token_id, entry.logprob), "top_logprobs": likeliest}

    def counts(self, choice: Choice) -> dict[str, Any]:
        count = 0 if self.wanted.silent else choice.num_tokens
        return {"tokens_predicted": count, "tokens_evaluated": choice.job.num_tokens}

    def ending(self, choice: Choice) -> dict[str, Any]:
        """The fields of a finished answer."""
        reason, word = choice.finish_reason or "", choice.stop_reason
        is_word = reason == "stop" and isinstance(word, str)
        counts = self.counts(choice)
        return {
            "stop": True,
            "model": self.wanted.model,
            **counts,
            "tokens_cached": counts["tokens_evaluated"] + counts["tokens_predicted"],
            "generation_settings": self.wanted.settings,
            "prompt": echo_text(self.answer.state.tokenizer, choice.job.prompt),
            "truncated": False,
            "stop_type": "word" if is_word else STOPS.get(reason, "none"),
            "stopping_word": word if is_word else "",
            "timings": self.timings(choice),
        }

    def timings(self, choice: Choice) -> dict[str, Any]:
        """Counts and times; a number of tokens in a second is 0 without time."""
        exchange, now = self.answer.exchange, time.monotonic()
        begun = exchange.arrival + exchange.queued_s if exchange.queued_s >= 0 else now
        first = choice.first_at or now
        cached = max(0, self.answer.cached_tokens[choice.index])
        prompt, predicted = choice.job.num_tokens - cached, self.counts(choice)["tokens_predicted"]
        prompt_ms, predicted_ms = 1000 * max(0.0, first - begun), 1000 * max(0.0, (choice.last_at or now) - first)
        return {
            "cache_n": cached,
            "prompt_n": prompt,
            "prompt_ms": prompt_ms,
            "prompt_per_token_ms": prompt_ms / max(prompt, 1),
            "prompt_per_second": 1000 * prompt / prompt_ms if prompt_ms else 0.0,
            "predicted_n": predicted,
            "predicted_ms": predicted_ms,
            "predicted_per_token_ms": predicted_ms / max(predicted, 1),
            "predicted_per_second": 1000 * predicted / predicted_ms if predicted_ms else 0.0,
        }

    def selected(self, body: dict[str, Any]) -> dict[str, Any]:
        """The requested fields; a path of a nested field is the field's name."""
        if not self.wanted.fields:
            return body
        found = {}
        for path in self.wanted.fields:
            value: Any = body
            for name in path.split("/"):
                value = value.get(name) if isinstance(value, dict) else None
            if value is not None:
                found[path] = value
        return found
