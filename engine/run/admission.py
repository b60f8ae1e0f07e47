"""Admission of requests on the device thread: a request moves from the inbox into a slot, and leaves the slot again.

Owner: device thread. In: a Request and the engine's number for its first choice. Admission stages the data that steps
read by slot (Executor, EncoderCache) and passes only numbers to the scheduler. The second and later choices of a
request wait until the prompt of the first choice is in the prefix cache; then they join and share its blocks. If the
admission of a choice raises, the choice ends: its resources are freed, and `refused` reports the error to the loop.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from dataclasses import dataclass

import numpy as np

from _fast.scheduler import Scheduler
from engine.base.bidirectional import bi_spans_of
from engine.base.errors import AdmissionError, EngineError, QueueTimeoutError, scope_of
from engine.base.request import IDLE, Request
from engine.run.flows import IDLE_LINE, Flows, Outside
from engine.step.live import LiveRow, Place
from engine.step.parts.part import forget
from engine.step.plain import Executor

log = logging.getLogger("omniloop.engine")

LOOKS = 64  # `enter` looks at so many gates, and stops after it has found so many requests with a closed gate
REFUSALS = {  # by the number that Scheduler.add returns; normally the checks on the loop refuse the request earlier
    -1: "every slot of the engine is taken; try again later",
    -2: "the request needs more KV blocks than there are; ask for fewer tokens",
    -3: "the request's media need more rows than the encoder cache holds; send fewer or smaller media",
}


@dataclass(slots=True)
class Waiting:
    """A request and its choices that are not admitted yet."""

    request: Request
    first_id: int  # choice k has the number first_id + k
    choices: list[int]


class Admission:
    """Assigns slots to choices, and frees the slots when the choices end."""

    def __init__(self, scheduler: Scheduler, executor: Executor, shares_prefixes: bool, poison: bool) -> None:
        self._scheduler, self._executor = scheduler, executor
        self._share, self._poison = shares_prefixes, poison
        config = executor.backend.rank.model.config
        self._bidirectional = config.bidirectional  # which tokens of a prompt attend to later tokens
        # The shortest sliding window of all layers, in tokens; 0: no layer has a window.
        self._window = min((layer.window for layer in config.text.layers if layer.window), default=0)
        self._adapters = executor.backend.rank.model.adapters
        self.rows: dict[int, LiveRow] = {}  # by slot
        self.fresh: set[int] = set()  # slots whose first token the loop has not received yet
        self.refused: dict[int, EngineError] = {}  # by the engine's number, until the error is sent to the loop
        # Extras by name and by the engine's number, until they are sent to the loop.
        self.late: dict[str, dict[int, object]] = {}
        self._slot_of: dict[int, int] = {}  # by the engine's number
        self._flows = Flows(scheduler.queue.turns)
        self._outside: Outside[Waiting] = Outside()  # requests at a gate; each input to pool is an entry of its own
        self.siblings: dict[int, Waiting] = {}  # the number of a first choice -> the choices that wait for it

    def submit(self, request: Request, first_id: int) -> None:
        """Adds a request's choices, or queues them at a closed gate; choices that cannot be added go to `refused`."""
        if request.pooling is None and self._executor.may_enter(request):
            self._submit(Waiting(request, first_id, list(range(request.n))))
            return
        self._wait(Waiting(request, first_id, list(range(request.n))))
        if request.pooling is not None:
            self.enter()
            if first_id in self._outside:
                self._enter(key_of(request))

    def _wait(self, waiting: Waiting) -> None:
        """Queues the choices of a request at its closed gate."""
        request, first_id = waiting.request, waiting.first_id
        for k in waiting.choices:
            self._outside.add(first_id + k, key_of(request), line_of(request), Waiting(request, first_id, [k]))

    def enter(self) -> None:
        """Admits queued requests whose gate is open now, adapter by adapter in the order of their first requests."""
        for key in self._outside.keys(LOOKS):
            self._enter(key)

    def _enter(self, key: bytes) -> None:
        """Admits requests of one key: round-robin over callers, per caller in order of arrival."""
        closed = 0
        for device_id, waiting in self._outside.first(key, LOOKS + self._scheduler.max_slots):
            request, first_id = waiting.request, waiting.first_id
            if device_id not in self._outside:  # this choice entered together with the request's first choice
                continue
            if not self._executor.may_enter(request):
                closed += 1
                if key or closed == LOOKS:  # a gate is closed for all requests of an adapter
                    return
            elif request.pooling is not None:
                self._outside.enter(device_id)
                self._admit(request.input(waiting.choices[0]), device_id, 0)
            else:
                choices = [k for k in range(request.n) if self._outside.enter(first_id + k)]
                self._submit(Waiting(request, first_id, choices))

    def _submit(self, waiting: Waiting) -> None:
        """Admits the first choice. The others wait for its prompt if they can share its blocks, else they join now."""
        request, first, *others = waiting.request, *waiting.choices
        first_id = waiting.first_id
        if not others or not self._share or request.sampling.prompt_logprobs is not None:
            for k in waiting.choices:
                self._admit(request, first_id + k, k)
        elif self._admit(request, first_id + first, first):
            self.siblings[first_id + first] = Waiting(request, first_id, others)
        else:
            self.refused |= dict.fromkeys((first_id + k for k in others), self.refused[first_id + first])

    def release_siblings(self, device_id: int) -> None:
        """Adds the choices that waited for the choice `device_id`; their gate may be closed again."""
        waiting = self.siblings.pop(device_id, None)
        if waiting is not None and not self._executor.may_enter(waiting.request):
            self._wait(waiting)
            return
        for k in waiting.choices if waiting is not None else ():
            assert waiting is not None
            self._admit(waiting.request, waiting.first_id + k, k)

    def abort(self, device_id: int) -> None:
        """Ends one choice. If other choices of the request wait for this one, they join now."""
        self._forget_waiting(device_id)
        if device_id in self._slot_of:
            self._leave(device_id)
        self.release_siblings(device_id)

    def drop_expired(self) -> None:
        """Ends choices whose deadline has passed before their first step."""
        for slot in self._scheduler.queue.take_expired():
            device_id = self.rows[slot].device_id
            self._leave(device_id)
            self.refused[device_id] = QueueTimeoutError("the request waited longer for its first step than it may")
            self.release_siblings(device_id)

    def conclude(self, device_id: int) -> None:
        """Ends one choice as soon as its tokens so far are computed; its extras are delivered after that."""
        if device_id in self._slot_of:
            self._scheduler.abort(device_id, when_computed=True)

    def free_slots(self) -> None:
        """Resets the slots and media entries that the scheduler's last call freed; stores extras of traced rows."""
        freed, lens = (
            np.asarray(array)[: self._scheduler.num_freed].tolist()
            for array in (self._scheduler.freed_slots, self._scheduler.freed_lens)
        )
        for slot, length in zip(freed, lens):
            row = self.rows.pop(slot)
            if length:
                for name, value in self._executor.leave(slot, row, length).items():
                    self.late.setdefault(name, {})[row.device_id] = value
            del self._slot_of[row.device_id]
            self._flows.give(row.request.flow.name)
            self.fresh.discard(slot)
            forget(self._executor.reset, slot, self._poison)
        self._executor.free(self._scheduler)
        if self._outside:
            self.enter()

    def may_restart(self) -> np.ndarray:
        """uint8 [max_slots]: 1 for slots without a delivered token that have not started over before."""
        marks = np.zeros(self._scheduler.max_slots, np.uint8)
        marks[[slot for slot in self.fresh if not self.rows[slot].again]] = 1
        return marks

    def restage(self, slot: int) -> None:
        """Stages a slot again as if no step had run it. No step in flight may name the slot."""
        row = self.rows[slot]
        try:
            self._executor.reset(slot, self._poison)
            self._executor.admit(slot, row)
        except Exception as error:
            self._leave(row.device_id)
            self._refuse(row.device_id, error)
            self.release_siblings(row.device_id)

    @property
    def num_parked(self) -> int:
        """Choices that wait until their adapter has a place; any thread may read it."""
        return self._outside.num_keyed

    def ledger(self) -> dict[str, int]:
        """Counts of rows and waiting requests; all are zero when idle."""
        return {
            "live_rows": len(self.rows),
            "backlog": len(self._outside),
            "flows": len(self._flows),
            "siblings": sum(len(waiting.choices) for waiting in self.siblings.values()),
        } | self._executor.ledger()

    def _forget_waiting(self, device_id: int) -> None:
        """Removes a choice that waits at a gate or for the first choice of its request."""
        self._outside.discard(device_id)
        for waiting in self.siblings.values():
            if device_id - waiting.first_id in waiting.choices:
                waiting.choices.remove(device_id - waiting.first_id)
                return

    def _admit(self, request: Request, device_id: int, choice: int) -> bool:
        """Adds one choice. Returns False if the choice is in `refused`; it then holds no resources."""
        try:
            place = self._named(request)
            slot = self._place(request, device_id, place)
            if slot < 0:
                self.refused[device_id] = AdmissionError(REFUSALS[slot])
                return False
            place.last_place = self._scheduler.last_place(slot)
            seed = secrets.randbits(64) if request.sampling.seed is None else request.sampling.seed + choice
            row = self.rows[slot] = LiveRow(device_id, choice, request, seed, place)
            self._slot_of[device_id] = slot
            self.fresh.add(slot)
            self._executor.admit(slot, row)
        except Exception as error:
            if device_id in self._slot_of:
                self._leave(device_id)
            self._refuse(device_id, error)
            return False
        return True

    def _leave(self, device_id: int) -> None:
        """Ends a choice and frees its resources; its slot is freed once no step in flight names it."""
        self._scheduler.abort(device_id)
        self.free_slots()

    def _refuse(self, device_id: int, error: Exception) -> None:
        """Ends one choice with the error of its admission. Raises the error if it means that the device is lost."""
        if scope_of(error) == "device":
            raise error
        log.error("choice %d could not be admitted", device_id, exc_info=error)
        self.refused[device_id] = AdmissionError("the engine failed when it took this request in")

    def _named(self, request: Request) -> Place:
        """The request's identity in the prefix cache; parts of the step complete the identity later."""
        root = media_root = hashlib.blake2b(request.cache_salt, digest_size=16).digest()
        adapter = request.adapter(self._adapters) if self._adapters else 0
        if adapter:  # an adapter changes keys and values, and the rows of some media
            root = media_root = hashlib.blake2b(bytes([adapter]), key=root, digest_size=16).digest()
        if request.lora is not None:
            root = hashlib.blake2b(request.lora.sha256, key=root, digest_size=16).digest()
            media_root = root if request.lora.in_towers else media_root
        # Prompt tokens that attend to each other beyond the window need keys that a window's blocks no longer hold.
        reads = self._bidirectional != "prompt" or not 0 < self._window < len(request.prompt_token_ids)
        return Place(root, adapter, media_root, reads_cache=reads)

    def _place(self, request: Request, device_id: int, place: Place) -> int:
        """Returns the scheduler's slot, or the negative number of its refusal, after which parts undo their `place`."""
        params = request.sampling
        slot, flow = -1, self._flows.take(request.flow.name)
        try:
            self._executor.place(request, place, self._scheduler)
            slot = self._scheduler.add(
                device_id,
                np.ascontiguousarray(request.prompt_token_ids, np.int32),
                max_tokens=params.max_tokens,
                min_tokens=params.min_tokens,
                ignore_eos=params.ignore_eos,
                eos_ids=np.asarray(params.eos_token_ids, np.int32),
                stop_ids=np.asarray(params.stop_token_ids, np.int32),
                priority=request.priority,
                arrival=request.arrival,
                root=self._prompt_root(request, place.root) if self._bidirectional == "prompt" else place.root,
                keys=place.keys,
                media=place.media,
                bi_spans=bi_spans_of(request, self._bidirectional) if self._bidirectional else None,
                traced=place.traced,
                read_cache=place.reads_cache,
                flow=flow,
                weight=request.flow.weight,
                deadline=request.deadline,
                boundaries=request.boundaries,
                drafts=place.drafts,
            )
        finally:
            if slot < 0:
                self._flows.give(request.flow.name)
                self._executor.displace(place, self._scheduler)
        return slot

    def _prompt_root(self, request: Request, root: bytes) -> bytes:
        """The root of the prompt's blocks in the prefix cache for prompts whose tokens all attend to each other. Only
        the same whole prompt finds the blocks."""
        parts = [np.ascontiguousarray(request.prompt_token_ids, np.int32).tobytes()]
        parts += [item.hash + repr(item.spans).encode() for item in request.media]
        return hashlib.blake2b(b"".join(parts), key=root, digest_size=16).digest()


def key_of(request: Request) -> bytes:
    """The key of the gate that the request waits for: its adapter's hash; b"": it has no adapter."""
    return b"" if request.lora is None else request.lora.sha256


def line_of(request: Request) -> str:
    """The line in which the request waits at its gate."""
    return IDLE_LINE + request.flow.name if request.priority == IDLE else request.flow.name
