"""Progress: one line on a terminal that reports a command's progress; no output if stderr is no terminal."""

from __future__ import annotations

import shutil
import sys
import time
from types import TracebackType
from typing import Self

WIDTH = 30
EVERY_S = 0.1


class Progress:
    """A progress bar on stderr. Owner: the thread that makes it."""

    def __init__(self, total: int, noun: str) -> None:
        self.total, self.noun = max(1, total), noun
        self.begun = time.monotonic()
        self.printed_at = 0.0
        self.on = sys.stderr.isatty()

    def __enter__(self) -> Self:
        return self

    def show(self, done: int) -> None:
        now = time.monotonic()
        if not self.on or (now - self.printed_at < EVERY_S and done < self.total):
            return
        self.printed_at = now
        bar = "#" * (WIDTH * min(done, self.total) // self.total)
        rate = done / max(1e-9, now - self.begun)
        text = f"[{bar:<{WIDTH}}] {done} of {self.total} {self.noun}, {rate:.1f}/s "
        print("\r" + text[: shutil.get_terminal_size().columns - 1], end="", file=sys.stderr, flush=True)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self.on:
            print(file=sys.stderr, flush=True)
