"""LineWriter: log lines to a pipe, a file or a terminal, written by its own thread, so that only this thread blocks.

Owner: any thread adds lines; the writer's own thread writes them. A stopped reader (a paused pager, a stuck collector)
or a full disk loses lines, but never blocks the loop: beyond 4 MiB, lines are dropped and counted, and the count is
written before the next line that can be written.

    loop     add .. add .. add (full: dropped) ..         add
    thread        write ..... waits for the reader ..... write "3 lines were left out", write
"""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from collections.abc import Callable

MOST_BYTES = 4 << 20  # most bytes that wait
FLUSH_S = 1.0


class LineWriter:
    """Queues and writes lines. The thread starts with the first line."""

    def __init__(self, descriptor: int, failed: Callable[[], None] | None = None) -> None:
        """`failed` is called in the writer's thread when lines could not be written."""
        self.dropped = 0  # since the start
        self._failed = failed
        self._descriptor = descriptor
        self._lines: deque[bytes] = deque()
        self._waiting = 0  # bytes in `_lines`, and of those being written
        self._unsaid = 0  # dropped since the last written line
        self._change = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, line: str) -> None:
        """Queue a line; never waits for the reader."""
        data = line.encode("utf-8", "backslashreplace")
        with self._change:
            if self._waiting + len(data) > MOST_BYTES:
                self._drop(1)
                return
            self._lines.append(data)
            self._waiting += len(data)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="log", daemon=True)
                self._thread.start()
            if len(self._lines) == 1:
                self._change.notify_all()

    def flush(self, seconds: float = FLUSH_S) -> bool:
        """Wait until everything is written, for at most `seconds`; returns whether it is."""
        with self._change:
            return self._change.wait_for(lambda: not self._waiting, seconds)

    def _drop(self, count: int) -> None:
        self.dropped += count
        self._unsaid += count

    def _run(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._lines)
                lines, unsaid = list(self._lines), self._unsaid
                self._lines.clear()
                self._unsaid = 0
            data = b"".join(lines)
            written = self._write(_left_out(unsaid) + data)
            with self._change:
                if not written:
                    self._unsaid += unsaid
                    self._drop(len(lines))
                self._waiting -= len(data)
                self._change.notify_all()
            if not written and self._failed is not None:
                self._failed()

    def _write(self, data: bytes) -> bool:
        """Write all bytes, waiting for the reader (thread). Returns False if the write failed."""
        left = memoryview(data)
        try:
            while left:
                try:
                    left = left[os.write(self._descriptor, left) :]
                except BlockingIOError:  # another process has made the terminal non-blocking
                    select.select([], [self._descriptor], [])
        except OSError:  # no reader any more, or no space left: a later line may still be written
            return False
        return True


def _left_out(count: int) -> bytes:
    return b"%d lines were left out: nothing read this log in time, or its disk is full\n" % count if count else b""
