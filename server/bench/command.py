"""python -m server bench COMMAND: the table of bench commands, their flags and help.

Owner: main thread. A command is a dataclass of flags and a function; commands that run the engine in this process take
the server's flags too. A refusal ends with status 2 and one line.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from server.bench import options
from server.flags import Arguments, Flag, UsageError, flag_lines, flags_of, from_file


@dataclass(frozen=True, slots=True)
class Command:
    """One of the words behind `bench`; `module` has its `run(options) -> int`."""

    text: str
    module: str
    flags: type


COMMANDS = {
    "serve": Command(
        "load a server over its socket: times, rates, failures", "server.bench.serve", options.ServeOptions
    ),
}


def parse(words: Sequence[str], say: Callable[[str], None]) -> tuple[Callable[[Any], int], Any]:
    """(what runs, its options); raises UsageError, or SystemExit(0) after saying its help."""
    name = words[0] if words else ""
    if name in ("", "-h", "--help"):
        say(help_text())
        raise SystemExit(0)
    if name not in COMMANDS:
        raise UsageError(f"bench {name}: must be one of {', '.join(COMMANDS)}")
    command = COMMANDS[name]
    flags = flags_of(command.flags, name)
    arguments = Arguments(flags)
    arguments.read(words[1:])
    if arguments.help:
        say(command_help(name, command, flags))
        raise SystemExit(0)
    values = from_file(arguments.config_file, flags) if arguments.config_file else {}
    found = {flags[flag].field: value for flag, value in {**values, **arguments.values}.items()}
    return importlib.import_module(command.module).run, command.flags(**found)


def help_text() -> str:
    lines = ["usage: python -m server bench COMMAND [--flag value ...]", "", "commands:"]
    lines += [f"  {name:12} {command.text}" for name, command in COMMANDS.items()]
    return "\n".join([*lines, "", "python -m server bench COMMAND --help lists the command's flags"])


def command_help(name: str, command: Command, flags: dict[str, Flag]) -> str:
    lines = [f"usage: python -m server bench {name} [--flag value ...]", "", command.text]
    return "\n".join([*lines, "", "  --config FILE.yaml  flags by the same names", *flag_lines(flags)])


def main(words: Sequence[str], say: Callable[[str], None]) -> int:
    """Runs a bench command; the process's exit status. `say` prints."""
    try:
        run, chosen = parse(words, say)
    except UsageError as error:
        print(f"omniloop: {error}", file=sys.stderr)
        return 2
    return run(chosen)
