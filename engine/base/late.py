"""LateExtras: final Deltas of choices that wait for extras of their tokens (Request.late_extras).

Owner: loop. The end of a choice arrives with its last token. Late extras arrive by a separate call, when the last
token too has been computed, about one step later. Either may arrive first. LateExtras holds both and delivers
them together as the choice's last Delta.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.base.request import Delta, FinishReason
from engine.base.stream import TokenStream


class LateExtras:
    """Ends and extras, keyed by the engine's number of a choice; empty when no request is open."""

    def __init__(self, routes: dict[int, tuple[TokenStream, int]], note_idle: Callable[[], None]) -> None:
        self._routes = routes  # the engine's
        self._note_idle = note_idle
        self._held: dict[int, Delta] = {}  # ends that wait for their extras
        self._found: dict[int, dict[str, Any]] = {}  # extras, by name, that wait for the end

    def __len__(self) -> int:
        return len(self._held) + len(self._found)

    def takes(self, device_id: int, delta: Delta) -> bool:
        """Whether to hold this Delta: it ends a choice, or follows a held end. An error drops what is held."""
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
        """The loop itself ends a choice. False: the choice had already ended."""
        if device_id in self._held:
            return False
        self._hold(device_id, Delta(self._routes[device_id][1], [], FinishReason.STOP))
        return True

    def come(self, name: str, found: dict[int, Any]) -> None:
        """Takes the extras called `name` of complete choices, by the choice's number."""
        for device_id, value in found.items():
            if device_id in self._routes:
                self._found.setdefault(device_id, {})[name] = value
                self._deliver(device_id)

    def forget(self, device_id: int) -> None:
        """Drops a choice that has no reader any more."""
        self._held.pop(device_id, None)
        self._found.pop(device_id, None)

    def _hold(self, device_id: int, delta: Delta) -> None:
        self._held[device_id] = delta
        self._deliver(device_id)

    def _deliver(self, device_id: int) -> None:
        """Feeds the end to the stream once all extras have arrived."""
        stream, _ = self._routes[device_id]
        found = self._found.get(device_id, {})
        if device_id not in self._held or any(name not in found for name in stream.request.late_extras):
            return
        delta = self._held.pop(device_id)
        delta.extras |= self._found.pop(device_id)
        del self._routes[device_id]
        stream.feed(delta)
        self._note_idle()
