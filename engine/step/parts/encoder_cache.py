"""EncoderCache: runs the towers that a step needs, and caches their output until the scheduler evicts it.

Owner: the device thread stages features by entry number and reports evictions; the stream runs towers and reads rows,
in step order. An entry is one media item, identified by content hash; all requests with the item share the entry. If
the tower supports it, new items of a step run together up to the tower's limit. An item that exceeds the budget of a
step runs in pieces while other rows decode: an encode in the plan without a slot is a piece.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

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
        """`together`: new items of a step share tower runs; the other items of a run may change how rows round."""
        self._model = model
        self._together = together
        self._ring = ring  # None: features are not uploaded
        self.inputs: dict[int, MediaInput] = {}  # stays as long as the entry, because rows may be computed again
        self.encoded: dict[int, torch.Tensor] = {}
        self.begun: dict[int, TowerRun] = {}  # at most one entry: the one that runs in pieces
        self.entries: dict[bytes, int] = {}
        self.digests: dict[int, bytes] = {}
        self.clock = TowerClock(on_device=ring is not None and torch.cuda.is_available())
        self.place_of: dict[int, int] = {}  # by entry: the place of the adapter that changes the item's rows
        self.queries = self.hits = 0  # media items of requests; items whose entry existed already

    def find(self, digest: bytes) -> int | None:
        """The entry of this content, or None; called once per item of a request (device thread)."""
        entry = self.entries.get(digest)
        self.queries += 1
        self.hits += entry is not None
        return entry

    def work_of(self, item: MediaInput, budget: int) -> int:
        """The cost of the item's tower run, in the unit of the scheduler's `budget` (0: no budget). At most `budget` if
        the run cannot be cut into pieces (device thread)."""
        if item.modality != "prompt" and ROWS not in item.features:
            tower = self._model.towers[item.modality]
            if isinstance(tower, PausingTower):
                return tower.weight(item.features)
        return min(item.num_tokens, budget or item.num_tokens)

    def stage(self, entry: int, digest: bytes, item: MediaInput) -> None:
        """Stores a new entry's features; `digest` identifies its content and scope (device thread)."""
        self.inputs[entry] = item
        self.entries[digest] = entry
        self.digests[entry] = digest

    def evict(self, entry: int, dead: bool) -> None:
        """Drops an entry's rows, which no step in flight reads; `dead`: drops the whole entry (device thread)."""
        self.encoded.pop(entry, None)
        self.begun.pop(entry, None)
        self.clock.took.pop(entry, None)
        if dead:
            self.entries.pop(self.digests.pop(entry, b""), None)  # an entry may be evicted before it is staged
            self.inputs.pop(entry, None)
            self.place_of.pop(entry, None)

    def drop_rows(self) -> None:
        """Drops all rows; `rows` computes them again when needed (device thread, with no step in flight)."""
        self.encoded.clear()
        self.begun.clear()

    def advance(self, plan: StepPlan) -> bool:
        """Runs the piece of a tower run that the plan contains. Returns whether a piece ran (stream).

        A failed run is dropped; the item runs again, and fails again, when its rows are read.
        """
        encodes = zip(plan.encode_slot[: plan.num_encodes], plan.encode_item, plan.encode_entry)
        for work, entry in [(work, entry) for slot, work, entry in encodes if slot < 0]:
            if entry in self.encoded:
                continue
            item, run = self.inputs[entry], self.begun.get(entry)
            assert item.modality != "prompt", "text has no tower"
            try:
                with self.clock.of([entry]), self._adapted(entry):
                    if run is None:
                        tower = self._model.towers[item.modality]
                        assert isinstance(tower, PausingTower), "others are never cut"
                        self.begun.clear()
                        run = self.begun[entry] = TowerRun(tower, self._tensors(item.features))
                    rows = run.advance(work)
            except Exception as error:
                self.begun.pop(entry, None)
                if is_out_of_memory(error) or scope_of(error) == "device":
                    raise  # the whole step fails
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

        A plan row whose tower failed is marked as invalid; only this row ends.
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
        """Rows [length, hidden] of an entry; runs the tower first if the entry has no rows yet (stream).

        None if the tower failed on the item: only the requests with the item end. If the device is out of memory or
        lost, the error is raised and the step fails.
        """
        encoded = self.encoded.get(entry)
        if encoded is None:
            encoded = self._encode(entry)
        return None if encoded is None else encoded[start : start + length]

    def _encode_together(self, entries: list[int]) -> None:
        """Runs towers for entries of a step that have no rows yet and can share a run.

        If a shared run fails, its items run alone later, because a single item may have caused the error.
        """
        new = [entry for entry in dict.fromkeys(entries) if entry not in self.encoded and entry not in self.begun]
        for tower, group in self._groups(new):
            try:
                uploaded = [self._tensors(self.inputs[entry].features) for entry in group]
                with self.clock.of(group):
                    encoded = tower.encode_together(uploaded)
            except Exception as error:
                if is_out_of_memory(error) or scope_of(error) == "device":
                    raise  # the whole step fails
                log.info("%d media items failed together and run alone: %r", len(group), error)
                continue
            for entry, rows in zip(group, encoded):
                if rows.shape[0] == self.inputs[entry].num_tokens:
                    self.encoded[entry] = rows

    def _groups(self, entries: list[int]) -> Iterator[tuple[SharedTower, list[int]]]:
        """Yields groups of at least two entries that run together, in the order of the step."""
        open_groups: dict[int, tuple[SharedTower, list[int], int]] = {}
        for entry in entries:
            item = self.inputs[entry]
            if item.modality == "prompt" or ROWS in item.features or entry in self.place_of:
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
            encoded = self._made(entry, item)  # [num_tokens, hidden * row_parts]
            if encoded.shape[0] != item.num_tokens:
                raise ValueError(f"the tower made {encoded.shape[0]} rows, the prompt holds {item.num_tokens}")
        except Exception as error:
            if is_out_of_memory(error) or scope_of(error) == "device":
                raise  # the whole step fails
            log.exception("encoding one %s item failed; the requests that show it end", item.modality)
            return None
        self.encoded[entry] = encoded
        return encoded

    def _made(self, entry: int, item: MediaInput) -> torch.Tensor:
        """Rows from the item's tower, or rows that the client has sent."""
        begun = self.begun.pop(entry, None)
        if begun is not None:
            with self.clock.of([entry]), self._adapted(entry):
                return begun.finish()
        tensors = self._tensors(item.features)
        if ROWS not in tensors:
            assert item.modality != "prompt", "text has no tower"
            with self.clock.of([entry]), self._adapted(entry):
                return self._model.towers[item.modality].encode(tensors)
        config, rows = self._model.config, tensors[ROWS].to(self._model.dtype)
        if item.modality == "prompt" and config.row_parts > 1:  # later layers add nothing to rows of text
            return torch.nn.functional.pad(rows, (0, (config.row_parts - 1) * rows.shape[1]))
        return rows

    @contextmanager
    def _adapted(self, entry: int) -> Iterator[None]:
        """Context for a run of a tower on the entry's item, with the adapter that changes its rows."""
        place = self.place_of.get(entry, 0)
        items = self._model.of_items if place else None
        if items is None:
            yield
            return
        items.begin_item(place)
        try:
            yield
        finally:
            items.begin_item(0)

    def _tensors(self, features: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """Moves features to where the tower reads them: pixels, tables and frames on the device, the rest on the host.

        Grids and times stay on the host: arrays of int64 and arrays with one dimension.
        """
        large = {name: array for name, array in features.items() if array.dtype != np.int64 and array.ndim > 1}
        sent = self._ring.put(large) if self._ring is not None and large else {}
        return {name: sent[name] if name in sent else _on_host(array) for name, array in features.items()}

    def seconds_of(self, entries: Sequence[int]) -> float:
        """Seconds of the tower runs of these entries; each time is returned once (device thread, after the step)."""
        self.clock.collect()
        return sum(self.clock.took.pop(entry, 0.0) for entry in entries)

    def __len__(self) -> int:
        return len(self.encoded)


class TowerClock:
    """Counts tower runs and their seconds; on a device it uses CUDA events and never waits for them.

    A run counts once `collect` or a later run finds that its second event has fired. Owner: the stream (`with`); any
    thread may read the counts so far. Items of a shared run get equal shares of its time.
    """

    def __init__(self, on_device: bool) -> None:
        self.calls = 0
        self.seconds = 0.0
        self.took: dict[int, float] = {}  # seconds by entry, until `seconds_of` returns them
        self._entries: Sequence[int] = ()  # entries of the current run
        self._on_device = on_device
        self._begun = 0.0
        self._first: torch.cuda.Event | None = None
        # (first event, last event, entries) of the runs in flight, oldest first.
        self._open: deque[tuple[torch.cuda.Event, torch.cuda.Event, Sequence[int]]] = deque()

    def of(self, entries: Sequence[int]) -> TowerClock:
        """Sets the entries of the next run and returns the clock, for a `with` statement around the run."""
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
    """The array as a tensor. Read-only or non-contiguous arrays are copied, because torch warns about the former."""
    return torch.from_numpy(np.require(array, requirements=("C", "W")))
