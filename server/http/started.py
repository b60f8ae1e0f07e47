"""Started: a coroutine that was driven to its first wait by hand, and goes on inside a task.

Owner: loop. Most of what a connection is asked for is done at once: a body that came with its head, a message that the
transport takes. Such a call is driven without a task or a deadline; only the rest is awaited.

    begin(step) -> done: its result
                -> waits: a Started, to be awaited
"""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Started(Generic[T]):
    """Owner: whoever awaits it, once."""

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
