"""ParallelSteps: a drafter over features that guesses all drafts of a row in one pass (P-EAGLE).

    step n    | guesses: one pass over newest token, mask, mask ... | forward: streams -> features -> entries | choice |
                ^ feature of the token before, then the masks' feature

Thread: the stream.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.attention.meta import AttentionMeta, WorkList
from engine.cache.spec import LayerCache
from engine.kernels.drafts_blocks import block_places, empty_block
from engine.kernels.drafts_places import Queries, put_drafts
from engine.kernels.drafts_rows import DraftedRows
from engine.layers.batch import Batch
from engine.models.drafters.base import FIRST_ENTRY, ParallelDrafter
from engine.step.parts.drafter_chain import ChainSteps
from engine.step.parts.drafter_steps import Runs


class ParallelSteps(ChainSteps):
    """A chain drafter whose masks stand for the drafts that are not known yet."""

    def __init__(self, drafter: ParallelDrafter, runs: Runs) -> None:
        super().__init__(drafter, runs)
        self._parallel = drafter
        self._block_work: WorkList | None = None
        self._masked: Tensor

    def allocate(self, num_blocks: int, caches: Sequence[LayerCache]) -> None:
        """See DrafterSteps."""
        super().allocate(num_blocks, caches)
        most = self.sizes.num_drafts
        self._block_work = self.work_list(num_blocks, most, self.sizes.max_rows * most)
        with torch.inference_mode():
            self._masked = self._parallel.masked()

    def draft(self, batch: Batch, rows: DraftedRows, first: bool) -> None:
        """See DrafterSteps."""
        found, drafter, most = self.meta_of(batch), self._parallel, self.sizes.num_drafts
        count = min(len(batch.token_ids), rows.most * most, self.sizes.max_lines)
        places = empty_block(rows.most, count, batch.token_ids.device)
        block_places(places, rows, batch.token_ids, found.slot_mapping, drafter.mask_id, 0)
        slots = places.slot.index_select(0, places.query_start[:-1].clamp(max=count - 1))
        own = rows._replace(slots=slots, query_start=places.query_start, context_len=places.context, lines=places.line)
        newest = places.run % (most + 2) == 0
        before = torch.where(newest[:, None], self.before(count, own, found.block_tables), self._masked)
        numbers = places.query_start, places.context, found.block_tables, places.mapping, self._block_work, places.line
        meta = self.listed(AttentionMeta(*numbers, first_key=FIRST_ENTRY, cut=True))
        at = batch.positions.index_select(-1, places.token)
        logits, _ = drafter.step(places.ids, before, at, meta, self.caches)
        guesses = self.guess(logits, places.slot, places.run, places.place)
        put_drafts(rows.state, batch.token_ids, guesses, Queries(places.token, places.run, places.slot, 1))
