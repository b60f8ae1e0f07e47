"""The pooling part: rows of pooling models end with a pooled array instead of a token.

Owner: device thread stages slots; forwards run on the stream. `HostPooling` and `DevicePooling` replace the backend's
forward and sampling. A row whose last prompt token is in the step returns its pooled line and TokenCode.END, which ends
the request; rows of earlier chunks return nothing. On an accelerator a step of up to Sizes.most_graphed tokens is one
graph: forward, pooler, and the kernels that write lines and marks into pinned memory. No step reads results of the
previous step, so two steps in flight need no extra order. Several ranks compute the hidden states together, and rank 0
alone has the pooler.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from _fast.launcher import Launcher
from _fast.layout import GraphKind, SlotWord, TokenCode
from _fast.scheduler import Scheduler
from engine.base.request import PoolingParams, Request
from engine.kernels.pool_home import pool_home
from engine.layers.batch import Batch
from engine.models.base.model import Model
from engine.sampling.pending import home
from engine.sampling.sampler import Sampler
from engine.step.backend.base import RuledSampler
from engine.step.backend.device.buffers import StepBuffers
from engine.step.backend.device.forwards import Forwards
from engine.step.backend.host.slots import HostSlots
from engine.step.live import LiveRow, Place
from engine.step.parts.part import ABSENT, JOINS, StepPart
from engine.step.rank import Rank
from engine.step.rows import RowArrays
from engine.step.sizes import Sizes
from engine.step.step import Media, Step

LINES = "lines of tokens"  # key in Step.notes: float32 [num_tokens, width] on the host, perhaps not copied yet


class Pooling(StepPart):
    """The pooling part. Inputs wait for a free slot outside the scheduler, because there may be very many."""

    name = "pooled"

    def __init__(self, sizes: Sizes) -> None:
        self._room = sizes.max_slots  # the number of free slots
        self._per_token = np.zeros(sizes.max_slots, np.bool_)
        self._parts: dict[int, list[np.ndarray]] = {}  # by slot: lines of a prompt's chunks, until its last one
        self._live: set[int] = set()

    def gate(self, request: Request) -> bool:
        return self._room > 0

    def place(self, request: Request, place: Place, scheduler: Scheduler) -> None:
        if request.pooling is not None and request.pooling.per_token:
            place.reads_cache = False  # every token's hidden state is read

    def admit(self, slot: int, row: LiveRow, words: np.ndarray) -> bool:
        if slot not in self._live:
            self._live.add(slot)
            self._room -= 1
        pooling = row.request.pooling
        self._per_token[slot] = pooling is not None and pooling.per_token
        return True

    def reset(self, slot: int, poison: bool) -> None:
        if slot in self._live:
            self._live.discard(slot)
            self._room += 1
        self._per_token[slot] = False
        self._parts.pop(slot, None)

    def role(self, step: Step) -> int:
        step.eager = bool(self._per_token[step.rows.slots].any())
        return JOINS if step.eager else ABSENT

    def collect(self, step: Step) -> None:
        """Collects the lines of rows that want one per token; no later step writes the step's lines."""
        lines: np.ndarray = step.notes[LINES].numpy()
        rows, found, ends = step.rows, step.home, set(step.rows.sampled.tolist())
        for row in np.flatnonzero(self._per_token[rows.slots]).tolist():
            slot, start = int(rows.slots[row]), int(rows.starts[row])
            if rows.computed[row] == 0:  # the first chunk, possibly again after a preemption
                self._parts[slot] = []
            self._parts[slot].append(lines[start : start + int(rows.lens[row])])
            if row in ends and row not in found.invalid:
                found.extra(self.name, row, np.concatenate(self._parts.pop(slot)))

    def ledger(self) -> dict[str, int]:
        return {"tokenwise": len(self._parts)}


def take_lines(step: Step, lines: np.ndarray, outside: np.ndarray, num_embeddings: int) -> None:
    """Stores the pooled lines in Step.home; every row ends without a token.

    `lines`: float32 [num_sampled, width], not written again; `outside`: bool [num_sampled], rows with invalid token
    ids. A row ends with an error if its line is not finite or its token ids are invalid.
    """
    sampled = step.rows.sampled
    chosen = np.full((len(sampled), 1), int(TokenCode.END), np.int32)
    chosen[~np.isfinite(lines).all(axis=1), 0] = TokenCode.INVALID
    chosen[outside, 0] = TokenCode.OUTSIDE
    step.home.take_tokens(sampled, chosen, num_embeddings)
    for row, line in zip(sampled.tolist(), lines):
        if row not in step.home.invalid:
            step.home.extra(Pooling.name, row, line)


class HostPooling:
    """The forward of a pooling model on the CPU: computes a line for each row that ends."""

    def __init__(self, model: Model, sizes: Sizes, slots: HostSlots) -> None:
        assert model.pooler is not None
        self._model, self._pooler, self._slots = model, model.pooler, slots
        self._vocab = model.config.text.vocab_size
        self.sampler = Sampler(0, self._vocab)  # without slots: no row of a pooling model samples a token
        self._seconds = np.zeros(sizes.max_slots, np.int32)  # by slot: the first token of a pair's second text
        self._counted = np.zeros(sizes.max_slots, np.int32)  # by slot: the first token that is pooled

    def admit(self, slot: int, row: LiveRow, words: np.ndarray) -> None:
        self._seconds[slot], self._counted[slot] = starts_of(row.request.pooling)

    def reset(self, slot: int, poison: bool) -> None:
        """Does nothing: the next admission writes all values of the slot."""

    def launch(self, step: Step, rows: RowArrays, batch: Batch) -> None:
        slots, sampled = step.rows.slots, step.rows.sampled
        batch.second_start = torch.from_numpy(self._seconds[slots])
        if not self._pooler.config.pools_prompt:
            batch.pool_start = torch.from_numpy(self._counted[slots])
        outside = self._slots.outside[step.sampled_slots]
        if not step.eager:
            lines = self._pooler.lines(batch, len(sampled), self._model.forward)
        else:
            index, batch.sample_index = batch.sample_index, None
            assert index is not None
            hidden = self._model.forward(batch)  # [num_tokens, hidden_size]
            lines = self._pooler.lines_of(hidden, batch, index)
            step.notes[LINES] = self._pooler.project_tokens(hidden)
        take_lines(step, lines.numpy(), outside, self._vocab)

    def choose(self, step: Step) -> None:
        """Does nothing: the forward has filled Step.home."""


class PooledRank:
    """One rank's part of each step of a pooling model on accelerators: the hidden states that rank 0 pools."""

    def __init__(self, rank: Rank, sizes: Sizes, buffers: StepBuffers) -> None:
        model = rank.own
        assert model.pooler is not None
        self.rank, self._model, self._pooler, self._sizes, self.buffers = rank, model, model.pooler, sizes, buffers

    def forward_into(self, kind: int, tokens: int, variant: int = 0) -> None:
        """A whole step of `tokens` padded tokens and at most as many rows."""
        assert kind == GraphKind.MIXED
        rows = min(tokens, self._sizes.max_rows)
        self._pool(self._batch(tokens, rows, rows, [], variant), rows)

    def abridged_into(self, kind: int, tokens: int, variant: int = 0) -> None:
        """`forward_into` with fewer launches, which loads every kernel."""
        with self._model.abridged():
            self.forward_into(kind, tokens, variant)

    def eager(self, step: Step, media: list[Media]) -> None:
        """A step without a graph."""
        plan = step.plan
        batch = self._batch(plan.num_tokens, plan.num_rows, plan.num_sampled, media, step.variant)
        if not step.eager:
            self._pool(batch, plan.num_sampled)
            return
        ends, batch.sample_index = batch.sample_index, None
        assert ends is not None
        self._pool_tokens(self._model.forward(batch), batch, ends, step)

    def largest(self) -> None:
        """Runs the step with the most tokens."""
        self.forward_into(GraphKind.MIXED, self._sizes.max_tokens, self.buffers.variants.forward)

    def warm_up(self) -> None:
        """Does nothing: a pooling model uses only the kernels of its forward."""

    def _pool(self, batch: Batch, rows: int) -> None:
        """Computes the hidden states that the first `rows` inputs need; rank 0 makes their lines."""
        self._pooler.select(batch, rows)
        self._model.forward(batch)

    def _pool_tokens(self, hidden: torch.Tensor, batch: Batch, ends: torch.Tensor, step: Step) -> None:
        """Rank 0 makes the lines from the hidden states [num_tokens, hidden_size] of all tokens."""

    def _batch(self, tokens: int, rows: int, ends: int, media: list[Media], variant: int) -> Batch:
        buffers = self.buffers
        batch = buffers.batch(tokens, rows, False, media, variant)
        batch.sample_index = buffers.inputs.sample_index[:ends]
        row_slot, slots = buffers.inputs.row_slot[:rows], buffers.slots.tensors
        if self._model.reads_pairs:
            batch.second_start = slots.word(SlotWord.SECOND_START).index_select(0, row_slot.long())
        if not self._pooler.config.pools_prompt:
            batch.pool_start = slots.word(SlotWord.POOL_START).index_select(0, row_slot.long())
        return batch


class DevicePooling(PooledRank):
    """The forward of a pooling model on an accelerator: computes a line for each row that ends. Of several ranks, the
    first rank's."""

    ruled: RuledSampler | None = None  # no row samples a token, so no row has rules

    def __init__(self, rank: Rank, sizes: Sizes, buffers: StepBuffers) -> None:
        super().__init__(rank, sizes, buffers)
        text = self._model.config.text
        self.all = Forwards(self)  # replaced if there are further ranks
        self._vocab = text.vocab_size
        self.sampler = Sampler(0, self._vocab)  # without slots
        width = self._pooler.width(text.hidden_size)
        self._lines = buffers.home.lines(width).view(torch.float32)  # [RECORDS, max_rows, width], pinned
        self.launcher: Launcher  # set by the backend

    # -- what is launched, and recorded as graphs at start ------------------------------------------------------------

    def _pool(self, batch: Batch, rows: int) -> None:
        self._send(self._pooler.lines(batch, rows, self._model.forward))

    def _pool_tokens(self, hidden: torch.Tensor, batch: Batch, ends: torch.Tensor, step: Step) -> None:
        self._send(self._pooler.lines_of(hidden, batch, ends))
        step.notes[LINES] = home(self._pooler.project_tokens(hidden))

    def _send(self, lines: torch.Tensor) -> None:
        """Launches the copy of lines [rows, width] and of the rows' marks to pinned memory."""
        pool_home(self._lines, lines, self.buffers.inputs.home)
        self.buffers.send_tokens()  # instead of a token each row sends END, or OUTSIDE for an invalid id

    def record(self, variants: Iterable[int]) -> None:
        """Does nothing: a pooling model has no decode steps."""

    def record_forward(self, kind: int, tokens: int, variant: int = 0) -> None:
        """Records a step on every rank. First an abridged forward with fewer launches loads every kernel."""
        self.all.run(lambda own: own.abridged_into(kind, tokens, variant))
        whole = self.all.capture(lambda own: own.forward_into(kind, tokens, variant), met=True)
        self.launcher.set_graph(kind, variant, tokens, *whole)

    def decode(self, rows: int, variant: int = 0) -> None:
        """Does nothing: a pooling model has no decode steps."""

    # -- steps --------------------------------------------------------------------------------------------------------

    def admit(self, slot: int, row: LiveRow, words: np.ndarray) -> None:
        """Writes the start of a pair's second text and the first pooled token into the slot's words."""
        words[SlotWord.SECOND_START], words[SlotWord.POOL_START] = starts_of(row.request.pooling)

    def reset(self, slot: int, poison: bool) -> None:
        """Does nothing: the next admission writes all words of the slot."""

    def kind_of(self, step: Step) -> int:
        """MIXED, because all tokens are prompt tokens."""
        return GraphKind.MIXED

    def launch(self, step: Step, kind: int, size: int) -> None:
        """Launches the whole step; `size`: tokens of the graph, 0: no graph."""
        step.chosen = True
        if size:
            self.launcher.launch(step.plan, step.number, kind, size, 0, step.variant)
            return
        self.launcher.prep(step.plan, step.number)
        media = self.all.copies_of(step.media)
        self.all.run(lambda own: own.eager(step, media[own.rank.number]))
        self.launcher.finish()

    def choose(self, step: Step) -> None:
        """Does nothing: `launch` has launched the whole step."""

    def collect(self, step: Step) -> None:
        """Reads the step's lines from pinned memory."""
        sampled = step.rows.sampled
        outside = self.buffers.home.ring[step.number].numpy()[sampled, 0] == TokenCode.OUTSIDE
        lines = self._lines[step.number, : len(sampled)].numpy().copy()  # a later step writes the buffer
        take_lines(step, lines, outside, self._vocab)


def starts_of(pooling: PoolingParams | None) -> tuple[int, int]:
    """The start of an input's second text (0: there is none), and the first token that is pooled."""
    if pooling is None:
        return 0, 0
    second = 0 if pooling.seconds is None else int(pooling.seconds[0])
    return second, 0 if pooling.pool_starts is None else int(pooling.pool_starts[0])
