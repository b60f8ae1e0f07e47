"""Arguments: flags read from argv or a YAML file, ours and those of other servers.

Owner: the command line. Long flags with `-` or `_`, booleans as `--x` / `--no-x`, lists repeated or with commas, dict
values as JSON or key by key (`--hf-overrides.rope_theta 1e6`). All wrong flags are reported by one UsageError, a line
each.
"""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from server.flags.command_line import (
    SWITCHED,
    Flag,
    UsageError,
    boolean,
    convert,
    listed,
    merged,
    nested,
    typed,
)
from server.flags.foreign import Foreign
from server.flags.foreign_flags import FOREIGN, foreign, long_name

Others = Mapping[str, Foreign]  # flags of other servers, by name


def unknown(name: str, flags: dict[str, Flag], where: str = "") -> UsageError:
    known = [*flags, *(f"no-{f.name}" for f in flags.values() if f.kind is bool), "config", "help", "version"]
    near = difflib.get_close_matches(name, [each for each in known if each != name], n=1, cutoff=0.65)
    return UsageError(f"unknown flag --{name}{where}" + (f"; did you mean --{near[0]}?" if near else ""))


def meaning(name: str, text: str, entry: Foreign, others: Others, where: str = "") -> str:
    """Our flag, with its value, for a flag of another server; "" if it changes nothing. Raises UsageError."""
    if entry.switch and not entry.anything and (text.lower() in SWITCHED or not text):
        if not entry.as_:
            pass_switch(name, text, others, where)
            return ""
        if SWITCHED.get(text.lower(), True):
            return entry.as_
        entry = entry._replace(holds=(text,), advice="is off")
    elif entry.as_ and text not in entry.holds and (text in entry.values or not entry.only):
        return f"{entry.as_}={entry.values.get(text, text)}"
    pass_over(name, text, entry, where)
    return ""


def pass_over(name: str, text: str, entry: Foreign, where: str = "") -> None:
    """Handle a flag of another server: ignore it with a line on stderr if its value has no effect here, otherwise
    refuse it.
    """
    said = f"--{name}{' ' if text else ''}{text}{where}: {entry.advice}"
    if text not in entry.holds and not (entry.anything and (text or entry.switch)):
        raise UsageError(said)
    print(f"omniloop: {said.removesuffix('; leave the flag out')}; the flag changes nothing", file=sys.stderr)


def pass_switch(name: str, text: str, others: Others, where: str = "") -> None:
    """Handle a switch of another server; `text` turns it on or off, and turning it off is the same as its opposite."""
    entry = foreign(name if SWITCHED.get(text.lower(), True) else opposite(name, others), others)
    assert entry is not None
    pass_over(name, text, entry._replace(holds=(text,) if entry.holds else ()), where)


def opposite(name: str, others: Others) -> str:
    return f"no-{name}" if name in others else name.removeprefix("no-")


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
        """Parse all words and the file of --config; raises one UsageError with a line for each wrong flag."""
        words = iter(argv)
        wrong: list[str] = []
        is_lost = False  # after an error: words up to the next flag may be its values
        for word in words:
            is_lost = is_lost and not (word.startswith("-") and len(word) > 1)
            if not is_lost:
                try:
                    self.read_word(word, words)
                except UsageError as error:
                    wrong.append(str(error))
                    is_lost = True
        if self.help is not None:
            return
        if self.config_file is not None:
            try:
                self.values = {**from_file(self.config_file, self.flags, self.others), **self.values}
            except UsageError as error:
                wrong.append(str(error))
        if wrong:
            raise UsageError("\n".join(wrong))

    def read_word(self, word: str, words: Iterator[str]) -> None:
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
        elif self.switch and word.lower() in (*SWITCHED, "auto"):
            if (other := self.others.get(self.switch)) is None or not other.anything:
                text = f"--{self.switch} {word}: a switch takes no word; write --{self.switch}={word.lower()}"
                raise UsageError(text)
        elif "model" in self.values:
            raise UsageError(f"{word!r}: one model is already named ({self.values['model']})")
        else:
            self.values["model"] = word

    def take(self, word: str, words: Iterator[str]) -> None:
        """Parse one flag and its value."""
        self.several = self.switch = ""
        name, equals, text = word.partition("=")
        name = name.replace("_", "-")
        if name not in self.others:
            name, dot, path = word.partition("=")[0].partition(".")
            name = name.replace("_", "-")
        else:
            dot = path = ""
        flag = self.flags.get(name)
        if dot and not (foreign(name, self.others) if flag is None else isinstance(flag.default, dict)):
            raise unknown(f"{name}.{path}", self.flags)
        if flag is None and name.startswith("no-") and self.is_bool(name[3:]):
            self.values[name[3:]] = not (boolean(name, text) if equals else True)
            return
        other = foreign(name, self.others) if flag is None else None
        if flag is None and other is None and name != "config":
            raise unknown(name, self.flags)
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
        if other is not None:
            if ours := meaning(name, text, other, self.others):
                self.take_as(f"--{name} {text}".rstrip(), ours)
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

    def take_as(self, theirs: str, ours: str) -> None:
        """Parse our flag in place of a flag of another server."""
        print(f"omniloop: {theirs}: taken as --{ours.replace('=', ' ', 1)}", file=sys.stderr)
        try:
            self.take(ours, iter(()))
        except UsageError as error:
            raise UsageError(f"{theirs}: {error}") from None

    def take_entry(self, name: str, value: Any, where: str) -> None:
        """One entry of a file, whose value YAML has typed."""
        negated = self.flags.get(name[3:]) if name.startswith("no-") else None
        if name in self.flags:
            self.values[name] = typed(self.flags[name], value)
        elif negated is not None and negated.kind is bool:
            self.values[negated.name] = not typed(negated, value)
        elif (other := foreign(name, self.others)) is None:
            raise unknown(name, self.flags, where)
        elif value is not None:
            text = json.dumps(value, default=str) if isinstance(value, bool | list | dict) else str(value)
            if ours := meaning(name, "" if value is True and not other.switch else text, other, self.others, where):
                self.take_as(f"--{name} {text}{where}", ours)

    def is_bool(self, name: str) -> bool:
        return name in self.flags and self.flags[name].kind is bool


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
    """Values by flag name, from names with `-` or `_`; `where` is part of the error for an unknown name. Raises one
    UsageError with a line for each wrong name or value.
    """
    reader = Arguments(flags, others)
    wrong: list[str] = []
    for key, value in content.items():
        try:
            reader.take_entry(str(key).replace("_", "-"), value, where)
        except UsageError as error:
            wrong.append(str(error))
    if wrong:
        raise UsageError("\n".join(wrong))
    return reader.values
