"""The media part: rows from towers, or rows from clients, replace embeddings of a prompt.

Owner: the device thread assigns keys to media and stages features; towers run on the stream, in step order
(encoder_cache). On an accelerator the duration of a step with media is unknown, so the next step is planned at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from _fast.scheduler import Scheduler
from engine.base.config import EngineConfig
from engine.base.output import StepOutput
from engine.base.request import ADAPTER, MediaInput, Request
from engine.base.stats import EncoderCounts, StepStats
from engine.encoders.tower import each
from engine.kernels.sampling.draw import mix64
from engine.models.base.model import Model
from engine.step.backend.base import Backend
from engine.step.backend.device.upload_ring import UploadRing
from engine.step.live import LiveRow, Place
from engine.step.parts.encoder_cache import EncoderCache
from engine.step.parts.part import ABSENT, JOINS, StepPart, Steps, forget
from engine.step.step import Step

MEDIA_KEY = np.uint64(1 << 63)
# Numbers of rows of the media that run at start. Together with the largest item they compile every variant of a kernel
# (one row, odd numbers, multiples of 16; short and long segments; either order of scaling).
EXAMPLE_ROWS = (1, 6, 15, 30, 64, 375)


class Media(StepPart):
    """The media part; every model has it, and in a text model it has no items."""

    name = "media"
    ranks = "every"

    def __init__(self, config: EngineConfig, model: Model) -> None:
        self._config, self._model = config, model
        self._backend: Backend
        self.encoder: EncoderCache
        self._new: dict[int, list[int]] = {}  # by slot: entries that its request was the first to use

    def start(self, steps: Steps) -> None:
        self._backend = steps.backend
        rank = steps.backend.rank
        has_rows = len(self._model.config.modalities) > 1 or self._config.enable_prompt_embeds
        ring = UploadRing(rank.accelerator) if rank.accelerator is not None and has_rows else None
        # In a shared run the other items may change how rows round, so --deterministic forbids it on accelerators.
        self.encoder = EncoderCache(self._model, rank.on_host or not self._config.deterministic, ring)

    def warm_up(self, walk: bool) -> None:
        """On the walk, runs the towers with small items to compile their kernels; Startup runs the largest items."""
        pools = self._model.pooler is not None
        for tower in each(self._model.towers) if walk else ():
            for rows in EXAMPLE_ROWS[:1] if pools else EXAMPLE_ROWS:
                for modality in tower.modalities[:1] if pools else tower.modalities:
                    tower.encode(tower.example(modality, rows))

    def place(self, request: Request, place: Place, scheduler: Scheduler) -> None:
        if request.media:
            place.media, place.keys = self._named(request, place, scheduler)

    def displace(self, place: Place, scheduler: Scheduler) -> None:
        for entry in place.made:
            if scheduler.discard_entry(entry):
                self.encoder.evict(entry, dead=True)

    def free(self, scheduler: Scheduler) -> None:
        for entry, dead in scheduler.take_evicted():
            forget(self.encoder.evict, entry, dead)

    def admit(self, slot: int, row: LiveRow, words: np.ndarray) -> bool:
        if row.choice == 0 and row.place.made:
            self._new[slot] = row.place.made
        return bool(row.request.media)

    def reset(self, slot: int, poison: bool) -> None:
        self._new.pop(slot, None)

    def role(self, step: Step) -> int:
        return JOINS if step.plan.num_encodes or step.plan.num_media or self._new else ABSENT

    def before(self, step: Step) -> None:
        plan = step.plan
        begun = plan.num_encodes and self.encoder.advance(plan)
        if plan.num_media:
            step.media = self.encoder.take(step)
        if (begun or plan.num_media) and self._backend.can.graphs:
            step.times.is_a_guess()

    def after(self, step: Step, output: StepOutput, places: Sequence[int], scheduler: Scheduler) -> None:
        """Adds the encoding time of a request's new media to the first output of the request."""
        for row in step.rows.sampled.tolist() if self._new else ():
            slot = int(step.rows.slots[row])
            if slot in self._new and output.has_news(places[row]):
                step.home.extra("encode_s", row, self.encoder.seconds_of(self._new.pop(slot)))

    def gauges(self, stats: StepStats) -> None:
        clock = self.encoder.clock
        if stats.num_encodes:
            clock.collect()
        stats.encoder = EncoderCounts(clock.calls, clock.seconds, self.encoder.queries, self.encoder.hits)

    def ledger(self) -> dict[str, int]:
        """The number of cached entries; entries stay cached when no request is open."""
        return {"encoder_rows": len(self.encoder)}

    def _named(self, request: Request, place: Place, scheduler: Scheduler) -> tuple[np.ndarray, np.ndarray]:
        """The media for the scheduler: runs int32 [m, 4], and keys int64 [2, tokens] that identify the content.

        A token's key is (id, 0). The key of a media position is a hash of the item's digest and the position's row; the
        top bit of the first word marks a media position. If the model adds rows to tokens, only the first position of a
        span has a hash (of the content and its token). The later positions have their ids as keys, so the prefix cache
        finds tokens of an answer again when they return in a longer prompt. An item that grows has the same digest, but
        an entry for each length.
        """
        adds = self._model.config.adds_media
        runs = []
        keys = np.zeros((2, len(request.prompt_token_ids)), np.int64)
        keys[0] = request.prompt_token_ids
        for item in request.media:
            digest = hashlib.blake2b(item.hash, key=place.media_root, digest_size=16).digest()
            entry = self._entry(item, digest, place, scheduler)
            if request.lora is not None and request.lora.in_towers:
                self.encoder.place_of[entry] = place.adapter - len(self._model.adapters)
            halves = np.frombuffer(digest, "<u8")[:, None]
            done = 0
            for start, length in item.spans:
                runs.append((start, length, entry, done))
                named = 1 if adds else length
                words = mix64(halves + np.arange(done, done + named, dtype=np.uint64))  # [2, named]
                words[0] |= MEDIA_KEY
                if adds:
                    words[1] ^= np.uint64(request.prompt_token_ids[start])
                keys[:, start : start + named] = words.view(np.int64)
                done += length
        runs.sort()
        return np.asarray(runs, np.int32), keys

    def _entry(self, item: MediaInput, digest: bytes, place: Place, scheduler: Scheduler) -> int:
        """The scheduler's entry of an item's rows; makes and stages a new entry if there is none."""
        name = digest + item.num_tokens.to_bytes(4, "little")
        entry = self.encoder.find(name)
        if entry is None:
            work = self.encoder.work_of(item, scheduler.encoder.budget)
            entry = scheduler.add_entry(item.num_tokens, work)
            assert entry >= 0, "items larger than the encoder cache are refused before they get here"
            place.made.append(entry)
            if 0 < place.adapter <= len(self._model.adapters):  # of the checkpoint, not by name
                item = replace(item, features={**item.features, ADAPTER: np.array(place.adapter)})
            self.encoder.stage(entry, name, item)
        return entry
