"""StepBuffers: every fixed piece of memory that steps on an accelerator pass through, allocated once at start.

Owner: device thread. A plan is written by the scheduler into a pinned record. The step's first kernels read it there
and spread it over the slots' state and the inputs of the forward; the last one writes the tokens into a pinned ring.

    host      plan n -> records[n % 3]                            ring[n % 3] -> commit
                             |                                         ^
    device                   +--prep--> slots, inputs --forward--> sampled_hidden --sample

A record and its line of the ring are used again three steps later: by then the step has been settled, so it has been
read and its tokens too.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from _fast.layout import Header, TokenCode, record_len
from _fast.params import SlotParams
from _fast.plan import StepPlan
from engine.attention.meta import AttentionMeta, WorkList
from engine.cache.layout import CacheLayout
from engine.cache.routed import RoutedIds
from engine.cache.spec import CacheSpec, KeyValueSpec, LayerCache
from engine.device.accelerator import Accelerator
from engine.kernels.attention.tiles import has_large_tiles
from engine.kernels.attention.work import PARTS_OF_CODES, PARTS_PER_UNIT, empty_list, fill_list, max_parts
from engine.kernels.record import records_in
from engine.kernels.sampling.home import send_home
from engine.kernels.sampling.top_logprobs import LINE
from engine.kernels.step_inputs import step_inputs
from engine.kernels.step_tensors import empty_inputs, empty_slots
from engine.kernels.target import target
from engine.layers.batch import Batch
from engine.models.base.model import Model
from engine.step.build import RowArrays, axis_positions
from engine.step.executor import Sizes
from engine.step.slots import SlotState

RECORDS = 3
MIN_UPDATES = 16384  # block-table changes that one plan may carry: 256 KiB of its record


class Cut(NamedTuple):
    """What the parts and tiles of a step's rows follow from, beside the rows."""

    num_kv_heads: int
    head_dim: int
    codes: bool  # pages of 8 bits

    @property
    def per_unit(self) -> int:
        return PARTS_OF_CODES if self.codes else PARTS_PER_UNIT

    @property
    def large(self) -> bool:
        return self.codes and has_large_tiles(target(), self.head_dim)


def _cut(spec: CacheSpec) -> Cut | None:
    """None: nothing attends to what is kept."""
    if not isinstance(spec, KeyValueSpec):
        return None
    return Cut(spec.num_kv_heads, spec.head_dim, spec.dtype.itemsize == 1)


class StepBuffers:
    """Fixed addresses; what steps do with them is the executor's."""

    def __init__(
        self,
        model: Model,
        sizes: Sizes,
        layout: CacheLayout,
        accelerator: Accelerator,
        invariant: bool,
        overlays: bool = False,
    ) -> None:
        """`overlays`: rows may take the place of embeddings, in recorded steps too."""
        device, rows, tokens = accelerator.device, sizes.max_rows, sizes.max_tokens
        updates = max(len(layout.groups) * (sizes.max_blocks + 1), MIN_UPDATES)
        length = record_len(rows, tokens, updates)
        self._sizes = sizes
        self._invariant = invariant
        self._layout = layout
        text = model.config.text
        self._heads, self._vocab, self._axes = text.num_heads, text.vocab_size, model.config.axes
        self._cuts = [_cut(group.spec) for group in layout.groups]
        self.records = records_in(accelerator.pinned(RECORDS * length).view(RECORDS, length), device)
        self.ring = accelerator.pinned(RECORDS * rows * sizes.width).view(RECORDS, rows, sizes.width)
        self.told = accelerator.pinned(RECORDS * rows * LINE).view(RECORDS, rows, LINE)  # log-probabilities
        self.plans = [
            StepPlan(rows, tokens, updates, buffer=record.numpy(), number=number, width=sizes.width)
            for number, record in enumerate(self.records.pinned)
        ]
        self.params = SlotParams(sizes.max_slots)
        self.slots = empty_slots(sizes.max_slots, sizes.max_blocks, len(layout.groups), device)
        self.inputs = empty_inputs(
            rows, tokens, len(layout.groups), model.config.axes, device, bool(model.config.ahead), bool(model.adapters)
        )
        self.runs = torch.full((sizes.width, rows), int(TokenCode.END), dtype=torch.int32, device=device)
        self.tokens = self.runs[0]  # the first of each row's run
        self.sampled_hidden = torch.zeros(rows, text.hidden_size, dtype=model.dtype, device=device)
        self._overlay: tuple[Tensor, Tensor] | None = None  # recorded steps read it
        if overlays:
            most = sizes.most_graphed
            shown = torch.zeros(most, 1, dtype=torch.bool, device=device)
            width = text.hidden_size * model.config.row_parts
            self._overlay = shown, torch.zeros(most, width, dtype=model.dtype, device=device)
        self.routed: RoutedIds | None = None  # where experts are kept
        self.work: dict[Cut, WorkList] = self._work(1)
        self.caches: list[LayerCache] = []

    def set_caches(self, caches: list[LayerCache], num_blocks: int) -> None:
        """The KV cache, and room for the work lists of any step over it."""
        self.caches = caches
        self.work = self._work(num_blocks)
        if self.routed is not None:
            self.routed.allocate(num_blocks)

    def _work(self, num_blocks: int) -> dict[Cut, WorkList]:
        """A list for each way in which the layers of groups cut rows: most models have one."""
        sizes, device = self._sizes, self.tokens.device
        if not self._layout.keeps:  # nothing reads a list
            return {}
        parts = partial(max_parts, num_blocks, sizes.block_size, sizes.max_rows)
        return {
            cut: empty_list(
                sizes.max_rows,
                sizes.max_tokens,
                parts(cut.per_unit),
                self._heads,
                cut.head_dim,
                device,
                cut.per_unit,
                cut.large,
            )
            for cut in dict.fromkeys(self._cuts)
            if cut is not None
        }

    def prep(self) -> None:
        """Launches what turns the next record into the inputs of a forward: slots, tokens, rows, work lists."""
        sizes = self._sizes
        step_inputs(
            self.inputs, self.slots, self.records, sizes.max_rows, sizes.max_tokens, sizes.block_size, self._vocab
        )  # fmt: skip
        for cut, work in self.work.items():  # rows are cut alike in all groups of a cut
            meta = self._meta(self._cuts.index(cut), sizes.max_tokens, sizes.max_rows, False)
            fill_list(work, meta, self._heads // cut.num_kv_heads, self._invariant)

    def send_tokens(self) -> None:
        """Launches what brings the chosen tokens into the step's line of the ring."""
        send_home(self.ring, self.runs, self.inputs.home, self.inputs.row_slot, self.slots)

    def batch(self, tokens: int, rows: int, decode_only: bool, media: list[tuple[int, int, Tensor]]) -> Batch:
        """Views of the first `tokens` tokens, all of them read, and `rows` rows; more than the step has is padding."""
        inputs, overlay, routed = self.inputs, None, self.routed
        if self._overlay is not None and not media and not decode_only and tokens <= len(self._overlay[0]):
            overlay = self._overlay[0][:tokens], self._overlay[1][:tokens]
        return Batch(
            token_ids=inputs.token_ids[:tokens],
            positions=inputs.positions[..., :tokens],
            media=media,
            attention=[self._meta(group, tokens, rows, decode_only) for group in range(len(self._layout.groups))],
            caches=self.caches,
            group_of=self._layout.group_of,
            num_tokens=inputs.query_start[-1:],  # behind the last row
            routed=None if routed is None else routed.of_step(inputs.slot_mapping[routed.group, :tokens]),
            overlay=overlay,
            adapters=None if inputs.adapters is None else inputs.adapters[:tokens],
        )

    def show(self, media: list[tuple[int, int, Tensor]]) -> None:
        """Media of the recorded forward that is launched next; `hide` follows it."""
        assert self._overlay is not None
        shown, places = self._overlay
        for start, parts in _adjacent(media):  # one copy for many rows that decode
            end = start + sum(map(len, parts))
            torch.cat(parts, out=places[start:end])
            shown[start:end] = True

    def hide(self) -> None:
        """The forwards launched from now on show no media."""
        assert self._overlay is not None
        self._overlay[0].zero_()

    def _meta(self, group: int, tokens: int, rows: int, decode_only: bool) -> AttentionMeta:
        inputs, decode_only = self.inputs, decode_only and not self._invariant  # an invariant list has tiles only
        cut = self._cuts[group]
        return AttentionMeta(
            query_start=inputs.query_start[: rows + 1],
            context_len=inputs.context_len[:rows],
            block_tables=self.slots.block_tables[group],
            slot_mapping=inputs.slot_mapping[group, :tokens],
            work=None if cut is None else self.work.get(cut),
            table_row=inputs.row_slot[:rows],
            last_keys=None if decode_only or inputs.last_keys is None else inputs.last_keys[:tokens],
            decode_only=decode_only,
        )

    def send_positions(self, plan: StepPlan, rows: RowArrays, host: SlotState) -> None:
        """Appends int32 [axes, num_tokens] to a packed plan's record, for prompts that bring positions of their own; or
        int32 [num_tokens], for tokens that see later ones."""
        positions: np.ndarray | None = None
        if self._axes > 1 and bool((rows.computed < host.prompt_len[rows.slots]).any()):
            positions = axis_positions(rows, host, self._axes)
        elif host.joints:
            positions = host.last_keys(rows.slots, rows.lens, rows.computed)
        if positions is None:
            return
        record = np.asarray(plan.record)
        start = plan.used_len
        record[start : start + positions.size] = positions.reshape(-1)
        record[Header.POSITIONS_AT], record[Header.USED_LEN] = start, start + positions.size


def _adjacent(media: list[tuple[int, int, Tensor]]) -> Iterator[tuple[int, list[Tensor]]]:
    """(token_start, rows of runs that follow each other without a gap)."""
    start, parts, end = 0, list[Tensor](), -1
    for first, length, rows in media:
        if first != end:
            if parts:
                yield start, parts
            start, parts = first, []
        parts.append(rows)
        end = first + length
    if parts:
        yield start, parts
