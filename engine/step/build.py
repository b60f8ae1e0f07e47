"""StepPlan -> Batch: the tensors of one step, gathered from the plan's record and the per-slot state.

Runs on the stream (CPU), in step order, so the last sampled tokens of the step before are there. In: a plan whose
record is not rewritten before this step's event has fired. Out: a Batch. On an accelerator the same arithmetic is the
prep kernel's (kernels/step_inputs).
"""

from __future__ import annotations

import numpy as np
import torch

from _fast.layout import RowFlag, UpdateWord
from _fast.plan import StepPlan
from engine.attention.meta import AttentionMeta
from engine.cache.layout import CacheLayout
from engine.cache.spec import LayerCache
from engine.layers.batch import Batch
from engine.step.slots import SlotState


class RowArrays:
    """The plan's row columns as numpy views, cut to this step's rows; what build and sample both read."""

    __slots__ = ("computed", "flags", "lens", "sampled", "slots", "starts")

    def __init__(self, plan: StepPlan) -> None:
        rows = plan.num_rows
        self.slots = np.asarray(plan.row_slot)[:rows]
        self.starts = np.asarray(plan.row_start)[: rows + 1]
        self.lens = np.asarray(plan.row_len)[:rows]
        self.computed = np.asarray(plan.row_computed)[:rows]
        self.flags = np.asarray(plan.row_flags)[:rows]
        self.sampled = np.flatnonzero(self.flags & RowFlag.SAMPLE)  # plan rows that yield a token, ascending


def apply_updates(plan: StepPlan, slots: SlotState) -> None:
    """Writes the plan's block-table changes; later entries for the same place win."""
    updates = np.asarray(plan.updates)[: plan.num_updates]  # [num_updates, UPDATE_WORDS]
    slot, index, block, group = (updates[:, word] for word in UpdateWord)
    slots.block_tables[group, slot, index] = block


def build(
    plan: StepPlan,
    rows: RowArrays,
    slots: SlotState,
    layout: CacheLayout,
    media: list[tuple[int, int, torch.Tensor]],
    caches: list[LayerCache],
    axes: int,
    num_embeddings: int,
) -> Batch:
    """Makes the step's Batch.

    `media` holds (token_start, length, rows [length, hidden]) of towers' output; `axes`: rows of positions of a token.

    Token ids that are no row of the embedding become some that are, and their slots are marked.
    """
    tokens = plan.num_tokens
    starts, lens = rows.starts, rows.lens
    first = starts[:-1]
    row_of = np.repeat(np.arange(len(lens)), lens)  # [num_tokens]
    index = rows.computed[row_of].astype(np.int64) + np.arange(tokens) - first[row_of]  # place in the sequence
    token_ids = np.asarray(plan.token_ids)[:tokens].astype(np.int64)
    fed = np.flatnonzero(rows.flags & RowFlag.FEED)
    token_ids[first[fed]] = slots.last_token[rows.slots[fed]]
    outside = (token_ids < 0) | (token_ids >= num_embeddings)
    slots.outside[rows.slots[row_of[outside]]] = True
    token_ids = token_ids.clip(0, num_embeddings - 1)
    context = rows.computed + lens  # [num_rows]
    longest = int(context.max())
    block_size = layout.block_size
    num_blocks = -(-longest // block_size)
    query_start, context_len = torch.from_numpy(starts.astype(np.int32)), torch.from_numpy(context.astype(np.int32))
    keys = slots.last_keys(rows.slots, lens, rows.computed) if slots.joints else None
    last_keys = None if keys is None else torch.from_numpy(keys)
    attention = []
    for all_tables in slots.block_tables:
        tables = all_tables[rows.slots, :num_blocks]  # [num_rows, num_blocks], a copy
        slot_mapping = tables[row_of, index // block_size].astype(np.int64) * block_size + index % block_size
        attention.append(
            AttentionMeta(
                query_start,
                context_len,
                torch.from_numpy(tables),
                torch.from_numpy(slot_mapping),
                last_keys=last_keys,
            )
        )
    adapters = slots.adapter[rows.slots]  # [num_rows]
    positions = axis_positions(rows, slots, axes) if axes > 1 else index + slots.position_delta[rows.slots][row_of]
    return Batch(
        token_ids=torch.from_numpy(token_ids),
        positions=torch.from_numpy(positions),
        media=media,
        attention=attention,
        caches=caches,
        group_of=layout.group_of,
        sample_index=torch.from_numpy((starts[1:][rows.sampled] - 1).astype(np.int64)),
        adapters=torch.from_numpy(adapters[row_of]) if adapters.any() else None,
    )


def axis_positions(rows: RowArrays, slots: SlotState, axes: int) -> np.ndarray:
    """int64 [axes, num_tokens]: inside a prompt from the request, beyond it all equal, index + delta."""
    lens = rows.lens
    row_of = np.repeat(np.arange(len(lens)), lens)  # [num_tokens]
    index = rows.computed[row_of].astype(np.int64) + np.arange(len(row_of)) - rows.starts[:-1][row_of]
    found = np.repeat((index + slots.position_delta[rows.slots][row_of])[None, :], axes, axis=0)
    inside = np.flatnonzero(rows.computed < slots.prompt_len[rows.slots])
    for row in inside.tolist():
        given = slots.positions.get(int(rows.slots[row]))
        start, done = int(rows.starts[row]), int(rows.computed[row])
        length = min(int(rows.lens[row]), int(slots.prompt_len[rows.slots[row]]) - done)
        if given is not None:
            found[:, start : start + length] = given[:, done : done + length]
        else:  # a text prompt: positions 0, 1, 2 ... whatever the delta beyond it
            found[:, start : start + length] = np.arange(done, done + length)
    return found
