"""Started: a coroutine that was run by hand up to its first wait, and continues inside a task.

Owner: loop. Most calls of a connection finish at once: a body that came with its head, a message that the transport
takes. Such a call runs without a task or a deadline; only calls that wait are awaited.

    begin(step) -> done: its result
                -> waits: a Started, to be awaited
"""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Started(Generic[T]):
    """The rest of a coroutine. Owner: the caller that awaits it, once."""

    __slots__ = ("_step", "_waiting")

    def __init__(self, step: Coroutine[Any, Any, T], waiting: Any) -> None:
        self._step = step
        self._waiting = waiting

    def __await__(self) -> Generator[Any, Any, T]:
        waiting = self._waiting
        try:
            while True:
                try:
                    sent = yield waiting
                except BaseException as error:
                    waiting = self._step.throw(error)
                else:
                    waiting = self._step.send(sent)
        except StopIteration as ended:
            result: T = ended.value
            return result
