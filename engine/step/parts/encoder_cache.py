"""EncoderCache: runs the towers that a step needs, and keeps their output until the scheduler says it may go.

Owner: the device thread stages features by entry number and reports evictions; the stream runs towers and reads rows,
in step order. An entry is one media item by content hash, shared by every request that shows it. New items that a step
needs run together where their tower can do so, up to its budget, whichever requests show them. An item that exceeds the
budget of a step runs in pieces while other rows decode: a plan's encode without a slot is a piece.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from _fast.plan import StepPlan
from engine.base.errors import EngineError, is_out_of_memory, scope_of
from engine.base.request import ROWS, MediaInput
from engine.encoders.tower import PausingTower, SharedTower
from engine.models.base.model import Model
from engine.step.backend.device.upload_ring import UploadRing
from engine.step.parts.pieces import TowerRun
from engine.step.step import Media, Step

log = logging.getLogger("omniloop.engine")


class EncoderCache:
    """Tower outputs by entry number: [num_tokens, hidden] each."""

    def __init__(self, model: Model, together: bool = True, ring: UploadRing | None = None) -> None:
        """`together`: new items of a step share runs of their tower; other company may then round rows differently."""
        self._model = model
        self._together = together
        self._ring = ring  # None: towers run where the features are
        self.inputs: dict[int, MediaInput] = {}  # held as long as the entry: rows may be dropped and made again
        self.encoded: dict[int, torch.Tensor] = {}
        self.begun: dict[int, TowerRun] = {}  # at most one: the entry of which pieces have run
        self.entries: dict[bytes, int] = {}
        self.digests: dict[int, bytes] = {}
        self.clock = TowerClock(on_device=ring is not None and torch.cuda.is_available())
        self.queries = self.hits = 0  # media items of requests; items that an entry held already

    def find(self, digest: bytes) -> int | None:
        """The entry that holds this content, if any; one look per item of a request (device thread)."""
        entry = self.entries.get(digest)
        self.queries += 1
        self.hits += entry is not None
        return entry

    def work_of(self, item: MediaInput, budget: int) -> int:
        """What the item's tower costs a step, in the unit of the scheduler's `budget` (0: none); no more than that
        where the run cannot be cut (device thread)."""
        if item.modality != "prompt" and ROWS not in item.features:
            tower = self._model.towers[item.modality]
            if isinstance(tower, PausingTower):
                return tower.weight(item.features)
        return min(item.num_tokens, budget or item.num_tokens)

    def stage(self, entry: int, digest: bytes, item: MediaInput) -> None:
        """Keeps a new entry's features until its tower has run; `digest` names content and scope (device thread)."""
        self.inputs[entry] = item
        self.entries[digest] = entry
        self.digests[entry] = digest

    def evict(self, entry: int, dead: bool) -> None:
        """Drops rows that no step in flight reads; a dead entry is forgotten altogether (device thread)."""
        self.encoded.pop(entry, None)
        self.begun.pop(entry, None)
        self.clock.took.pop(entry, None)
        if dead:
            self.entries.pop(self.digests.pop(entry, b""), None)  # an entry may go before it was staged
            self.inputs.pop(entry, None)

    def drop_rows(self) -> None:
        """Drops all rows; `rows` makes them again (device thread, with no step in flight)."""
        self.encoded.clear()
        self.begun.clear()

    def advance(self, plan: StepPlan) -> bool:
        """Runs the piece of a tower that the plan brings; says whether it did (stream).

        What fails is forgotten, and fails again where the rows are read.
        """
        encodes = zip(plan.encode_slot[: plan.num_encodes], plan.encode_item, plan.encode_entry)
        for work, entry in [(work, entry) for slot, work, entry in encodes if slot < 0]:
            if entry in self.encoded:
                continue
            item, run = self.inputs[entry], self.begun.get(entry)
            assert item.modality != "prompt", "text has no tower"
            try:
                with self.clock.of([entry]):
                    if run is None:
                        tower = self._model.towers[item.modality]
                        assert isinstance(tower, PausingTower), "others are never cut"
                        self.begun.clear()
                        run = self.begun[entry] = TowerRun(tower, self._tensors(item.features))
                    rows = run.advance(work)
            except Exception as error:
                self.begun.pop(entry, None)
                if is_out_of_memory(error) or scope_of(error) == "device":
                    raise  # it is the step that fails
                log.info("a piece of one %s item's tower failed: %r", item.modality, error)
                continue
            if rows is not None:
                self.begun.pop(entry, None)
                if rows.shape[0] == item.num_tokens:
                    self.encoded[entry] = rows
            return True
        return False

    def take(self, step: Step) -> list[Media]:
        """(token_start, length, rows [length, hidden]) of a step's media (stream).

        A plan row whose tower failed is noted as invalid: it ends alone.
        """
        plan = step.plan
        found: list[Media] = []
        if self._together and plan.num_media > 1:
            self._encode_together([int(plan.media_entry[run]) for run in range(plan.num_media)])
        for run in range(plan.num_media):
            start, length = int(plan.media_start[run]), int(plan.media_length[run])
            entry = int(plan.media_entry[run])
            rows = self.rows(entry, int(plan.media_row[run]), length)
            if rows is None:
                row, item = int(np.searchsorted(step.rows.starts, start, side="right")) - 1, self.inputs[entry]
                step.home.invalid[row] = EngineError(f"the model could not encode this request's {item.modality}")
            else:
                found.append((start, length, rows))
        return found

    def rows(self, entry: int, start: int, length: int) -> torch.Tensor | None:
        """Rows [length, hidden] of an entry, its tower run first if it has not been (stream).

        None when the tower refused the item: that is the fault of the requests that show it, not of the step. Where the
        device has no room for it, or is lost, the step fails.
        """
        encoded = self.encoded.get(entry)
        if encoded is None:
            encoded = self._encode(entry)
        return None if encoded is None else encoded[start : start + length]

    def _encode_together(self, entries: list[int]) -> None:
        """Runs towers for those of a step's entries that have no rows and may share a run.

        What fails together is left to run alone: the fault may be one item's.
        """
        new = [entry for entry in dict.fromkeys(entries) if entry not in self.encoded and entry not in self.begun]
        for tower, group in self._groups(new):
            try:
                uploaded = [self._tensors(self.inputs[entry].features) for entry in group]
                with self.clock.of(group):
                    encoded = tower.encode_together(uploaded)
            except Exception as error:
                if is_out_of_memory(error) or scope_of(error) == "device":
                    raise  # it is the step that fails
                log.info("%d media items failed together and run alone: %r", len(group), error)
                continue
            for entry, rows in zip(group, encoded):
                if rows.shape[0] == self.inputs[entry].num_tokens:
                    self.encoded[entry] = rows

    def _groups(self, entries: list[int]) -> Iterator[tuple[SharedTower, list[int]]]:
        """Entries that run together, at least two each, in the order of the step."""
        open_groups: dict[int, tuple[SharedTower, list[int], int]] = {}
        for entry in entries:
            item = self.inputs[entry]
            if item.modality == "prompt" or ROWS in item.features:
                continue
            tower = self._model.towers[item.modality]
            if not isinstance(tower, SharedTower):
                continue
            weight = tower.weight(item.features)
            _, group, total = open_groups.get(id(tower), (tower, [], 0))
            if total + weight > tower.together:
                if len(group) > 1:
                    yield tower, group
                group, total = [], 0
            open_groups[id(tower)] = tower, [*group, entry], total + weight
        yield from ((tower, group) for tower, group, _ in open_groups.values() if len(group) > 1)

    def _encode(self, entry: int) -> torch.Tensor | None:
        item = self.inputs[entry]
        try:
            encoded = self._made(entry, item)  # [num_tokens, hidden, or more where layers behind the first read some]
            if encoded.shape[0] != item.num_tokens:
                raise ValueError(f"the tower made {encoded.shape[0]} rows, the prompt holds {item.num_tokens}")
        except Exception as error:
            if is_out_of_memory(error) or scope_of(error) == "device":
                raise  # it is the step that fails
            log.exception("encoding one %s item failed; the requests that show it end", item.modality)
            return None
        self.encoded[entry] = encoded
        return encoded

    def _made(self, entry: int, item: MediaInput) -> torch.Tensor:
        """The rows of the item's tower, or those that a client has made."""
        begun = self.begun.pop(entry, None)
        if begun is not None:
            with self.clock.of([entry]):
                return begun.finish()
        tensors = self._tensors(item.features)
        if ROWS not in tensors:
            assert item.modality != "prompt", "text has no tower"
            with self.clock.of([entry]):
                return self._model.towers[item.modality].encode(tensors)
        config, rows = self._model.config, tensors[ROWS].to(self._model.dtype)
        if item.modality == "prompt" and config.row_parts > 1:  # later layers add nothing to text
            return torch.nn.functional.pad(rows, (0, (config.row_parts - 1) * rows.shape[1]))
        return rows

    def _tensors(self, features: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """Features where their tower reads them: pixels, tables and frames on the device, grids and times on the host.

        Those are whole numbers of 64 bits, and lines of numbers.
        """
        large = {name: array for name, array in features.items() if array.dtype != np.int64 and array.ndim > 1}
        sent = self._ring.put(large) if self._ring is not None and large else {}
        return {name: sent[name] if name in sent else _on_host(array) for name, array in features.items()}

    def seconds_of(self, entries: Sequence[int]) -> float:
        """Seconds of the tower runs that made rows of these; each is returned once (device thread, after its step)."""
        self.clock.collect()
        return sum(self.clock.took.pop(entry, 0.0) for entry in entries)

    def __len__(self) -> int:
        return len(self.encoded)


class TowerClock:
    """How often towers ran and how long that took: by the device's clock where there is one, for which nothing waits.

    A run counts when its second event has been seen to have fired, with a later run or a later look. Owner: the stream
    (`with`); anybody may look, and sees what was counted so far. Items that share a run share its time evenly.
    """

    def __init__(self, on_device: bool) -> None:
        self.calls = 0
        self.seconds = 0.0
        self.took: dict[int, float] = {}  # seconds by entry, until `seconds_of` returns them
        self._entries: Sequence[int] = ()  # of the run under way
        self._on_device = on_device
        self._begun = 0.0
        self._first: torch.cuda.Event | None = None
        # Of runs in flight, oldest first.
        self._open: deque[tuple[torch.cuda.Event, torch.cuda.Event, Sequence[int]]] = deque()

    def of(self, entries: Sequence[int]) -> TowerClock:
        """The clock, set for a run of the tower that computes the rows of these entries."""
        self._entries = entries
        return self

    def __enter__(self) -> None:
        self.collect()
        if self._on_device:
            self._first = torch.cuda.Event(enable_timing=True)
            self._first.record()
        else:
            self._begun = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.calls += 1
        if self._first is None:
            self._count(time.perf_counter() - self._begun, self._entries)
            return
        last = torch.cuda.Event(enable_timing=True)
        last.record()
        self._open.append((self._first, last, self._entries))

    def collect(self) -> None:
        """Counts the runs that have ended (device thread)."""
        while self._open and self._open[0][1].query():
            first, last, entries = self._open.popleft()
            self._count(first.elapsed_time(last) / 1000, entries)

    def _count(self, seconds: float, entries: Sequence[int]) -> None:
        self.seconds += seconds
        for entry in entries:
            self.took[entry] = self.took.get(entry, 0.0) + seconds / len(entries)


def _on_host(array: np.ndarray) -> torch.Tensor:
    """A copy only where torch, which knows no arrays that must not be written, would complain."""
    return torch.from_numpy(np.require(array, requirements=("C", "W")))
