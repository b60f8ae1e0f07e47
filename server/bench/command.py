"""omniloop bench COMMAND: the table of bench commands, their flags and help.

Owner: main thread. A command is a dataclass of flags and a module with `run`. Commands that start an engine or a server
also take the server's flags, as a Config or as words of a command line. A refusal ends with status 2 and one line.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from engine.base.errors import EngineError
from server.bench import options
from server.bench.foreign_flags import FOREIGN as BENCH
from server.bench.output import words_of
from server.flags.arguments import Arguments
from server.flags.command_line import Flag, UsageError, all_flags, flags_of
from server.flags.config import Config
from server.flags.foreign_flags import FOREIGN
from server.flags.help import grouped

HERE = "server.bench"


@dataclass(frozen=True, slots=True)
class Command:
    """One bench command; `module` has `run(options)` or, by `takes`, `run(options, config or words)`."""

    text: str
    module: str
    flags: type
    takes: Literal["", "config", "words"] = ""  # form of the server's flags


COMMANDS = {
    "serve": Command("load a server over its socket: times, rates, failures", f"{HERE}.serve", options.ServeOptions),
    "throughput": Command(
        "the engine alone: tokens per second",
        f"{HERE}.throughput",
        options.ThroughputOptions,
        "config",
    ),
    "latency": Command("the engine alone: times of batches", f"{HERE}.latency", options.LatencyOptions, "config"),
    "startup": Command(
        "the start of the server by phase, cold and warm",
        f"{HERE}.startup",
        options.StartupOptions,
        "words",
    ),
    "media": Command(
        "images, audio and video: render, load, first token", f"{HERE}.media", options.MediaBenchOptions, "config"
    ),
    "attention": Command(
        "the attention kernel, and the rates of this machine", f"{HERE}.attention", options.AttentionOptions
    ),
    "sample": Command("sampling of tokens, and the same in torch", f"{HERE}.sample", options.SampleOptions),
    "linear": Command("a matrix product in every format of weights", f"{HERE}.linear", options.LinearOptions),
    "moe": Command("a layer of experts, and the rates of this machine", f"{HERE}.moe", options.MoeOptions),
    "sweep": Command("one of these over a grid of flags, with a plot", f"{HERE}.sweep", options.SweepOptions),
}
Say = Callable[[str], None]
Build = Callable[[dict[str, Any]], Config]


def parse(words: Sequence[str], say: Say, build: Build) -> Callable[[], int]:
    """A function that runs the command; raises UsageError, or SystemExit(0) after printing its help.

    `build` makes the server's Config from flags.
    """
    name = words[0] if words else ""
    if name in ("", "-h", "--help"):
        say(help_text())
        raise SystemExit(0)
    if name not in COMMANDS:
        raise UsageError(f"bench {name}: must be one of {', '.join(COMMANDS)}")
    command = COMMANDS[name]
    own = flags_of(command.flags, name)
    flags = own | all_flags() if command.takes else own
    others = BENCH if name == "serve" else FOREIGN
    arguments = Arguments(flags, others)
    arguments.read(words[1:])
    if arguments.help is not None:
        say(command_help(name, command, own))
        raise SystemExit(0)
    values = arguments.values
    chosen = command.flags(**{own[flag].field: value for flag, value in values.items() if flag in own})
    for flag in ("json", "plot"):
        check_writable(flag, getattr(chosen, flag, ""))
    rest = {flag: value for flag, value in values.items() if flag not in own}
    run = partial(importlib.import_module(command.module).run, chosen)
    if command.takes:
        config = build(rest)
        run = partial(run, config if command.takes == "config" else words_of(rest))
    return run


def check_writable(flag: str, path: str) -> None:
    """Check that a file for results can be written, before the run instead of at its end. Raises UsageError."""
    folder = os.path.dirname(path) or "."
    if not path:
        return
    if os.path.isdir(path):
        raise UsageError(f"--{flag} {path}: is a folder; name a file")
    if not os.path.isdir(folder):
        raise UsageError(f"--{flag} {path}: there is no folder {folder}")
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise UsageError(f"--{flag} {path}: may not be written")


def help_text() -> str:
    lines = ["usage: omniloop bench COMMAND [--flag value ...]", "", "commands:"]
    lines += [f"  {name:12} {command.text}" for name, command in COMMANDS.items()]
    return "\n".join([*lines, "", "omniloop bench COMMAND --help lists the flags of a command"])


def command_help(name: str, command: Command, flags: dict[str, Flag]) -> str:
    lines = [f"usage: omniloop bench {name} [--flag value ...]", "", command.text, ""]
    lines += [grouped(flags), "", "  --config FILE.yaml  flags by the same names"]
    if command.takes:
        lines += ["", "The flags of the server work too: omniloop --help=all"]
    return "\n".join(lines)


def main(words: Sequence[str], say: Say, build: Build) -> int:
    """Run a bench command; the process's exit status. `say` prints."""
    try:
        run = parse(words, say, build)
    except UsageError as error:
        print(error.report, file=sys.stderr)
        return 2
    try:
        return run()
    except (EngineError, ValueError, OSError) as error:
        print(f"omniloop: {error}", file=sys.stderr)
        return 1
