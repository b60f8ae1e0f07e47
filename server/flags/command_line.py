"""Flags: made from the fields of Config's groups; their values, converted from text and bounded.

Owner: the command line (server/flags/arguments). A wrong value is a UsageError of one line.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from mm.limits import MediaLimits
from server.flags.config import Config
from server.flags.foreign_flags import meant
from server.flags.media_flags import LEAST, MEDIA_HELP, SPANS

GROUPS = {  # groups of Config and their headings in --help
    "server": "address, keys, names, browsers, stop and log",
    "limits": "what one request, or all of them, may take",
    "model": "which checkpoint, and how it is read",
    "chat": "chat templates, tool calls, reasoning",
    "media": "sources, formats, sizes and times of media",
    "speech": "transcription and translation of audio",
    "cache": "the cache of keys and values",
    "scheduler": "what runs in a step, and what waits",
    "traces": "timelines and spans",
    "pooling": "embeddings, scores and reranking",
    "rows": "embeddings as input",
    "lora": "adapters that requests name as their model",
    "health": "memory, probes and what ends a server",
    "batches": "uploaded files, and batches of requests",
    "ranks": "one model on several GPUs",
}
UNITS = {1 << 30: "GiB", 1 << 20: "MiB", 1 << 10: "KiB"}
SIZE = re.compile(r"([\d.]+) ?([KMGT])iB")


class UsageError(Exception):
    """Wrong flags or values; the text has a line for each of them."""

    @property
    def report(self) -> str:
        """The lines that the operator reads."""
        return "\n".join(f"omniloop: {line}" for line in str(self).split("\n"))


@dataclass(frozen=True, slots=True)
class Flag:
    """A field of a group of Config as a flag."""

    group: str
    field: str
    kind: Any  # the field's type
    default: Any
    hints: dict[str, Any]

    @property
    def name(self) -> str:
        return self.field.replace("_", "-")


def all_flags() -> dict[str, Flag]:
    """Every flag by its name (with dashes)."""
    return dict(_all_flags())


@cache
def _all_flags() -> dict[str, Flag]:
    """The same, made once: the types of the fields are texts, which take 4 ms to evaluate."""
    found: dict[str, Flag] = {}
    kinds = typing.get_type_hints(Config)
    for group in dataclasses.fields(Config):
        for name, entry in flags_of(kinds[group.name], group.name).items():
            assert name not in found, f"two fields named {entry.field}"
            found[name] = entry
    return found


def flags_of(section: type, group: str) -> dict[str, Flag]:
    """The fields of one dataclass as flags, by name."""
    found: dict[str, Flag] = {}
    kinds = typing.get_type_hints(section)
    for item in dataclasses.fields(section):
        hints = dict(item.metadata)
        if section is MediaLimits:
            if item.name not in MEDIA_HELP:
                continue
            hints = {"help": MEDIA_HELP[item.name], "low": LEAST.get(item.name, 0), "span": item.name in SPANS}
        default = item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
        entry = Flag(group, item.name, plain(kinds[item.name]), default, hints)
        found[entry.name] = entry
    return found


def plain(kind: Any) -> Any:
    """The type without `| None`; mappings become JSON objects."""
    if isinstance(kind, types.UnionType):
        kind = next(part for part in typing.get_args(kind) if part is not types.NoneType)
    return dict[str, Any] if typing.get_origin(kind) is Mapping else kind


def default_text(flag: Flag) -> str:
    """The default as `--help` prints it."""
    if isinstance(flag.default, bool):
        return "on" if flag.default else "off"
    if isinstance(flag.default, tuple):
        return ("-" if flag.hints.get("span") else " ").join(map(str, flag.default)) or "none"
    if isinstance(flag.default, dict):
        return json.dumps(flag.default) if flag.default else "none"
    if flag.default in ("", None):
        return "none"
    if flag.name.endswith("-bytes"):
        return size(flag.default)
    return f"{flag.default:g}" if isinstance(flag.default, float) else str(flag.default)


def size(count: int) -> str:
    """A number of bytes for people: `64 MiB`."""
    unit, name = next(((unit, name) for unit, name in UNITS.items() if count and count % unit == 0), (1, "bytes"))
    return f"{count // unit} {name}" if count else "0"


def convert(flag: Flag, text: str) -> Any:
    """Convert the text of a flag to its value."""
    kind, origin = flag.kind, typing.get_origin(flag.kind)
    if other := meant(flag.name, text):
        if not other.value:
            raise UsageError(f"--{flag.name} {text}: {other.advice}")
        print(f"omniloop: --{flag.name} {text}: {other.advice}; taken as {other.value}", file=sys.stderr)
        text = other.value
    if origin is Literal:
        choices = typing.get_args(kind)
        if text not in choices:
            raise UsageError(f"--{flag.name} {text}: must be one of {', '.join(map(str, choices))}")
        return text
    if origin is dict:
        value = json_object(text)
        if value is None:
            raise UsageError(f"--{flag.name} {text}: must be a JSON object such as '{{\"name\": 1}}'")
        return value
    if kind in (int, float):
        return in_range(flag, number(flag, text))
    return text


def json_object(text: str) -> dict[str, Any] | None:
    """A JSON object, or an object written as name=value,name=value; None if the text is neither."""
    try:
        if re.fullmatch(r"\w+=[^,=]+(,\w+=[^,=]+)*", text):
            return {name: json.loads(value) for name, value in (pair.split("=") for pair in text.split(","))}
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def number(flag: Flag, text: str) -> int | float:
    scale = {"k": 1000, "m": 1_000_000, "g": 10**9, "K": 1024, "M": 1 << 20, "G": 1 << 30}
    counts_tokens = flag.hints.get("tokens")
    try:
        if counts_tokens and text == "auto":
            return 0
        if flag.name.endswith("-bytes") and (found := SIZE.fullmatch(text)):
            return int(float(found[1]) * 1024 ** (1 + "KMGT".index(found[2])))
        if (counts_tokens or flag.name.endswith("-bytes")) and text[-1:] in scale:
            return int(float(text[:-1]) * scale[text[-1]])
        return flag.kind(text)
    except (ValueError, OverflowError):  # OverflowError: `infk`
        what = "a whole number" if flag.kind is int else "a number"
        what += ", such as 64MiB" if flag.name.endswith("-bytes") else ""
        raise UsageError(f"--{flag.name} {text}: must be {what}") from None


def in_range(flag: Flag, value: int | float) -> int | float:
    low, high = flag.hints.get("low"), flag.hints.get("high")
    if (low is not None and not value >= low) or (high is not None and not value <= high):
        bounds = f"{low} to {high}" if high is not None else f"at least {low}"
        raise UsageError(f"--{flag.name} {value}: must be {bounds}")
    return value


SWITCHED = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


def nested(path: list[str], text: str) -> dict[str, Any]:
    """`--flag.a.b text` as {"a": {"b": text}}; the text is read as JSON if possible."""
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    for key in reversed(path):
        value = {key: value}
    return value


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Merge both key by key; the later value wins."""
    both = {**old, **new}
    for key in old.keys() & new.keys():
        if isinstance(old[key], dict) and isinstance(new[key], dict):
            both[key] = merged(old[key], new[key])
    return both


def listed(flag: Flag, text: str) -> list[Any]:
    """The value of a list flag: comma-separated, a JSON list, or the two ends of LOW-HIGH."""
    words = [text] if text.startswith("{") else text.split("-" if flag.hints.get("span") else ",")
    if text.startswith("["):
        try:
            words = [json.dumps(item) if isinstance(item, dict) else str(item) for item in json.loads(text)]
        except ValueError:
            raise UsageError(f"--{flag.name} {text}: must be a JSON list, or words with commas") from None
    words = [word.strip() for word in words]
    if typing.get_args(flag.kind)[0] is int:
        whole = dataclasses.replace(flag, kind=int)
        return [in_range(whole, number(whole, word)) for word in words if word]
    return [word for word in words if word]


def boolean(name: str, text: str) -> bool:
    if text.lower() not in SWITCHED:
        raise UsageError(f"--{name}={text}: must be true or false")
    return SWITCHED[text.lower()]


def typed(flag: Flag, value: Any) -> Any:
    """Convert a value that YAML has typed; null is the default, so `api-key:` counts as given and empty."""
    if value is None:
        return flag.default
    text = json.dumps(value, default=str) if isinstance(value, (list, dict)) else str(value)  # YAML has dates
    if flag.kind is bool:
        return value if isinstance(value, bool) else boolean(flag.name, text)
    if isinstance(flag.default, tuple):
        return tuple(listed(flag, text))
    return convert(flag, text)


def value_name(flag: Flag) -> str:
    if flag.kind is bool:
        return ""
    if typing.get_origin(flag.kind) is Literal:
        return " " + "|".join(typing.get_args(flag.kind))
    return {int: " N", float: " X", str: " TEXT"}.get(flag.kind, " JSON" if isinstance(flag.default, dict) else " WORD")
