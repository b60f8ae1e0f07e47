"""Trace: a timeline of loop, pool and device, in a format that Perfetto and chrome://tracing open.

Owner: loop; threads of the pool append their own spans (one append each, no lock). In: each step's numbers as they
reach the loop, deliveries, work of the pool, requests, and kernels and ranks if a DeviceProfile has run. Out: events in
Chrome's JSON format. A Trace costs the device thread nothing: steps report their numbers with or without a Trace.

A step is drawn twice: as its parts on the device thread's track, and as one bar from its launch until its tokens were
on the host. The bars use two alternating tracks, so two steps in flight appear side by side. Lengths are exact. A
part's position is computed back from its step's end, so it is off by any time that passed between two parts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.base.output import StepOutput
    from engine.base.stats import StepStats

LOOP, DEVICE_THREAD, IN_FLIGHT = 1, 2, (3, 4)  # tracks
# The first track of the pool's threads, of ranks, and of the streams of the first device.
POOL, RANKS, STREAMS = 10, 900, 1000
OF_DEVICE = 1000  # tracks of one device's streams
NAMES = {
    LOOP: "event loop",
    DEVICE_THREAD: "device thread",
    IN_FLIGHT[0]: "steps in flight, even",
    IN_FLIGHT[1]: "steps in flight, odd",
}
MAX_EVENTS = 1_000_000  # some hundred bytes each; later events are only counted
PID = 1

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of work on a track; times are seconds of time.perf_counter."""

    track: int
    name: str
    begun: float
    ended: float
    args: dict[str, Any]


class Trace:
    """Collects from its creation on."""

    def __init__(self) -> None:
        self.begun = time.perf_counter()
        self.spans: list[Span] = []
        self.steps: list[tuple[StepStats, Sequence[int]]] = []  # with the numbers of the choices in its output
        self.requests: list[Event] = []
        self.left_out = 0
        self._labels: dict[int, str] = {}  # number of a choice on the device thread -> its request
        self._threads: dict[int, tuple[int, str]] = {}  # pool threads: track and name

    # -- what happens

    def add(self, track: int, name: str, begun: float, ended: float, **args: Any) -> None:
        """A span of a track."""
        if len(self.spans) + len(self.requests) + 8 * len(self.steps) >= MAX_EVENTS:
            self.left_out += 1
        else:
            self.spans.append(Span(track, name, begun, ended, args))

    def pooled(self, name: str, begun: float, ended: float) -> None:
        """Adds a span of work that the calling pool thread has done."""
        thread = threading.current_thread()
        track, _ = self._threads.setdefault(thread.ident or 0, (POOL + len(self._threads), thread.name))
        self.add(track, name, begun, ended)

    def step(self, output: StepOutput) -> None:
        """Adds a step whose output has reached the loop."""
        if len(self.steps) * 8 + len(self.spans) >= MAX_EVENTS:
            self.left_out += 1
        elif output.stats.ended_at:
            self.steps.append((output.stats, output.ids))

    def label(self, first_id: int, n: int, request_id: str) -> None:
        """Records the engine's numbers of a request's choices; called when the request is submitted."""
        for choice in range(n):
            self._labels[first_id + choice] = request_id if n == 1 else f"{request_id} #{choice}"

    def request(self, request_id: str, phases: Sequence[tuple[str, float, float]], **args: Any) -> None:
        """Adds a request that has ended: its phases in sequence, on a separate track."""
        if not phases:
            return
        whole = ("request", phases[0][1], phases[-1][2])
        for name, begun, ended in (whole, *phases):
            common = {"cat": "request", "name": name, "id": request_id, "pid": PID, "tid": LOOP}
            details = {"request_id": request_id, **args} if name == "request" else {}
            self.requests.append({"ph": "b", "ts": self._us(begun), "args": details, **common})
            self.requests.append({"ph": "e", "ts": self._us(max(begun, ended)), **common})

    # -- the file

    def document(self) -> dict[str, Any]:
        """Everything so far, in Chrome's trace format."""
        names = NAMES | dict(self._threads.values())
        names |= {track: name_of(track) for track in sorted({span.track for span in self.spans if span.track >= RANKS})}
        events = [
            {"ph": "M", "name": "thread_name", "pid": PID, "tid": track, "args": {"name": name}}
            for track, name in names.items()
        ]
        events += [
            {"ph": "M", "name": "thread_sort_index", "pid": PID, "tid": track, "args": {"sort_index": track}}
            for track in names
        ]
        events.append({"ph": "M", "name": "process_name", "pid": PID, "tid": 0, "args": {"name": "omniloop"}})
        events += self._step_events()
        events += [self._event(span) for span in list(self.spans)]
        events += self.requests
        return {"displayTimeUnit": "ms", "otherData": {"left_out": self.left_out}, "traceEvents": events}

    def _us(self, at: float) -> float:
        """Microseconds since the trace began; 0 for earlier times."""
        return round(max(0.0, at - self.begun) * 1e6, 3)

    def _event(self, span: Span) -> Event:
        length = max(0.0, span.ended - max(span.begun, self.begun))
        return {
            "ph": "X", "cat": "span", "name": span.name, "pid": PID, "tid": span.track,
            "ts": self._us(span.begun), "dur": round(length * 1e6, 3), "args": span.args,
        }  # fmt: skip

    def _step_events(self) -> list[Event]:
        events: list[Event] = []
        free_at = 0.0  # the device thread has been drawn up to here
        for number, (stats, ids) in enumerate(self.steps):
            if stats.num_rows:
                requests = list(dict.fromkeys(self._labels.get(device_id, str(device_id)) for device_id in ids))
                about: dict[str, Any] = {"step": stats.step_id, "rows": stats.num_rows, "tokens": stats.num_tokens}
                about |= {"in_python": stats.by_python, "requests": requests}
                track, on_device = IN_FLIGHT[number % 2], stats.ended_at - stats.device_s
                flight = Span(track, f"step {stats.step_id}", stats.launched_at, stats.ended_at, about)
                begun = max(on_device, stats.launched_at)
                computed = Span(track, "on the device", begun, stats.ended_at, {"step": stats.step_id})
                events += [self._event(flight), self._event(computed)]
            for span in parts_of(stats):
                begun = max(span.begun, free_at)
                free_at = max(free_at, span.ended)
                if span.ended > begun:
                    events.append(self._event(Span(span.track, span.name, begun, span.ended, span.args)))
            counts = {"running": stats.running, "waiting": stats.waiting}
            at = self._us(stats.ended_at)
            events.append({"ph": "C", "name": "requests", "pid": PID, "tid": 0, "ts": at, "args": counts})
            blocks = {"in use": stats.blocks_used}
            events.append({"ph": "C", "name": "KV blocks", "pid": PID, "tid": 0, "ts": at, "args": blocks})
        return events


def name_of(track: int) -> str:
    """The name of a track of a rank or of a device's stream."""
    if track < STREAMS:
        return f"rank {track - RANKS}"
    device, stream = divmod(track - STREAMS, OF_DEVICE)
    whose = f"rank {device}, " if device else ""
    return f"{whose}stream {stream}: kernels and copies"


def parts_of(stats: StepStats) -> list[Span]:
    """The parts of a turn of the device thread: plan and launch the next step, wait for this step, commit it."""
    waiting = stats.waited_at - stats.wait_s
    launching = waiting - stats.launch_s
    places = [
        ("plan the next step", launching - stats.schedule_s, launching, {}),
        ("launch it", launching, waiting, {}),
        ("wait", waiting, stats.waited_at, {"step": stats.step_id}),
        ("commit", stats.waited_at, stats.waited_at + stats.commit_s, {"step": stats.step_id}),
    ]
    return [Span(DEVICE_THREAD, name, begun, ended, args) for name, begun, ended, args in places]
