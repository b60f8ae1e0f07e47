"""StepPlan -> Batch: gathers the tensors of one step from the plan's record and the per-slot state.

Runs on the stream in step order, so the tokens that the previous step sampled are available. In: a plan, which the
scheduler does not rewrite before this step's event has fired. Out: a Batch. On an accelerator the prep kernel does the
same arithmetic (engine/kernels/step_inputs).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from _fast.layout import RowFlag, SlotWord
from engine.attention.meta import AttentionMeta
from engine.kernels.drafts_rows import DraftedRows
from engine.layers.batch import Batch, LayerHook
from engine.step.backend.host.slots import HostSlots
from engine.step.backend.states import StateRows
from engine.step.rank import Rank
from engine.step.rows import RowArrays
from engine.step.step import Step

Hooks = Sequence[LayerHook]


def build(
    step: Step, rows: RowArrays, slots: HostSlots, rank: Rank, states: StateRows | None = None, hooks: Hooks = ()
) -> Batch:
    """Makes the step's Batch over the rank's caches, with the step's media; `rows`: see HostSlots.resolve.

    Token ids outside the embedding are clipped into its range, and their slots are marked (HostSlots.outside).
    """
    plan, config = step.plan, rank.model.config
    num_embeddings, block_size = config.text.vocab_size, rank.layout.block_size
    starts, lens = rows.starts, rows.lens
    tokens = int(starts[-1])
    first = starts[:-1]
    row_of = np.repeat(np.arange(len(lens)), lens)  # [num_tokens]
    index = rows.computed[row_of].astype(np.int64) + np.arange(tokens) - first[row_of]  # index in the sequence
    token_ids = np.asarray(plan.token_ids)[:tokens].astype(np.int64)
    fed = np.flatnonzero(rows.flags & RowFlag.FEED)
    token_ids[first[fed]] = slots.last_token[rows.slots[fed]]
    if plan.drafting:
        _add_drafts(token_ids, rows, slots)
    outside = (token_ids < 0) | (token_ids >= num_embeddings)
    slots.outside[rows.slots[row_of[outside]]] = True
    last = starts[1:][rows.sampled] - 1 if plan.width == 1 else _lines(rows)
    context = rows.computed + lens  # [num_rows]
    num_blocks = -(-int(context.max()) // block_size)
    query_start, context_len = torch.from_numpy(starts.astype(np.int32)), torch.from_numpy(context.astype(np.int32))
    keys = slots.positions.last_keys(rows)
    last_keys = None if keys is None else torch.from_numpy(keys)
    attention: list[Any] = []
    for all_tables in slots.block_tables:
        tables = all_tables[rows.slots, :num_blocks]  # [num_rows, num_blocks], a copy
        slot_mapping = tables[row_of, index // block_size].astype(np.int64) * block_size + index % block_size
        if plan.width > 1:  # the row of an answer that has ended meanwhile; its place may lie in a block of others
            last_place = slots.words[rows.slots, SlotWord.LAST_PLACE][row_of]
            slot_mapping[index >= last_place] = 0
        table, mapping = torch.from_numpy(tables), torch.from_numpy(slot_mapping)
        attention.append(AttentionMeta(query_start, context_len, table, mapping, last_keys=last_keys))
    if states is not None:
        attention += states.metas(query_start)
    adapters = slots.adapter[rows.slots]  # [num_rows]
    if config.axes > 1:
        positions = slots.positions.axes_of(rows, config.axes)
    else:
        positions = index + slots.positions.delta[rows.slots][row_of]
    batch = Batch(
        token_ids=torch.from_numpy(token_ids.clip(0, num_embeddings - 1)),
        positions=torch.from_numpy(positions),
        media=step.media,
        attention=attention,
        caches=rank.caches,
        group_of=rank.layout.group_of,
        sample_index=torch.from_numpy(last.astype(np.int64)),
        adapters=torch.from_numpy(adapters[row_of]) if adapters.any() else None,
        hooks=hooks,
        whole=any(hook.whole for hook in hooks),
    )
    if hooks:
        _begin(batch, _drafted(rows, slots, query_start, context_len) if plan.width > 1 else None)
    return batch


def _begin(batch: Batch, drafted: DraftedRows | None) -> None:
    """Runs the passes that guess the step's drafts, and begins the forward."""
    for hook in batch.hooks:
        if drafted is not None:
            for number in range(min(int(drafted.drafts.max()), hook.passes)):
                hook.draft(batch, drafted, number == 0)
        hook.begin(batch, drafted)


def _drafted(rows: RowArrays, slots: HostSlots, query_start: torch.Tensor, context_len: torch.Tensor) -> DraftedRows:
    drafts = np.where(rows.flags & RowFlag.FEED, rows.lens - 1, 0)
    drafts = np.where(rows.flags & RowFlag.SAMPLE, drafts, -1).astype(np.int32)
    numbers = torch.from_numpy(rows.slots.astype(np.int32)), torch.from_numpy(drafts)
    return DraftedRows(*numbers, query_start, context_len, None, int((drafts > 0).sum()), slots.tensors)


def _add_drafts(token_ids: np.ndarray, rows: RowArrays, slots: HostSlots) -> None:
    """Writes the drafts of fed rows into the step's tokens."""
    for row in np.flatnonzero((rows.flags & RowFlag.FEED > 0) & (rows.lens > 1)).tolist():
        start, count = int(rows.starts[row]), int(rows.lens[row])
        drafts = slots.tensors.drafts[int(rows.slots[row]), : count - 1]
        token_ids[start + 1 : start + count] = drafts.clamp(min=0).numpy()


def _lines(rows: RowArrays) -> np.ndarray:
    """The tokens of a step after which a token is chosen: each sampled row's last known token, then its drafts."""
    sampled = rows.sampled
    fed = (rows.flags[sampled] & RowFlag.FEED) > 0
    counts = np.where(fed, rows.lens[sampled], 1)
    ends = counts.cumsum()
    return np.repeat(rows.starts[1:][sampled] - ends, counts) + np.arange(counts.sum())
