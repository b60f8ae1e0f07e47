"""Flags: made from the fields of Config's groups, read from argv or a YAML file, converted and bounded.

Long flags with `-` or `_`, booleans as `--x` / `--no-x`, lists repeated or with commas, dict values as JSON or key by
key (`--hf-overrides.rope_theta 1e6`). An unknown name or a wrong value is a UsageError of one line.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mm.limits import MediaLimits
from server.flags.config import Config
from server.flags.foreign_flags import FOREIGN, Foreign, foreign, long_name, meant
from server.flags.media_flags import LEAST, MEDIA_HELP, SPANS

Others = Mapping[str, Foreign]  # flags of other servers, by name
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
}
UNITS = {1 << 30: "GiB", 1 << 20: "MiB", 1 << 10: "KiB"}
SIZE = re.compile(r"([\d.]+) ?([KMGT])iB")


class UsageError(Exception):
    """A wrong flag or value; the text is the one line that the operator reads."""


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
    found: dict[str, Flag] = {}
    for group in dataclasses.fields(Config):
        for name, entry in flags_of(typing.get_type_hints(Config)[group.name], group.name).items():
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


def unknown(name: str, flags: dict[str, Flag], where: str = "", others: Others = FOREIGN) -> UsageError:
    known = [*flags, *(f"no-{f.name}" for f in flags.values() if f.kind is bool), *others, "config", "help", "version"]
    near = difflib.get_close_matches(name, [each for each in known if each != name], n=1, cutoff=0.65)
    return UsageError(f"unknown flag --{name}{where}" + (f"; did you mean --{near[0]}?" if near else ""))


def pass_over(name: str, text: str, entry: Foreign, where: str = "") -> None:
    """Handle a flag of another server: ignore it with a line on stderr if its value has no effect here, otherwise
    refuse it.
    """
    said = f"--{name}{' ' if text else ''}{text}{where}: {entry.advice}"
    if text not in entry.holds and not (entry.anything and text):
        raise UsageError(said)
    print(f"omniloop: {said.removesuffix('; leave the flag out')}; the flag changes nothing", file=sys.stderr)


def pass_switch(name: str, text: str, others: Others, where: str = "") -> None:
    """Handle a switch of another server; `text` turns it on or off, and turning it off is the same as its opposite."""
    entry = foreign(name if SWITCHED.get(text.lower(), True) else opposite(name, others), others)
    assert entry is not None
    pass_over(name, text, entry._replace(holds=(text,) if entry.holds else ()), where)


def opposite(name: str, others: Others) -> str:
    return f"no-{name}" if name in others else name.removeprefix("no-")


SWITCHED = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


class Arguments:
    """Parses argv; `values` holds the given values by flag name."""

    def __init__(self, flags: dict[str, Flag], others: Others = FOREIGN) -> None:
        self.flags = flags
        self.others = others
        self.values: dict[str, Any] = {}
        self.config_file: str | None = None
        self.help: str | None = None  # the argument of --help; "": no argument
        self.version = False
        self.several = ""  # name of a list flag that may take more words
        self.switch = ""  # name of the last flag, if it takes no value

    def read(self, argv: Sequence[str]) -> None:
        words = iter(argv)
        for word in words:
            if word in ("-h", "--help"):
                self.help = ""
            elif word.startswith("--help="):
                self.help = word[7:]
            elif word in ("-v", "--version"):
                self.version = True
            elif word.startswith("--") and len(word) > 2:
                self.take(word[2:], words)
            elif word.startswith("-") and len(word) > 1:
                self.take(long_name(word[1:]), words)
            elif self.several:
                self.values[self.several] = (*self.values[self.several], *listed(self.flags[self.several], word))
            elif self.switch and word.lower() in SWITCHED:
                raise UsageError(
                    f"--{self.switch} {word}: a switch takes no word; write --{self.switch}={word.lower()}"
                )
            elif "model" in self.values:
                raise UsageError(f"{word!r}: one model is already named ({self.values['model']})")
            else:
                self.values["model"] = word

    def take(self, word: str, words: Iterator[str]) -> None:
        """Parse one flag and its value."""
        self.several = self.switch = ""
        name, equals, text = word.partition("=")
        name, dot, path = name.partition(".")
        name = name.replace("_", "-")
        if (other := self.others.get(name)) is not None and other.same:
            print(f"omniloop: --{name}: {other.advice}", file=sys.stderr)
            name = other.same
        flag = self.flags.get(name)
        if dot and not (foreign(name, self.others) if flag is None else isinstance(flag.default, dict)):
            raise unknown(f"{name}.{path}", self.flags, "", self.others)
        if flag is None and name.startswith("no-") and self.is_bool(name[3:]):
            self.values[name[3:]] = not (boolean(name, text) if equals else True)
            return
        other = foreign(name, self.others) if flag is None else None
        if flag is None and other is None and name != "config":
            raise unknown(name, self.flags, "", self.others)
        if not equals and (other.switch if other else flag is not None and flag.kind is bool):
            self.switch = name
        if flag is not None and flag.kind is bool and not equals:
            self.values[name] = True
            return
        if not equals and (dot or not (other and other.switch)):
            following = next(words, None)
            if following is None or (following.startswith("--") and len(following) > 2):
                raise UsageError(f"--{name}: needs a value")
            text = following
        if other is not None and other.switch and (text.lower() in SWITCHED or not text):
            pass_switch(name, text, self.others)
        elif other is not None:
            pass_over(name, text, other)
        elif flag is None:
            self.config_file = text
        elif flag.kind is bool:
            self.values[name] = boolean(name, text)
        elif isinstance(flag.default, tuple):
            self.values[name] = (*self.values.get(name, ()), *listed(flag, text))
            self.several = name if flag.hints.get("several") else ""
        elif dot:
            self.values[name] = merged(self.values.get(name, {}), nested(path.split("."), text))
        else:
            self.values[name] = convert(flag, text)

    def is_bool(self, name: str) -> bool:
        return name in self.flags and self.flags[name].kind is bool


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


def from_file(path: str, flags: dict[str, Flag], others: Others = FOREIGN) -> dict[str, Any]:
    """The values in a YAML file, whose names are the flags' names."""
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.safe_load(file) or {}
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError):
        raise UsageError(f"--config {path}: is not valid YAML") from None
    if not isinstance(content, dict):
        raise UsageError(f"--config {path}: must hold names and values, one per line")
    return from_mapping(content, flags, f" in {path}", others)


def from_mapping(
    content: Mapping[Any, Any], flags: dict[str, Flag], where: str, others: Others = FOREIGN
) -> dict[str, Any]:
    """Values by flag name, from names with `-` or `_`; `where` is part of the error for an unknown name."""
    values: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("_", "-")
        negated = flags.get(name[3:]) if name.startswith("no-") else None
        if name in flags:
            values[name] = typed(flags[name], value)
        elif negated is not None and negated.kind is bool:
            values[negated.name] = not typed(negated, value)
        elif (other := foreign(name, others)) is None:
            raise unknown(name, flags, where, others)
        elif other.switch and isinstance(value, bool):
            pass_switch(name, str(value).lower(), others, where)
        elif value is not None:
            pass_over(name, "" if value is True else str(value), other, where)
    return values


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
