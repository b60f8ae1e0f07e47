"""Ollama's options as our sampling fields: converted, refused by name, or passed as hints without effect.

Owner: loop, pure functions. In: `options` of a body. Out: arguments for SamplingFields. Defaults are the model's and
the operator's, not Ollama's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from server.errors import from_validation, invalid, quoted

# Option -> our field.
OURS = {
    "temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "seed": "seed", "stop": "stop",
    "repeat_penalty": "repetition_penalty", "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty", "num_predict": "max_tokens",
}  # fmt: skip
THEIRS = {ours: theirs for theirs, ours in OURS.items()}
# Option -> (values that switch it off, advice).
REFUSED: dict[str, tuple[tuple[float, ...], str]] = {
    "mirostat": ((0,), "leave it out and use temperature and top_p"),
    "tfs_z": ((1,), "leave it out and use min_p"),
    "typical_p": ((1,), "leave it out and use min_p"),
    "repeat_last_n": ((-1, 0), "repeat_penalty counts the whole text (-1), or nothing (0)"),
}
# Our field -> the client's, in errors.
NAMES = {ours: f"options.{theirs}" for ours, theirs in THEIRS.items()} | dict.fromkeys(
    ("response_format", "response_format.json_schema", "response_format.json_schema.schema"), "format"
)


class Converted(msgspec.Struct, kw_only=True):
    """Types of the options that change an answer."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    num_predict: int | None = None
    num_ctx: int | None = None


@dataclass(frozen=True, slots=True)
class Read:
    """Options that have been read."""

    fields: dict[str, Any] = field(default_factory=dict)  # arguments for SamplingFields, without max_tokens
    max_tokens: int | None = None  # None: no limit but the context
    num_ctx: int | None = None  # the longest prompt; None: no limit but the context


def read_options(options: dict[str, Any] | None) -> Read:
    """Convert `options`. Raises ApiError with the option's path."""
    if not options:
        return Read()
    for name, (off, advice) in REFUSED.items():
        value = options.get(name)
        if value is not None and value not in off:
            allowed = " or ".join(map(str, off))
            raise invalid(f"options.{name}", f"options.{name}: got {quoted(value)}; must be {allowed}: {advice}")
    try:
        found = msgspec.convert(options, Converted)
    except msgspec.ValidationError as error:
        refusal = from_validation(error)
        raise invalid(f"options.{refusal.param}", f"options.{refusal.message}") from None
    fields = {ours: value for theirs, ours in OURS.items() if (value := getattr(found, theirs)) is not None}
    if options.get("repeat_last_n") == 0:
        fields.pop("repetition_penalty", None)
    most = fields.pop("max_tokens", None)
    if found.num_ctx is not None and found.num_ctx < 1:
        raise invalid("options.num_ctx", f"options.num_ctx: got {found.num_ctx}; must be at least 1")
    return Read(fields, None if most is None or most <= 0 else most, found.num_ctx)
