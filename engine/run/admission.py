"""Requests on the device thread: from the inbox into a slot, and out of it again.

Owner: device thread. In: a Request and the engine's number for its first choice. It stages what steps read by slot
(Executor, EncoderCache) and tells the scheduler numbers only. The choices of one request beyond the first
wait until the first one's prompt is in the prefix cache, then join and share its blocks. An error in an admission ends
the choice that was being admitted: what the choice had taken is given back, and the loop is told by `refused`.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from _fast.scheduler import Scheduler
from engine.base.ahead import Ahead, joints_of
from engine.base.errors import AdmissionError, EngineError, QueueTimeoutError, scope_of
from engine.base.request import ADAPTER, Request, TokenLogprob
from engine.kernels.sampling.draw import mix64
from engine.run.flows import Backlog, Flows
from engine.step.executor import Executor

log = logging.getLogger("omniloop.engine")

MEDIA_KEY = np.uint64(1 << 63)
REFUSALS = {  # by the number that Scheduler.add gives; the loop's own checks refuse such requests before
    -1: "every slot of the engine is taken; try again later",
    -2: "the request needs more KV blocks than there are; ask for fewer tokens",
    -3: "the request's media need more rows than the encoder cache holds; send fewer or smaller media",
}


@dataclass(slots=True)
class LiveRow:
    """One choice that has a slot."""

    device_id: int
    choice: int
    request: Request
    seed: int
    new_media: tuple[int, ...] = ()  # entries that this request was the first to show
    again: bool = False  # it has started over once, because a step did not fit into the device's memory
    started: float = 0.0  # when its first step began, on the clock of time.monotonic
    prompt_logprobs: list[TokenLogprob | None] | None = None  # grows as the prompt is computed


class Admission:
    """Who lives in which slot."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        prefix_caching: bool,
        poison: bool,
        ahead: Ahead = "",
        window: int = 0,
        adapters: tuple[str, ...] = (),
        adds_media: bool = False,
    ) -> None:
        """`ahead`: which tokens of a prompt see later ones; `window`: the shortest of a layer, 0: no layer has one;
        `adapters`: those of the model; `adds_media`: rows of media are added to tokens."""
        self._scheduler = scheduler
        self._executor = executor
        self._encoder = executor.encoder
        self._share = prefix_caching
        self._poison = poison
        self._ahead: Ahead = ahead
        self._window = window
        self._adapters = adapters
        self._adds_media = adds_media
        self.rows: dict[int, LiveRow] = {}  # by slot
        self.fresh: set[int] = set()  # slots of which the loop has heard nothing yet
        self.refused: dict[int, EngineError] = {}  # by the engine's number: until the loop has it
        self.routed: dict[int, np.ndarray] = {}  # by the engine's number: experts of tokens, until the loop has them
        self._slot_of: dict[int, int] = {}  # by the engine's number
        self._flows = Flows(scheduler.queue.turns)
        self._backlog = Backlog()
        self.siblings: dict[int, tuple[Request, list[int]]] = {}  # first choice -> the ones that wait for it

    def submit(self, request: Request, first_id: int) -> None:
        """Adds a request's choices; choices that cannot be added are `refused`."""
        if request.pooling is not None:
            self._backlog.add(request, first_id)
            self._admit_backlog()
            return
        wait = request.n > 1 and self._share and request.sampling.prompt_logprobs is None
        if not wait:
            for k in range(request.n):
                self._admit(request, first_id + k, k)
        elif self._admit(request, first_id, 0):
            self.siblings[first_id] = (request, list(range(1, request.n)))
        else:
            self.refused |= dict.fromkeys(range(first_id, first_id + request.n), self.refused[first_id])

    def _admit_backlog(self) -> None:
        """Inputs that wait for a slot take those that are free."""
        room = self._scheduler.max_slots - len(self.rows)
        while self._backlog and room > 0:
            device_id, request, k = self._backlog.pop()
            room -= self._admit(request.input(k), device_id, 0)

    def release_siblings(self, first_id: int) -> None:
        """Adds the choices that waited for `first_id`."""
        request, choices = self.siblings.pop(first_id, (None, ()))
        for k in choices:
            assert request is not None
            self._admit(request, first_id + k, k)

    def abort(self, device_id: int) -> None:
        """Ends one choice; waiting siblings of an aborted first choice join now."""
        self._forget_sibling(device_id)
        self._backlog.discard(device_id)
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
        """Ends one choice when its tokens so far are computed, and then reads their experts."""
        if device_id in self._slot_of:
            self._scheduler.abort(device_id, when_computed=True)

    def free_slots(self) -> None:
        """Forgets the slots and media entries that the scheduler's last call gave back; of traced rows experts stay."""
        freed, lens = (
            np.asarray(array)[: self._scheduler.num_freed].tolist()
            for array in (self._scheduler.freed_slots, self._scheduler.freed_lens)
        )
        for slot, length in zip(freed, lens):
            row = self.rows.pop(slot)
            if length:
                self.routed[row.device_id] = self._executor.routed_experts(slot, length)
            del self._slot_of[row.device_id]
            self._flows.give(row.request.flow)
            self.fresh.discard(slot)
            _forget(self._executor.reset, slot, self._poison)
        for entry, dead in self._scheduler.take_evicted():
            _forget(self._encoder.evict, entry, dead)
        if self._backlog:
            self._admit_backlog()

    def may_restart(self) -> np.ndarray:
        """uint8 [max_slots]: slots of which nothing has been told, and that have not started over before."""
        marks = np.zeros(self._scheduler.max_slots, np.uint8)
        marks[[slot for slot in self.fresh if not self.rows[slot].again]] = 1
        return marks

    def restage(self, slot: int) -> None:
        """Stages a slot anew, as no step had ever run it; none that is in flight may name it."""
        row = self.rows[slot]
        try:
            self._executor.reset(slot, self._poison)
            self._executor.admit(slot, row.request, row.seed, row.prompt_logprobs)
        except Exception as error:
            self._leave(row.device_id)
            self._refuse(row.device_id, error)
            self.release_siblings(row.device_id)

    def ledger(self) -> dict[str, int]:
        """Rows staged here; zero when idle."""
        return {
            "live_rows": len(self.rows),
            "backlog": len(self._backlog),
            "flows": len(self._flows),
            "siblings": sum(len(choices) for _, choices in self.siblings.values()),
        } | self._executor.ledger()

    def _forget_sibling(self, device_id: int) -> None:
        for first_id, (_, choices) in self.siblings.items():
            if device_id - first_id in choices:
                choices.remove(device_id - first_id)
                return

    def _admit(self, request: Request, device_id: int, choice: int) -> bool:
        """Adds one choice. False: the choice is `refused`, and nothing of the choice is held."""
        try:
            new_media: list[int] = []
            slot = self._place(request, device_id, new_media)
            if slot < 0:
                self.refused[device_id] = AdmissionError(REFUSALS[slot])
                return False
            seed = secrets.randbits(64) if request.sampling.seed is None else request.sampling.seed + choice
            row = self.rows[slot] = LiveRow(device_id, choice, request, seed, tuple(new_media))
            self._slot_of[device_id] = slot
            self.fresh.add(slot)
            if request.sampling.prompt_logprobs is not None and choice == 0:
                row.prompt_logprobs = [None]  # nothing predicts the first token
            self._executor.admit(slot, request, seed, row.prompt_logprobs)
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

    def _place(self, request: Request, device_id: int, made: list[int]) -> int:
        """The slot that the scheduler gives, or the number of its refusal; then new media entries are taken back.

        `made` takes the entries that no earlier request named.
        """
        params = request.sampling
        root = hashlib.blake2b(request.cache_salt, digest_size=16).digest()
        adapter = request.adapter(self._adapters) if self._adapters else 0
        if adapter:  # other keys and values, and of some media other rows
            root = hashlib.blake2b(bytes([adapter]), key=root, digest_size=16).digest()
        slot, flow = -1, self._flows.take(request.flow)
        try:
            media, keys = self._media(request, root, made, adapter) if request.media else (None, None)
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
                root=self._prompt_root(request, root) if self._ahead == "prompt" else root,
                keys=keys,
                media=media,
                joints=joints_of(request, self._ahead) if self._ahead else None,
                traced=params.return_routed_experts,
                read_cache=self._reads_cache(request),
                flow=flow,
                weight=request.weight,
                deadline=request.deadline,
            )
        finally:
            if slot < 0:
                self._flows.give(request.flow)
            for entry in made if slot < 0 else ():
                if self._scheduler.discard_entry(entry):
                    self._encoder.evict(entry, dead=True)
        return slot

    def _prompt_root(self, request: Request, root: bytes) -> bytes:
        """The root of the prompt's blocks in the prefix cache, where all its tokens see each other: a block is found by
        the same prompt only."""
        parts = [np.ascontiguousarray(request.prompt_token_ids, np.int32).tobytes()]
        parts += [item.hash + repr(item.spans).encode() for item in request.media]
        return hashlib.blake2b(b"".join(parts), key=root, digest_size=16).digest()

    def _reads_cache(self, request: Request) -> bool:
        """Whether cached blocks may stand for the request's first tokens."""
        if request.sampling.prompt_logprobs is not None or (request.pooling and request.pooling.per_token):
            return False
        # Prompt tokens that see each other whatever the window need keys that a window's blocks no longer hold.
        return self._ahead != "prompt" or not 0 < self._window < len(request.prompt_token_ids)

    def _media(self, request: Request, root: bytes, made: list[int], adapter: int) -> tuple[np.ndarray, np.ndarray]:
        """The scheduler's view of the media: runs int32 [m, 4], and keys int64 [2, tokens] that name the content.

        A token's key is (its id, 0). A position of a medium has two words made from the 16 bytes of the medium's name
        and the row that the position takes: the top bit of the first says that the position is no token. Where rows are
        added to tokens, the first position of a span names the content and its token for all positions behind, which
        keep their ids: tokens of an answer are found again when they come as part of a longer prompt. A medium that
        grows keeps its name; the rows of each length are an entry of their own.
        """
        runs = []
        keys = np.zeros((2, len(request.prompt_token_ids)), np.int64)
        keys[0] = request.prompt_token_ids
        for item in request.media:
            digest = hashlib.blake2b(item.hash, key=root, digest_size=16).digest()
            name = digest + item.num_tokens.to_bytes(4, "little")
            entry = self._encoder.find(name)
            if entry is None:
                work = self._encoder.work_of(item, self._scheduler.encoder.budget)
                entry = self._scheduler.add_entry(item.num_tokens, work)
                assert entry >= 0, "items larger than the encoder cache are refused before they get here"
                made.append(entry)
                if adapter:
                    item = replace(item, features={**item.features, ADAPTER: np.array(adapter)})
                self._encoder.stage(entry, name, item)
            halves = np.frombuffer(digest, "<u8")[:, None]
            done = 0
            for start, length in item.spans:
                runs.append((start, length, entry, done))
                named = 1 if self._adds_media else length
                words = mix64(halves + np.arange(done, done + named, dtype=np.uint64))  # [2, named]
                words[0] |= MEDIA_KEY
                if self._adds_media:
                    words[1] ^= np.uint64(request.prompt_token_ids[start])
                keys[:, start : start + named] = words.view(np.int64)
                done += length
        runs.sort()
        return np.asarray(runs, np.int32), keys


def _forget(call: Callable[..., None], *args: Any) -> None:
    """Drops what a request leaves behind. An error ends nobody, for the next admission writes the same places anew."""
    try:
        call(*args)
    except Exception as error:
        if scope_of(error) == "device":
            raise
        log.exception("the rest of a request could not be dropped")
