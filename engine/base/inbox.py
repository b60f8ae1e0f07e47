"""Inbox: the messages of other threads to the device thread, and a file descriptor for a waiter without the GIL.

Owner: the device thread takes; any thread puts. A taker that is going to empty the inbox calls `hush` first: any later
put makes `fd` readable again, so no message is missed. A taker that leaves messages behind calls `remind`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio

    from engine.base.request import Request


@dataclass(frozen=True, slots=True)
class Submit:
    """A request whose choices are numbered from first_id."""

    request: Request
    first_id: int


@dataclass(frozen=True, slots=True)
class Abort:
    """Ends one choice."""

    device_id: int


@dataclass(frozen=True, slots=True)
class Conclude:
    """Ends one choice with late extras: the choice needs no more tokens and ends when the extras are computed."""

    device_id: int


@dataclass(frozen=True, slots=True)
class Pause:
    """paused: no further step is planned; not paused: steps go on."""

    paused: bool


@dataclass(frozen=True, slots=True)
class Call:
    """`work` runs between two steps, with the Runtime; `done` gets the result on the loop."""

    work: Callable[[Any], Any]
    done: asyncio.Future[Any]


@dataclass(frozen=True, slots=True)
class Enter:
    """Checks again the requests that wait for admission at a gate."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Ends the device thread after the steps in flight."""


Message = Submit | Abort | Conclude | Pause | Call | Enter | Stop


class Inbox:
    """An unbounded queue: the loop bounds the number of open requests (Limits.max_open)."""

    def __init__(self) -> None:
        self._items: SimpleQueue[Any] = SimpleQueue()
        self.fd = -1  # an eventfd, once `watch` has been called
        self._signalled = False  # the eventfd was made readable after the last `hush`

    def watch(self) -> int:
        """Opens the eventfd and returns it; from now on it is readable if an item was put since the last `hush`."""
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        if len(self):
            os.eventfd_write(self.fd, 1)
        return self.fd

    def put(self, item: Any) -> None:
        """Appends and wakes the taker."""
        self._items.put(item)
        if self.fd >= 0 and not self._signalled:
            self._signalled = True
            os.eventfd_write(self.fd, 1)

    def take(self, wait: float) -> Any:
        """The oldest item; raises queue.Empty when there is none within `wait` seconds (<= 0: now)."""
        return self._items.get(timeout=wait) if wait > 0 else self._items.get_nowait()

    def hush(self) -> None:
        """Makes `fd` unreadable until the next put."""
        if self.fd >= 0:
            with contextlib.suppress(BlockingIOError):  # nothing was put since
                os.eventfd_read(self.fd)
            self._signalled = False  # after the read: the taker looks next and finds an item put in between

    def remind(self) -> None:
        """Makes `fd` readable if there are items; for a reader that did not take all items after `hush`."""
        if self.fd >= 0 and len(self):
            os.eventfd_write(self.fd, 1)

    def close(self) -> None:
        """Closes the eventfd."""
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)

    def __len__(self) -> int:
        return self._items.qsize()
