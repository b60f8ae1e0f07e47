"""Response objects: what is echoed of the request, output items, usage, and the state of all that.

Owner: loop. In: the checked request, and the one Choice of an Answer. Out: dicts for orjson. Nested values of a client
are only echoed where they were checked first (metadata, tools). A response has exactly one message item, if need be
with an empty text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import orjson

from engine.request import TokenLogprob
from server.answer import Answer
from server.choice import Choice
from server.errors import ApiError
from server.output.logprobs import TokenNames
from server.output.response_record import text_content

Item = dict[str, Any]


class ResponseObject:
    """One response: constant fields now, the rest as it comes."""

    def __init__(self, name: str, echo: dict[str, Any], names: TokenNames, top: int) -> None:
        self.name = name
        self.item_id = f"msg_{uuid4().hex}"
        self.echo = echo  # created_at and what the client sent, checked, with defaults
        self.names = names
        self.top = top  # log-probabilities at each place

    def at(
        self,
        status: str,
        output: Sequence[Item] = (),
        *,
        usage: dict[str, Any] | None = None,
        error: dict[str, str] | None = None,
        incomplete: str | None = None,
    ) -> dict[str, Any]:
        return {
            "id": self.name,
            "object": "response",
            **self.echo,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": incomplete} if incomplete else None,
            "output": list(output),
            "usage": usage,
        }

    def whole(self, answer: Answer) -> dict[str, Any]:
        """The last state of an answer that nobody has read yet."""
        text, _, entries = answer.choices[0].drain()
        return self.ended(answer, text, orjson.Fragment(self.encoded(entries)))

    def encoded(self, entries: list[TokenLogprob]) -> bytes:
        """Log-probabilities as JSON, made once: several events and the store repeat them."""
        return orjson.dumps(self.names.chat(entries, self.top)["content"]) if entries else b"[]"

    def ended(self, answer: Answer, text: str, logprobs: orjson.Fragment) -> dict[str, Any]:
        """The last state of a choice that has ended."""
        choice = answer.choices[0]
        status, incomplete = status_of(choice)
        item = self.message(text, logprobs, "completed" if status == "completed" else "incomplete")
        return self.at(status, [item], usage=usage_of(answer), incomplete=incomplete)

    def failed(self, error: ApiError) -> dict[str, Any]:
        return self.at("failed", error={"code": code_of(error), "message": error.message})

    def message(self, text: str, logprobs: orjson.Fragment, status: str) -> Item:
        return {
            "id": self.item_id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": [text_content(text, logprobs)],
        }


def status_of(choice: Choice) -> tuple[str, str | None]:
    """(status, reason of an incomplete one)."""
    if choice.finish_reason == "stop":
        return "completed", None
    if choice.finish_reason == "abort":
        return "cancelled", None
    return "incomplete", "max_output_tokens"


def code_of(error: ApiError) -> str:
    """The protocol's word for a fault."""
    return "rate_limit_exceeded" if error.status == 429 else "server_error"


def usage_of(answer: Answer) -> dict[str, Any]:
    usage = answer.usage()
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "cache_write_tokens": 0,
        },
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
        "total_tokens": usage["total_tokens"],
    }
