"""`python -m server explain MODEL`: print the model that a configuration makes, part by part, and the kernels of a
step.

Owner: the main thread. In: the flags of `serve`, and --device-target, a card that need not be in this machine. Out:
lines for people. MODEL is a folder, its config.json, a GGUF file or ORG/NAME. Only the configuration is read, so
quantised weights are described from the configuration alone.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.base.errors import ConfigError, EngineError
from server.flags.arguments import Arguments
from server.flags.command_line import UsageError, all_flags, flags_of
from server.flags.config import Config, flag
from server.flags.foreign_flags import FOREIGN
from server.flags.help import USAGE, grouped

Say = Callable[[str], None]
Build = Callable[[dict[str, Any]], Config]
CARDS = ("sm_80", "sm_90", "sm_100", "gfx942", "gfx950", "gfx1100")  # the names of cards in engine/kernels/target


@dataclass(frozen=True, slots=True)
class ExplainOptions:
    """Flags that only `explain` has."""

    device_target: str = flag("", f"print the kernels of another card: {', '.join(CARDS)}")


def main(words: Sequence[str], say: Say, build: Build) -> int:
    """Run the command and return the exit status of the process. `say` prints; `build` makes the server's Config from
    flags.
    """
    own = flags_of(ExplainOptions, "explain")
    flags = own | all_flags()
    arguments = Arguments(flags, FOREIGN)
    try:
        arguments.read(words)
        if arguments.help is not None:
            say(f"{USAGE['explain']}\n\n{grouped(own)}")
            return 0
        values = arguments.values
        if (card := values.pop("device-target", "")) not in ("", *CARDS):
            raise UsageError(f"--device-target {card}: must be one of {', '.join(CARDS)}")
        config = build(values)
    except UsageError as error:
        print(error.report, file=sys.stderr)
        return 2
    try:
        for line in lines(config, card):
            say(line)
    except EngineError as error:
        print(f"omniloop: {error}", file=sys.stderr)
        return 1
    return 0


def lines(config: Config, card: str) -> Iterator[str]:
    """The lines that the command prints. Raises ConfigError if there is no such model or it cannot be served."""
    if card:
        pretend(card)
    from engine.device.host import choose_device
    from engine.explain.explained import explain

    device = "cuda:0" if card else choose_device(config.model.device)
    yield from explain(config.engine(str(folder_of(config))), device)


def pretend(card: str) -> None:
    """Make this process act as if it ran on that card. Kernel files use Triton only if it is imported before them."""
    try:
        importlib.import_module("triton")
    except ImportError:
        raise ConfigError(
            f"--device-target {card}: kernels of cards need Triton, which is not installed; run pip install triton"
        ) from None
    from engine.kernels import target

    if not target.HAS_TRITON:
        raise ConfigError(
            f"--device-target {card}: this process has already imported the kernels without "
            "Triton; run the command in a new process"
        )
    target.pretend(target.CARDS[card])


def folder_of(config: Config) -> Path:
    """The folder that holds the configuration."""
    from server.start.check import headers

    named = Path(config.folder)
    if named.name == "config.json" and named.is_file():
        return named.parent
    return headers(config, wanted=False)[0]
