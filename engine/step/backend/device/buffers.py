"""StepBuffers: the buffers of steps on an accelerator, allocated once at start at fixed addresses.

Owner: device thread. The scheduler writes a plan into a pinned record. The step's first kernels read the record and
write the slots' state and the inputs of the forward; the last kernel writes the tokens into a pinned ring.

    host      plan n -> records[n % 3]                            ring[n % 3] -> commit
                             |                                         ^
    device                   +--prep--> slots, inputs --forward--> sampled_hidden --sample

A record and its line of the ring are used again three steps later. By then the step is settled: the device has read the
record, and the host has read the tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from _fast.layout import GraphKind, SlotWord, record_len
from _fast.plan import StepPlan
from engine.attention.meta import AttentionMeta, WorkList
from engine.cache.spec import CacheSpec, KeyValueSpec
from engine.cache.tokens import GuestSpec
from engine.device.accelerator import Accelerator
from engine.kernels.attention.tiles import has_large_tiles, stripe_of
from engine.kernels.attention.work import PARTS_OF_CODES, PARTS_PER_UNIT, empty_list, fill_list, max_parts
from engine.kernels.drafts_rows import DraftedRows
from engine.kernels.record import Records, records_in
from engine.kernels.step_inputs import step_inputs
from engine.kernels.step_tensors import empty_inputs
from engine.kernels.target import target
from engine.layers.batch import Batch, LayerHook
from engine.models.base.decoder import Decoder
from engine.step.backend.device.home import RECORDS, Home
from engine.step.backend.device.slots import DeviceSlots
from engine.step.backend.states import state_rows
from engine.step.rank import Rank
from engine.step.sizes import MOST_CUT, Sizes
from engine.step.step import Media

MIN_UPDATES = 16384  # block-table changes that one plan may carry: 256 KiB of its record


class Cut(NamedTuple):
    """The properties of a cache on which attention's work list depends: how rows are cut into parts and tiles."""

    num_kv_heads: int
    head_dim: int
    codes: bool  # keys and values have 8 bits

    @property
    def per_unit(self) -> int:
        return PARTS_OF_CODES if self.codes else PARTS_PER_UNIT

    @property
    def large(self) -> bool:
        return self.codes and has_large_tiles(target(), self.head_dim)


@dataclass(slots=True)
class Variants:
    """Bits of the graphs' variants; the executor sets them."""

    forward: int = 0  # forwards read the tokens' adapters
    drafting: int = 0  # steps may have drafts; 0: steps of all variants may
    scan: int = 0  # steps scan chunks of states; 0: mixed steps of all variants do


def _cut(spec: CacheSpec) -> Cut | None:
    """The Cut of a cache; None: no attention of the model reads this cache."""
    if not isinstance(spec, KeyValueSpec) or isinstance(spec, GuestSpec):
        return None
    return Cut(spec.num_kv_heads, spec.head_dim, spec.dtype.itemsize == 1)


class StepBuffers:
    """The buffers of all steps; the forward decides how steps use them."""

    def __init__(
        self,
        rank: Rank,
        sizes: Sizes,
        invariant: bool,
        overlays: bool,
        hooks: Sequence[LayerHook],
        places: bool = False,
        first: StepBuffers | None = None,
    ) -> None:
        """`overlays`: media rows may replace embeddings, in recorded steps too; `invariant`: a row's result does not
        depend on the other rows of its step; `places`: rows may have adapters by name; `first`: the buffers of rank 0,
        whose records this rank reads, too."""
        assert rank.accelerator is not None
        accelerator, model = rank.accelerator, rank.own
        device, rows, tokens = accelerator.device, sizes.max_rows, sizes.max_tokens
        groups, config, runs = rank.layout.token_groups, model.config, rank.layout.runs
        run_width = 0 if runs is None else runs.width
        updates = max(groups * (sizes.max_blocks + 1), MIN_UPDATES)
        length = record_len(rows, tokens, updates, run_width)
        self._rank, self._sizes, self._invariant, self.hooks = rank, sizes, invariant, hooks
        self.variants: Variants = Variants() if first is None else first.variants
        self._cuts = [_cut(group.spec) for group in rank.layout.groups[:groups]]
        pinned = accelerator.pinned(RECORDS * length).view(RECORDS, length) if first is None else first.records.pinned
        self.records: Records = records_in(pinned, device)
        self.plans: list[StepPlan] = (
            [
                StepPlan(rows, tokens, updates, record.numpy(), number, sizes.width, run_width)
                for number, record in enumerate(pinned)
            ]
            if first is None
            else first.plans
        )
        self.states = state_rows(rank.layout, sizes, self.plans[0], 1, device)
        self.slots = DeviceSlots(sizes, groups, config.axes, config.bidirectional, accelerator)
        self.home: Home = Home(accelerator, rows, sizes.width, None if first is None else first.home)
        self.inputs = empty_inputs(
            rows,
            tokens,
            groups,
            config.axes,
            device,
            bool(config.bidirectional),
            places or bool(model.adapters),
            sizes.max_lines if sizes.width > 1 else 0,
        )
        self.sampled_hidden = torch.zeros(sizes.max_lines, config.text.hidden_size, dtype=model.dtype, device=device)
        self._overlay: tuple[Tensor, Tensor] | None = None  # (marks of tokens, rows); recorded steps read it
        if overlays:
            most = sizes.most_graphed
            visible = torch.zeros(most, 1, dtype=torch.bool, device=device)
            width = config.text.hidden_size * config.row_parts
            self._overlay = visible, torch.zeros(most, width, dtype=model.dtype, device=device)
        self.work: dict[Cut, WorkList] = self._work(1)

    @property
    def accelerator(self) -> Accelerator:
        """The device of the buffers."""
        assert self._rank.accelerator is not None
        return self._rank.accelerator

    def set_blocks(self, num_blocks: int) -> None:
        """Allocates work lists and state runs for any step over a cache of so many blocks."""
        if self.states is not None:
            self.states.set_blocks(num_blocks)
        self.work = self._work(num_blocks)

    def _work(self, num_blocks: int) -> dict[Cut, WorkList]:
        """A work list for each Cut among the cache groups; most models have one Cut."""
        sizes, device = self._sizes, self.home.tokens.device
        if not self._rank.layout.keeps:  # no layer reads a work list
            return {}
        config = self._rank.own.config
        # A prompt's last tokens may see later ones, and parts give no token later keys.
        most = 1 if config.bidirectional else min(MOST_CUT, 1 + sizes.num_drafts)
        return {
            cut: self._list(cut, config.text.num_heads, most, num_blocks, device)
            for cut in dict.fromkeys(self._cuts)
            if cut is not None
        }

    def _list(self, cut: Cut, heads: int, most: int, num_blocks: int, device: torch.device) -> WorkList:
        """An empty work list; `most`: most queries of rows that are cut into parts."""
        sizes, group = self._sizes, heads // cut.num_kv_heads
        stripes = sizes.max_rows * -(-most // stripe_of(group, most))
        parts = max_parts(num_blocks, sizes.block_size, stripes, cut.per_unit)
        return empty_list(
            stripes,
            sizes.max_tokens,
            parts,
            heads,
            cut.head_dim,
            device,
            cut.per_unit,
            cut.large,
            most,
            group,
        )

    def drafts_in(self, variant: int) -> bool:
        """Whether rows of this variant's steps may have drafts, on a server with drafts."""
        return not self.variants.drafting or bool(variant & self.variants.drafting)

    @property
    def verifies_states(self) -> bool:
        """Whether steps may verify drafts of rows with states: their graphs then omit the scans of chunks."""
        return self.states is not None and self._sizes.num_drafts > 0 and not self._invariant

    def prep(self, drafting: bool = True) -> None:
        """Launches the kernels that make the inputs of a forward from the next record: slots, tokens, work lists.

        `drafting`: rows may have drafts, if the server has drafts.
        """
        sizes, text = self._sizes, self._rank.own.config.text
        if self.states is not None:
            self.states.launch(self.records, self.slots.tensors)
        step_inputs(
            self.inputs if drafting else replace(self.inputs, row_drafts=None),
            self.slots.tensors,
            self.records,
            sizes.max_rows,
            sizes.max_tokens,
            sizes.block_size,
            text.vocab_size,
        )
        for cut, work in self.work.items():  # all groups with this Cut share the list
            meta = self._meta(self._cuts.index(cut), sizes.max_tokens, sizes.max_rows, False)
            fill_list(work, meta, text.num_heads // cut.num_kv_heads, self._invariant)

    def send_tokens(self, drafting: bool = False) -> None:
        """Launches the kernel that writes the sampled tokens into the step's line of the ring."""
        self.home.send(self.inputs, self.slots.tensors, drafting)

    def batch(self, tokens: int, rows: int, decode_only: bool, media: list[Media], variant: int = 0) -> Batch:
        """A Batch over views of the first `tokens` tokens and `rows` rows; the hidden states of all tokens are read.
        Tokens and rows beyond those of the step are padding. `variant`: of the step."""
        inputs, overlay, layout = self.inputs, None, self._rank.layout
        if self._overlay is not None and not media and not decode_only and tokens <= len(self._overlay[0]):
            overlay = self._overlay[0][:tokens], self._overlay[1][:tokens]
        fixed = self._rank.own.adapters  # every forward reads the numbers of adapters that are part of the model
        adapters = inputs.adapters if fixed or variant & self.variants.forward else None
        attention: list[Any] = [self._meta(group, tokens, rows, decode_only) for group in range(layout.token_groups)]
        if self.states is not None:
            short = decode_only or bool(self.variants.scan and not variant & self.variants.scan)
            attention += self.states.metas(inputs.query_start[: rows + 1], short)
        batch = Batch(
            token_ids=inputs.token_ids[:tokens],
            positions=inputs.positions[..., :tokens],
            media=media,
            attention=attention,
            caches=self._rank.caches,
            group_of=layout.group_of,
            num_tokens=inputs.query_start[-1:],  # [1] the start behind the last row: the number of tokens
            overlay=overlay,
            adapters=None if adapters is None else adapters[:tokens],
            named=bool(variant & self.variants.forward),
            hooks=self.hooks,
            whole=any(hook.whole for hook in self.hooks),
        )
        for hook in self.hooks:
            hook.begin(batch, self._drafted(0))
        if not decode_only:
            self.home.send_drafts(self.inputs, self.slots.tensors)
        return batch

    @property
    def adapts_head(self) -> bool:
        """Whether adapters may change the logits' matrix."""
        model = self._rank.own
        return isinstance(model, Decoder) and model.head_chosen is not None

    def sampled_adapters(self, rows: int, variant: int) -> Tensor | None:
        """The numbers of the adapters of the first `rows` sampled rows, int32 [rows]; None: logits need no adapter in
        steps of this variant."""
        if not self.adapts_head or not variant & self.variants.forward:
            return None
        slots = self.inputs.sample_slot[:rows]
        return self.slots.tensors.word(SlotWord.ADAPTER).index_select(0, slots)

    def draft(self, kind: int, rows: int) -> None:
        """Launches a pass of a drafter over at most so many rows with drafts; `kind`: one of `pass_kinds`."""
        inputs, layout, sizes = self.inputs, self._rank.layout, self._sizes
        drafted, first = self._drafted(rows), kind == GraphKind.DRAFT
        assert drafted is not None, "the server has drafts"
        groups = range(layout.token_groups)
        attention = [self._meta(group, sizes.max_tokens, sizes.max_rows, False) for group in groups]
        batch = Batch(inputs.token_ids, inputs.positions, [], attention, self._rank.caches, layout.group_of)
        for hook in self.hooks:
            if hook.passes > (not first):
                hook.draft(batch, drafted, first)

    @property
    def pass_kinds(self) -> list[int]:
        """The kinds of graphs with passes of a drafter, in the order of a step's passes; the last one repeats."""
        most = max((hook.passes for hook in self.hooks), default=0)
        return [int(kind) for kind in (GraphKind.DRAFT, GraphKind.FURTHER)[:most]]

    def _drafted(self, most: int) -> DraftedRows | None:
        """The rows of a step; `most`: those with drafts."""
        inputs = self.inputs
        if inputs.row_drafts is None:
            return None
        rows = inputs.row_slot, inputs.row_drafts, inputs.query_start, inputs.context_len, inputs.row_slot
        return DraftedRows(*rows, most, self.slots.tensors)

    @contextmanager
    def overlaid(self, media: list[Media]) -> Iterator[None]:
        """Context in which a launched graph of a forward reads the media rows in place of embeddings."""
        if not media:
            yield
            return
        assert self._overlay is not None
        visible, places = self._overlay
        try:
            for start, parts in _adjacent(media):  # one copy for adjacent runs, such as rows that decode
                end = start + sum(map(len, parts))
                torch.cat(parts, out=places[start:end])
                visible[start:end] = True
            yield
        finally:
            visible.zero_()

    def _meta(self, group: int, tokens: int, rows: int, decode_only: bool) -> AttentionMeta:
        inputs, decode_only = self.inputs, decode_only and not self._invariant  # an invariant work list has only tiles
        cut = self._cuts[group]
        return AttentionMeta(
            query_start=inputs.query_start[: rows + 1],
            context_len=inputs.context_len[:rows],
            block_tables=self.slots.tensors.block_tables[group],
            slot_mapping=inputs.slot_mapping[group, :tokens],
            work=None if cut is None else self.work.get(cut),
            table_row=inputs.row_slot[:rows],
            last_keys=None if decode_only or inputs.last_keys is None else inputs.last_keys[:tokens],
            decode_only=decode_only,
        )


def _adjacent(media: list[Media]) -> Iterator[tuple[int, list[Tensor]]]:
    """Joins media runs without a gap between them: yields (token_start, rows of the joined runs)."""
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
