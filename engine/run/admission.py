"""Requests on the device thread: from the inbox into a slot, and out of it again.

Owner: device thread. In: a Request and the engine's number for its first choice. It stages what steps read by slot
(Executor, EncoderCache) and passes only numbers to the scheduler. The choices of one request beyond the first
wait until the first one's prompt is in the prefix cache, then join and share its blocks. An error in an admission ends
the choice that was being admitted: what the choice had taken is freed, and `refused` reports the error to the loop.
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
from engine.base.request import Request
from engine.run.flows import Flows, Outside
from engine.step.live import LiveRow, Place
from engine.step.parts.part import forget
from engine.step.plain import Executor

log = logging.getLogger("omniloop.engine")

LOOKS = 64  # requests that wait at closed gates and are asked at a time
REFUSALS = {  # by the number that Scheduler.add gives; the loop's own checks refuse such requests before
    -1: "every slot of the engine is taken; try again later",
    -2: "the request needs more KV blocks than there are; ask for fewer tokens",
    -3: "the request's media need more rows than the encoder cache holds; send fewer or smaller media",
}


@dataclass(slots=True)
class Waiting:
    """Choices of a request that are not admitted yet."""

    request: Request
    first_id: int  # choice k has the number first_id + k
    choices: list[int]


class Admission:
    """Who lives in which slot."""

    def __init__(self, scheduler: Scheduler, executor: Executor, shares_prefixes: bool, poison: bool) -> None:
        self._scheduler, self._executor = scheduler, executor
        self._share, self._poison = shares_prefixes, poison
        config = executor.backend.rank.model.config
        self._bidirectional = config.bidirectional  # which tokens of a prompt see later ones
        # The shortest window of a layer; 0: no layer has one.
        self._window = min((layer.window for layer in config.text.layers if layer.window), default=0)
        self._adapters = executor.backend.rank.model.adapters
        self.rows: dict[int, LiveRow] = {}  # by slot
        self.fresh: set[int] = set()  # slots of which the loop knows nothing yet
        self.refused: dict[int, EngineError] = {}  # by the engine's number: until the loop has it
        self.late: dict[str, dict[int, object]] = {}  # by name, by the engine's number: extras, until the loop has them
        self._slot_of: dict[int, int] = {}  # by the engine's number
        self._flows = Flows(scheduler.queue.turns)
        self._outside: Outside[Waiting] = Outside()  # at a gate; inputs to pool one by one
        self.siblings: dict[int, Waiting] = {}  # the number of a first choice -> the ones that wait for it

    def submit(self, request: Request, first_id: int) -> None:
        """Adds a request's choices, behind those that wait at a gate; choices that cannot be added are `refused`."""
        if request.pooling is None and self._executor.may_enter(request):
            self._submit(Waiting(request, first_id, list(range(request.n))))
            return
        for k in range(request.n):
            self._outside.add(first_id + k, request.flow, Waiting(request, first_id, [k]))
        if request.pooling is not None:
            self.enter()

    def enter(self) -> None:
        """Admits requests whose gate is open now: round-robin over callers, in order of arrival within a caller."""
        closed = 0
        for device_id, waiting in self._outside.first(LOOKS + self._scheduler.max_slots):
            request, first_id = waiting.request, waiting.first_id
            if device_id not in self._outside:  # it entered with its first choice
                continue
            if not self._executor.may_enter(request):
                closed += 1
                if closed == LOOKS:
                    return
            elif request.pooling is not None:
                self._outside.enter(device_id)
                self._admit(request.input(waiting.choices[0]), device_id, 0)
            else:
                choices = [k for k in range(request.n) if self._outside.enter(first_id + k)]
                self._submit(Waiting(request, first_id, choices))

    def _submit(self, waiting: Waiting) -> None:
        """The first choice, and the others with it or, where they find its prompt in the prefix cache, behind it."""
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
        """Adds the choices that waited for this one."""
        waiting = self.siblings.pop(device_id, None)
        for k in waiting.choices if waiting is not None else ():
            assert waiting is not None
            self._admit(waiting.request, waiting.first_id + k, k)

    def abort(self, device_id: int) -> None:
        """Ends one choice; waiting siblings of an aborted first choice join now."""
        self._forget_waiting(device_id)
        if device_id in self._slot_of:
            self._leave(device_id)
        self.release_siblings(device_id)

    def drop_expired(self) -> None:
        """Ends choices whose deadline passed before their first step."""
        for slot in self._scheduler.queue.take_expired():
            device_id = self.rows[slot].device_id
            self._leave(device_id)
            self.refused[device_id] = QueueTimeoutError("the request waited longer for its first step than it may")
            self.release_siblings(device_id)

    def conclude(self, device_id: int) -> None:
        """Ends one choice when its tokens so far are computed; then come the extras that it owes."""
        if device_id in self._slot_of:
            self._scheduler.abort(device_id, when_computed=True)

    def free_slots(self) -> None:
        """Forgets the slots and media entries that the scheduler's last call gave back; of traced rows extras stay."""
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
            self._flows.give(row.request.flow)
            self.fresh.discard(slot)
            forget(self._executor.reset, slot, self._poison)
        self._executor.free(self._scheduler)
        if self._outside:
            self.enter()

    def may_restart(self) -> np.ndarray:
        """uint8 [max_slots]: slots of which the loop knows nothing, and that have not started over before."""
        marks = np.zeros(self._scheduler.max_slots, np.uint8)
        marks[[slot for slot in self.fresh if not self.rows[slot].again]] = 1
        return marks

    def restage(self, slot: int) -> None:
        """Stages a slot anew, as no step had ever run it; none that is in flight may name it."""
        row = self.rows[slot]
        try:
            self._executor.reset(slot, self._poison)
            self._executor.admit(slot, row)
        except Exception as error:
            self._leave(row.device_id)
            self._refuse(row.device_id, error)
            self.release_siblings(row.device_id)

    def ledger(self) -> dict[str, int]:
        """Rows staged here; zero when idle."""
        return {
            "live_rows": len(self.rows),
            "backlog": len(self._outside),
            "flows": len(self._flows),
            "siblings": sum(len(waiting.choices) for waiting in self.siblings.values()),
        } | self._executor.ledger()

    def _forget_waiting(self, device_id: int) -> None:
        """A choice that waits at a gate, or for a sibling, leaves."""
        self._outside.discard(device_id)
        for waiting in self.siblings.values():
            if device_id - waiting.first_id in waiting.choices:
                waiting.choices.remove(device_id - waiting.first_id)
                return

    def _admit(self, request: Request, device_id: int, choice: int) -> bool:
        """Adds one choice. False: the choice is `refused`, and nothing of the choice is held."""
        try:
            place = self._named(request)
            slot = self._place(request, device_id, place)
            if slot < 0:
                self.refused[device_id] = AdmissionError(REFUSALS[slot])
                return False
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
        """Gives back what a choice holds, its slot at once or when no step in flight names it."""
        self._scheduler.abort(device_id)
        self.free_slots()

    def _refuse(self, device_id: int, error: Exception) -> None:
        """The error of one admission ends one choice. Raises an error that the device is lost."""
        if scope_of(error) == "device":
            raise error
        log.error("choice %d could not be admitted", device_id, exc_info=error)
        self.refused[device_id] = AdmissionError("the engine failed when it took this request in")

    def _named(self, request: Request) -> Place:
        """What the prefix cache distinguishes the request by, before parts complete it."""
        root = hashlib.blake2b(request.cache_salt, digest_size=16).digest()
        adapter = request.adapter(self._adapters) if self._adapters else 0
        if adapter:  # other keys and values, and of some media other rows
            root = hashlib.blake2b(bytes([adapter]), key=root, digest_size=16).digest()
        # Prompt tokens that see each other whatever the window need keys that a window's blocks no longer hold.
        reads = self._bidirectional != "prompt" or not 0 < self._window < len(request.prompt_token_ids)
        return Place(root, adapter, reads_cache=reads)

    def _place(self, request: Request, device_id: int, place: Place) -> int:
        """The slot that the scheduler gives, or the number of its refusal; then parts take back what they gave."""
        params = request.sampling
        slot, flow = -1, self._flows.take(request.flow)
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
                weight=request.weight,
                deadline=request.deadline,
                boundaries=request.boundaries,
            )
        finally:
            if slot < 0:
                self._flows.give(request.flow)
                self._executor.displace(place, self._scheduler)
        return slot

    def _prompt_root(self, request: Request, root: bytes) -> bytes:
        """The root of the prompt's blocks in the prefix cache, where all its tokens see each other: a block is found by
        the same prompt only."""
        parts = [np.ascontiguousarray(request.prompt_token_ids, np.int32).tobytes()]
        parts += [item.hash + repr(item.spans).encode() for item in request.media]
        return hashlib.blake2b(b"".join(parts), key=root, digest_size=16).digest()
