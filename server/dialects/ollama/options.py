"""Ollama's options as our sampling fields, by the table of server/foreign_fields.py.

Owner: loop, pure functions. In: `options` of a body. Out: arguments for SamplingFields. Defaults are the model's and
the operator's, not Ollama's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from server.errors import from_validation, invalid, quoted
from server.http.foreign_body import translated

# Our fields that options may set; all others of a request are fields of the body.
OURS = (
    "temperature", "top_k", "top_p", "min_p", "seed", "stop", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "max_tokens", "min_tokens", "ignore_eos", "stop_token_ids", "bad_words",
)  # fmt: skip
OWN = ("num_ctx", "repeat_last_n")  # options that are read here
THEIRS = {"max_tokens": "num_predict", "repetition_penalty": "repeat_penalty"}
# Our field -> the client's, in errors.
NAMES = {ours: f"options.{THEIRS.get(ours, ours)}" for ours in OURS} | dict.fromkeys(
    ("response_format", "response_format.json_schema", "response_format.json_schema.schema"), "format"
)


class Converted(msgspec.Struct, kw_only=True):
    """Types of what options set."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    num_ctx: int | None = None


@dataclass(frozen=True, slots=True)
class Read:
    """Options that have been read."""

    fields: dict[str, Any] = field(default_factory=dict)  # arguments for SamplingFields, without max_tokens
    max_tokens: int | None = None  # None: no limit but the context
    num_ctx: int | None = None  # the longest prompt; None: no limit but the context
    ignored: tuple[str, ...] = ()  # paths of options without effect


def read_options(options: dict[str, Any] | None) -> Read:
    """Convert `options`. Raises ApiError with the option's path."""
    if not options:
        return Read()
    made = translated(options, OURS, "options.", passes=OWN)
    given = {name: value for name, value in options.items() if name in OURS or name == "num_ctx"} | made.settings
    try:
        found = msgspec.convert(given, Converted)
    except msgspec.ValidationError as error:
        refusal = from_validation(error).as_sent(NAMES | {"num_ctx": "options.num_ctx"})
        raise refusal from None
    window = options.get("repeat_last_n")
    if window not in (None, -1, 0):
        text = (
            f"options.repeat_last_n: got {quoted(window)}; must be -1 or 0: repeat_penalty counts the whole text, or "
        )
        raise invalid("options.repeat_last_n", text + "nothing")
    fields = {name: value for name in OURS if (value := getattr(found, name)) is not None}
    if window == 0:
        fields.pop("repetition_penalty", None)
    most = fields.pop("max_tokens", None)
    if found.num_ctx is not None and found.num_ctx < 1:
        raise invalid("options.num_ctx", f"options.num_ctx: got {found.num_ctx}; must be at least 1")
    return Read(fields, most or None, found.num_ctx, tuple(made.ignored))
