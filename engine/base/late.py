"""LateExtras: ends of choices that wait for extras of their tokens (Request.late_extras).

Owner: loop. The end of a choice arrives with its last token. Late extras come when the last token too has been
computed, a step later or so, by a call of their own: the order in which both arrive is open. What is held here is
delivered when all of it is there, as the choice's last Delta.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.base.request import Delta, FinishReason
from engine.base.stream import TokenStream


class LateExtras:
    """By the engine's number of a choice; empty when no request is open."""

    def __init__(self, routes: dict[int, tuple[TokenStream, int]], note_idle: Callable[[], None]) -> None:
        self._routes = routes  # the engine's
        self._note_idle = note_idle
        self._held: dict[int, Delta] = {}  # ends without their extras
        self._found: dict[int, dict[str, Any]] = {}  # extras without an end, by name

    def __len__(self) -> int:
        return len(self._held) + len(self._found)

    def takes(self, device_id: int, delta: Delta) -> bool:
        """Whether a Delta stays here: an end, or what comes behind one. An error is the end of either."""
        if delta.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            self.forget(device_id)
            return False
        if device_id in self._held:
            return True
        if delta.finish_reason is FinishReason.NONE:
            return False
        self._hold(device_id, delta)
        return True

    def conclude(self, device_id: int) -> bool:
        """The loop ends a choice by itself. False: it had ended."""
        if device_id in self._held:
            return False
        self._hold(device_id, Delta(self._routes[device_id][1], [], FinishReason.STOP))
        return True

    def come(self, name: str, found: dict[int, Any]) -> None:
        """Extras of choices that are complete."""
        for device_id, value in found.items():
            if device_id in self._routes:
                self._found.setdefault(device_id, {})[name] = value
                self._deliver(device_id)

    def forget(self, device_id: int) -> None:
        """The choice has no reader any more."""
        self._held.pop(device_id, None)
        self._found.pop(device_id, None)

    def _hold(self, device_id: int, delta: Delta) -> None:
        self._held[device_id] = delta
        self._deliver(device_id)

    def _deliver(self, device_id: int) -> None:
        """Feeds the end, once all is there."""
        stream, _ = self._routes[device_id]
        found = self._found.get(device_id, {})
        if device_id not in self._held or any(name not in found for name in stream.request.late_extras):
            return
        delta = self._held.pop(device_id)
        delta.extras |= self._found.pop(device_id)
        del self._routes[device_id]
        stream.feed(delta)
        self._note_idle()
