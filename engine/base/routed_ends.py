"""RoutedEnds: ends of choices that wait for the experts of their tokens.

Owner: loop. A choice's end is told with its last token. Its experts come when the last token too has been computed, a
step later or so, by a call of their own: the order in which both arrive is open. What is held here is delivered when
both are there, as the choice's last Delta.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from engine.base.request import Delta, FinishReason
from engine.base.stream import TokenStream


class RoutedEnds:
    """By the engine's number of a choice; empty when no request is open."""

    def __init__(self, routes: dict[int, tuple[TokenStream, int]], note_idle: Callable[[], None]) -> None:
        self._routes = routes  # the engine's
        self._note_idle = note_idle
        self._held: dict[int, Delta] = {}  # ends without experts
        self._found: dict[int, np.ndarray] = {}  # experts without an end

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

    def come(self, found: dict[int, np.ndarray]) -> None:
        """Experts of choices that are complete."""
        for device_id, experts in found.items():
            if device_id in self._routes:
                self._found[device_id] = experts
                if device_id in self._held:
                    self._deliver(device_id)

    def forget(self, device_id: int) -> None:
        """Nobody waits for the choice any more."""
        self._held.pop(device_id, None)
        self._found.pop(device_id, None)

    def _hold(self, device_id: int, delta: Delta) -> None:
        self._held[device_id] = delta
        if device_id in self._found:
            self._deliver(device_id)

    def _deliver(self, device_id: int) -> None:
        delta = self._held.pop(device_id)
        delta.routed_experts = self._found.pop(device_id)
        stream, _ = self._routes.pop(device_id)
        stream.feed(delta)
        self._note_idle()
