"""Engine: the loop's interface to the device thread. Takes requests, returns streams, and routes tokens to them.

Owner: loop. It communicates with the device thread in two ways: by the inbox (submit, abort, stop), and by one wake-up
per step with a StepOutput: through the ring's descriptor on an accelerator, through call_soon_threadsafe on a CPU.

    loop      submit -> inbox .............. on_output -> lane -> socket, or TokenStream.feed -> Delta
    device           inbox -> step -> step -> ring or call
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

from _fast.lane import deliver
from engine.base.config import EngineConfig
from engine.base.errors import DeviceLostError, EngineError, NotReadyError, QueueFullError, StepFailedError
from engine.base.late import LateExtras
from engine.base.limits import Limits, check, lacks_room
from engine.base.output import StepOutput, from_ring
from engine.base.request import Delta, FinishReason, Request
from engine.base.stall import StallWatch
from engine.base.stats import EngineStats, StepStats
from engine.base.stream import TokenStream
from engine.base.trace import LOOP, Span, Trace

if TYPE_CHECKING:
    import numpy as np

    from _fast.ring import OutputRing
    from engine.base.model_config import ModelConfig
    from engine.run.loop import DeviceThread
    from engine.run.runtime import Runtime
    from engine.step.parts.expert_load import LayerLoad

T = TypeVar("T")
log = logging.getLogger("omniloop.engine")

SLICE = 64  # rows delivered per iteration of the loop: a few tenths of a millisecond, between which other tasks run
COST_CALLBACK = 4  # relative cost of a row that is delivered without a lane
COST_FINISH = 16  # relative cost of the last row of an answer
JOIN_S, DEAD_JOIN_S = 10.0, 1.0  # seconds to wait for the end of the device thread
REASONS = tuple(FinishReason)  # by number


class Engine:
    """One model on one device. `state`: starting, ready, draining, dead."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.state = "starting"
        self.stats = EngineStats()
        self.startup: dict[str, float] = {}  # seconds by phase
        self.trace: Trace | None = None  # receives a timeline of the steps
        self.on_step: Callable[[StepStats], None] | None = None
        self.on_death: Callable[[BaseException], None] | None = None
        self.model: ModelConfig
        self.max_model_len = 0
        self.block_size = config.block_size
        self.num_blocks = 0
        self._paused = False
        self.limits: Limits  # fixed once it is ready
        self._watch: StallWatch | None = None
        self._device: DeviceThread | None = None
        self._loop: asyncio.AbstractEventLoop
        self._routes: dict[int, tuple[TokenStream, int]] = {}  # id on the device thread -> stream, choice
        self._late = LateExtras(self._routes, self._note_idle)
        self._next_id = 1
        self._idle: asyncio.Event
        self._ring: OutputRing | None = None
        self.outputs: deque[StepOutput] = deque()  # oldest first; the first is being delivered

    async def start(self) -> None:
        """Start the device thread and wait until the model is loaded and warm. Raises ConfigError."""
        # Imported here so that a server can bind and answer 503 before torch is imported.
        loop = self._loop = asyncio.get_running_loop()
        self._idle = asyncio.Event()
        self._idle.set()
        begun = time.perf_counter()
        module = await loop.run_in_executor(None, _import_loop)
        self.startup["imports"] = time.perf_counter() - begun
        ready = loop.create_future()
        calls = self.on_output, self._late.come, self._on_death
        self._device = module.DeviceThread(self.config, loop, ready, *calls, self.startup)
        self._device.start()
        self.model, self.limits = await ready
        self.max_model_len = self.limits.max_model_len
        self.num_blocks = self.limits.num_blocks
        self.stats.blocks_total = self.num_blocks
        self._ring = self._device.ring
        if self._ring is not None:
            loop.add_reader(self._ring.fd, self._on_ring)
        self.state = "ready"
        self._watch = StallWatch(self)

    @property
    def last_beat(self) -> float:
        """time.monotonic() of the device thread's last iteration."""
        return self._device.last_beat if self._device is not None else 0.0

    def submit(self, request: Request) -> TokenStream:
        """Pass a request to the device thread. Raises NotReadyError, QueueFullError or RequestError; loop only."""
        if self.state != "ready" or self._device is None:
            raise NotReadyError("engine_dead" if self.state == "dead" else self.state, f"the engine is {self.state}")
        check(request, self.limits)
        if len(self._routes) + request.n > self.limits.max_open and lacks_room(request, self.limits, self._routes):
            raise QueueFullError(
                f"{len(self._routes)} choices are open and {request.n} more were asked for; "
                f"this server holds {self.limits.max_open}: try again later"
            )
        stream = TokenStream(self, request, self._next_id)
        for choice in range(request.n):
            self._routes[self._next_id + choice] = (stream, choice)
        self._next_id += request.n
        self._idle.clear()
        self._device.submit(request, stream.first_id)
        return stream

    def drop(self, device_id: int) -> None:
        """End one choice on the device thread; its route is removed at once, so nothing more is delivered."""
        self._late.forget(device_id)
        if self._routes.pop(device_id, None) is not None and self._device is not None:
            self._device.abort(device_id)

    def conclude(self, device_id: int) -> None:
        """End one choice that waits for extras of its tokens; only the extras are still delivered."""
        if device_id in self._routes and self._device is not None and self._late.conclude(device_id):
            self._device.conclude(device_id)

    def forget(self, stream: TokenStream) -> None:
        """Remove a stream's routes (all its choices have ended)."""
        for choice in range(stream.request.n):
            self._routes.pop(stream.first_id + choice, None)
            if stream.request.late_extras:
                self._late.forget(stream.first_id + choice)
        self._note_idle()

    def pause(self) -> None:
        """Plan no more steps; open requests keep their places, and new requests wait."""
        self._paused = True
        if self._device is not None:
            self._device.pause(True)

    def resume(self) -> None:
        self._paused = False
        if self._device is not None:
            self._device.pause(False)

    async def quiet(self) -> None:
        """Wait until no request is open."""
        await self._idle.wait()

    async def reset_prefix_cache(self) -> bool:
        """Drop cached prefixes; False if blocks are in use."""
        return await self.on_device(_reset_prefix_cache)

    async def reset_encoder_cache(self) -> bool:
        """Drop cached embeddings of towers; False if requests are open."""
        return await self.on_device(_reset_encoder_cache)

    async def look_at_experts(self) -> list[LayerLoad]:
        """Return the experts' load in a step, as the previous call made the step count it; waits for no step."""
        return await self.on_device(_look_at_experts)

    async def start_profile(self) -> bool:
        """Record the accelerator's kernels and copies, too, until stop_profile; False: there is no accelerator."""
        return await self.on_device(_start_profile)

    async def stop_profile(self) -> list[Span]:
        """Return kernels and copies since start_profile."""
        return await self.on_device(_stop_profile)

    async def sound_attention(
        self, features: Mapping[str, np.ndarray], token_ids: Sequence[int], heads: Sequence[tuple[int, int]]
    ) -> np.ndarray:
        """Return Whisper's cross-attention float32 [heads, tokens, rows] of these (layer, head) pairs for the tokens.

        Steps wait for it: it costs about as much as the window's own tower and prompt.
        """
        return await self.on_device(partial(_sound_attention, features, token_ids, heads))

    async def turn(self) -> None:
        """Wait until the device thread is between two steps. Raises NotReadyError."""
        await self.on_device(_nothing)

    async def on_device(self, work: Callable[[Runtime], T]) -> T:
        """Run `work` on the device thread between two steps. Raises NotReadyError if this takes too long."""
        if self.state != "ready" or self._device is None:
            raise NotReadyError(self.state, f"the engine is {self.state}")
        done = self._loop.create_future()
        self._device.call(work, done)
        try:
            return await asyncio.wait_for(done, self.config.step_timeout)
        except TimeoutError:
            raise NotReadyError("stalled", "the engine does not answer") from None

    @property
    def is_paused(self) -> bool:
        return self._paused

    async def stop(self, timeout: float = 30.0) -> None:
        """Refuse new requests, let open requests finish for `timeout` seconds, abort the rest, end the thread."""
        if self.state == "ready":
            self.state = "draining"
        if self._device is None:
            return
        self.resume()
        if self._routes:
            try:
                await asyncio.wait_for(self._idle.wait(), timeout)
            except TimeoutError:
                for stream in {id(stream): stream for stream, _ in self._routes.values()}.values():
                    stream.abort()
        if self._watch is not None:
            self._watch.close()
        device, self._device = self._device, None
        await self._loop.run_in_executor(None, device.stop, DEAD_JOIN_S if self.state == "dead" else JOIN_S)
        if self._ring is not None:
            self._on_ring()
            self._loop.remove_reader(self._ring.fd)
            self._ring.close()
            self._ring = None

    def inspect(self) -> DeviceThread:
        """Return the device thread's object, for tests and benchmarks; its objects belong to that thread."""
        if self._device is None:
            raise NotReadyError(self.state, f"the engine is {self.state}: there is no device thread to look at")
        return self._device

    def open_ids(self) -> list[int]:
        """Return the device ids of open choices, oldest first."""
        return list(self._routes)

    def ledger(self) -> dict[str, int]:
        """Return counts of held resources; all are zero when idle, except totals and caches (RELIABILITY.md)."""
        held = {"streams": len({id(stream) for stream, _ in self._routes.values()}), "routes": len(self._routes)}
        held["late_extras"] = len(self._late)
        if self._device is not None:
            held |= self._device.ledger()
        return held

    def _note_idle(self) -> None:
        if not self._routes:
            self._idle.set()

    def _on_ring(self) -> None:
        """Read the device thread's news from its ring."""
        assert self._ring is not None
        self._ring.acknowledge()
        while (entry := self._ring.pop()) is not None:
            self.on_output(from_ring(entry, self.num_blocks))

    def on_output(self, output: StepOutput) -> None:
        """Take one step's news; they are delivered after the news of earlier steps, so that tokens stay in order."""
        self.stats.add(output.stats)
        if self.on_step is not None:
            self.on_step(output.stats)
        if self.trace is not None:
            self.trace.step(output)
        self.outputs.append(output)
        if len(self.outputs) == 1:
            self.deliver_slice()

    def deliver_slice(self) -> None:
        """Route rows of the oldest output, SLICE rows per iteration of the loop."""
        output, trace = self.outputs[0], self.trace
        begun, first = (time.perf_counter(), output.start) if trace is not None else (0.0, 0)
        ids, tokens, finishes = output.ids, output.tokens, output.finishes
        room = SLICE
        if output.drafted and not output.start:
            self._note_drafted(output)
        try:
            while room > 0 and output.start < len(ids):
                end = min(output.start + room, output.next_extra())
                row = deliver(self._routes, ids, tokens, finishes, output.start, end)
                room -= row - output.start
                output.start = row
                if room <= 0 or row == len(ids):
                    break
                output.start = row + 1  # a reader that raises affects only its own row
                self._route(output, row)
                room -= COST_FINISH if finishes[row] else COST_CALLBACK
        finally:
            if output.start == len(output.ids):
                self.outputs.popleft()
            if self.outputs:
                self._loop.call_soon(self.deliver_slice)
            self._note_idle()
            if trace is not None:
                rows = output.start - first
                trace.add(LOOP, "deliver", begun, time.perf_counter(), step=output.stats.step_id, rows=rows)

    def _note_drafted(self, output: StepOutput) -> None:
        for device_id, drafts, accepted in output.drafted:
            route = self._routes.get(device_id)
            if route is not None and route[0].drafted is not None:
                route[0].drafted.add(drafts, accepted)

    def _route(self, output: StepOutput, row: int) -> None:
        device_id = output.ids[row]
        route = self._routes.get(device_id)
        if route is None:
            return
        stream, choice = route
        token, finish = output.tokens[row], REASONS[output.finishes[row]]
        delta = Delta(choice, [token] if token >= 0 else [], finish)
        if finish is FinishReason.STOP_TOKEN:
            delta.stop_token_id = token
        elif finish is FinishReason.ERROR:
            delta.error = _row_error(output, row)
        logprob = output.logprobs.get(row)
        if logprob is not None:
            delta.logprobs = [logprob]
        first = output.firsts.get(row)
        if first is not None:
            delta.queued = first[1]
        if first is not None and choice == 0:
            delta.cached_tokens = first[0]
            self.stats.prompt_tokens += len(stream.request.prompt_token_ids)
            self.stats.cached_tokens += delta.cached_tokens
        for name, values in output.extras.items():
            if row in values:
                delta.extras[name] = values[row]
        if stream.request.late_extras and self._late.takes(device_id, delta):
            return
        if finish is not FinishReason.NONE:
            del self._routes[device_id]
        stream.feed(delta)

    def on_stall(self, seconds: float) -> None:
        """Give up the device thread, which has made no progress for `seconds`."""
        faulthandler.dump_traceback()
        self._on_death(DeviceLostError(f"the device thread has not turned for {seconds:.0f} s"))

    def _on_death(self, error: BaseException) -> None:
        """Answer every open request with the error, once, because the device thread is dead."""
        if self.state == "dead":
            return
        self.state = "dead"
        routes = dict(self._routes)
        self._routes.clear()
        lost = DeviceLostError("the engine stopped working; this server is restarting")
        for stream, choice in routes.values():
            stream.feed(Delta(choice, [], FinishReason.ERROR, error=lost))
        self._idle.set()
        if self.on_death is not None:
            self.on_death(error)


def _row_error(output: StepOutput, row: int) -> EngineError:
    failed = output.invalid.get(row) or output.error
    return failed or StepFailedError("a step of the engine failed; this request was part of it")


def _nothing(runtime: Runtime) -> None:
    """Do nothing; the call itself is the result."""


def _reset_prefix_cache(runtime: Runtime) -> bool:
    return runtime.reset_prefix_cache()


def _reset_encoder_cache(runtime: Runtime) -> bool:
    return runtime.reset_encoder_cache()


def _sound_attention(
    features: Mapping[str, np.ndarray], token_ids: Sequence[int], heads: Sequence[tuple[int, int]], runtime: Runtime
) -> np.ndarray:
    from engine.models.media.whisper_alignment import sound_attention

    return runtime.executor.backend.compute(lambda: sound_attention(runtime.model, features, token_ids, heads))


def _look_at_experts(runtime: Runtime) -> list[LayerLoad]:
    from engine.step.parts.expert_load import ExpertLoad

    part = runtime.executor.part(ExpertLoad)
    return [] if part is None else part.look()


def _start_profile(runtime: Runtime) -> bool:
    return runtime.start_profile()


def _stop_profile(runtime: Runtime) -> list[Span]:
    return runtime.stop_profile()


def _import_loop() -> ModuleType:
    import engine.run.loop

    return engine.run.loop
