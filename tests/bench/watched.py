"""`python -m server` with recorded times: `python -m tests.bench.watched FILE BEAT_S [flags]`, for gpu_serve.

Owner: the server's loop; `_settle` runs on the device thread. A timer beats every BEAT_S seconds, and each slice of a
step's tokens is timed from the host's memory to the sockets. When the server stops, FILE (.npz) holds `beats`, (time,
lateness) of every beat, and `written`, (time, seconds since the tokens were on the host, tokens) of every slice.
Seconds are those of perf_counter, which all processes of a machine share.

    device thread  step N's tokens on the host | commit, news     next step ...
    loop                                          wake | text, frames, writes to the kernel | next turn: written
"""

from __future__ import annotations

import asyncio
import sys
import time
from array import array
from math import isnan, nan
from typing import TYPE_CHECKING

from server.start import signals

signals.hold()  # as server/__main__ does, before the imports below

from server import cli  # noqa: E402
from server.start import process  # noqa: E402
from server.start.lifespan import Lifespan  # noqa: E402

if TYPE_CHECKING:
    import numpy as np

    from _fast.launcher import Launcher
    from engine.base.output import StepOutput
    from engine.base.stats import StepStats
    from engine.engine import Engine
    from engine.step.step import Step

clock = time.perf_counter


class Heartbeat:
    """A beat every 1 ms takes 3 to 4 % of a core while the loop is idle, every 5 ms 0.7 % (measured on two cores).

    Libuv's timers count whole milliseconds, so a beat can also be up to 1 ms early: its lateness is then negative.
    """

    def __init__(self, every: float) -> None:
        self.noted = array("d")  # time, lateness
        self._every = every
        self._loop = asyncio.get_running_loop()
        self._due = clock() + every
        self._timer = self._loop.call_later(every, self._beat)

    def _beat(self) -> None:
        now = clock()
        self.noted.extend((now, now - self._due))
        self._due = now + self._every
        self._timer = self._loop.call_later(self._every, self._beat)

    def stop(self) -> None:
        self._timer.cancel()


class Deliveries:
    """Wraps three methods of a ready engine: settling a step, passing its news to the loop, and delivering a slice.

    "Home" is the time when the wait for a step's tokens returned, or, for a step settled in Python on a CPU, when its
    event fired. The GIL-free loop stores this time for its newest step only. For a step settled after the end of a
    later step, home is the later step's time minus the later step's duration. Uvloop may write rows without a lane at
    the end of an iteration, so a slice counts as written when the next iteration begins, which is slightly later.
    """

    def __init__(self, engine: Engine) -> None:
        device = engine.inspect()
        assert device.runtime is not None
        self._loop = asyncio.get_running_loop()
        self._engine = engine
        self._launcher: Launcher | None = getattr(device.runtime.executor.backend, "launcher", None)
        self._settled: dict[int, float] = {}  # step -> home
        self._steps = array("d")  # step, home, duration in seconds
        self._slices = array("d")  # step, time, tokens
        self._plain_settle, self._plain_on_output = device.settler.settle, engine.on_output
        self._plain_deliver = engine.deliver_slice
        device.settler.settle = self._settle  # type: ignore[method-assign]
        device.on_output = engine.on_output = self._on_output  # type: ignore[method-assign]
        engine.deliver_slice = self._deliver  # type: ignore[method-assign]

    def _settle(self, step: Step, stats: StepStats) -> StepOutput:
        output = self._plain_settle(step, stats)
        home = step.event.fired_at if self._launcher is None else self._launcher.ended_at
        self._settled[output.stats.step_id] = home
        return output

    def _on_output(self, output: StepOutput) -> None:
        step = output.stats.step_id
        home = self._settled.pop(step, nan)
        if isnan(home) and self._launcher is not None and self._launcher.waited_step == step:
            home = self._launcher.ended_at
        self._steps.extend((step, home, output.stats.device_s))
        self._plain_on_output(output)

    def _deliver(self) -> None:
        output = self._engine.outputs[0]
        start, told = output.start, [output.stats.step_id, 0]
        self._loop.call_soon(self._written, told)  # runs before the next slice
        self._plain_deliver()
        told[1] = sum(token >= 0 for token in output.tokens[start : output.start])

    def _written(self, told: list[int]) -> None:
        if told[1]:
            self._slices.extend((told[0], clock(), told[1]))

    def times(self) -> np.ndarray:
        """float64 [slices, 3]: time, seconds since the tokens were on the host, tokens."""
        import numpy as np

        steps = np.array(self._steps).reshape(-1, 3)
        home = homes(steps)
        slices = [(at, at - home.get(step, nan), tokens) for step, at, tokens in zip(*[iter(self._slices)] * 3)]
        found = np.array(slices, np.float64).reshape(-1, 3)
        return found[~np.isnan(found[:, 1])]


def homes(steps: np.ndarray) -> dict[float, float]:
    """step -> time when its tokens were on the host, if known; `steps` [count, 3]: step, home, duration in s."""
    found: dict[float, float] = {}
    for step, home, _ in steps.tolist():
        if not isnan(home):
            found[step] = home
    for step, _, took in steps.tolist()[::-1]:
        if step in found and took > 0:
            found.setdefault(step - 1, found[step] - took)
    return found


class WatchedLifespan(Lifespan):
    """Records times from the moment the server is ready until it begins to drain."""

    path, beat_s = "", 0.0
    watch: tuple[Heartbeat, Deliveries] | None = None

    async def start(self) -> None:
        await super().start()
        if self.state.phase == "ready":
            self.watch = Heartbeat(self.beat_s), Deliveries(self.state.engine)

    async def drain(self) -> None:
        if self.watch is not None:
            import numpy as np

            heart, deliveries = self.watch
            heart.stop()
            np.savez(self.path, beats=np.array(heart.noted).reshape(-1, 2), written=deliveries.times())
        await super().drain()


if __name__ == "__main__":
    WatchedLifespan.path, WatchedLifespan.beat_s = sys.argv[1], float(sys.argv[2])
    process.Lifespan = WatchedLifespan  # type: ignore[misc]
    sys.exit(cli.main(sys.argv[3:]))
