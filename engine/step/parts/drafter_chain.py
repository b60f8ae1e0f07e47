"""ChainSteps: a drafter that guesses draft after draft, each from the feature of the token before.

    step n    | pass 0 | pass 1 ... | forward: streams -> features -> entries | choice, verified |
                ^ feature of the token before      ^ read by later steps      | feature of the slot

A pass leaves the feature and the places of the next pass in buffers, so a step launches as many as its drafts need.
Thread: the stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from engine.attention.meta import AttentionMeta, WorkList
from engine.cache.spec import LayerCache
from engine.kernels.drafts_features import Features, accept_features, features_before, keep_features
from engine.kernels.drafts_places import Queries, draft_places, empty_places, next_places, put_drafts
from engine.kernels.drafts_rows import DraftedRows
from engine.layers.batch import Batch
from engine.models.drafters.base import FIRST_ENTRY, ChainDrafter
from engine.step.parts.drafter_steps import DrafterSteps, Runs
from engine.step.sizes import MOST_CUT


class ChainSteps(DrafterSteps):
    """The features of live slots and of blocks, and what reads and writes them."""

    def __init__(self, drafter: ChainDrafter, runs: Runs) -> None:
        super().__init__(drafter.text, runs)
        self._drafter, sizes, device = drafter, runs.sizes, runs.rank.device
        width, dtype = drafter.text.hidden_size, drafter.dtype
        self._newest = torch.zeros(sizes.max_tokens, width, dtype=dtype, device=device)  # features of the newest step
        self._of_slots = torch.zeros(sizes.max_slots + 1, width, dtype=dtype, device=device)
        self._starts = torch.arange(sizes.max_rows + 1, dtype=torch.int32, device=device)
        self._places = empty_places(sizes.max_rows, device)
        self._feature = torch.zeros(sizes.max_rows, width, dtype=dtype, device=device)  # that the next pass reads
        self._held: Features
        self._work: WorkList | None = None  # of the passes over the newest tokens
        self._entry_work: WorkList | None = None  # of the entries of all tokens, if these attend to each other

    def allocate(self, num_blocks: int, caches: Sequence[LayerCache]) -> None:
        """See DrafterSteps."""
        text, sizes = self._drafter.text, self.sizes
        self.caches = list(caches)
        of_blocks = torch.zeros(num_blocks, text.hidden_size, dtype=self._drafter.dtype, device=self.rank.device)
        self._held = Features(self._of_slots, of_blocks, sizes.block_size)
        self._work = self.work_list(num_blocks, 1, sizes.max_rows)
        if len(caches) > 1:
            self._entry_work = self.work_list(num_blocks, min(MOST_CUT, 1 + sizes.num_drafts), sizes.max_tokens)

    def draft(self, batch: Batch, rows: DraftedRows, first: bool) -> None:
        """See DrafterSteps."""
        found, places, feature = self.meta_of(batch), self._places.first(rows.most), self._feature[: rows.most]
        starts = self._starts[: rows.most + 1]
        if first:
            draft_places(places, rows, found.slot_mapping)
            own = rows._replace(slots=places.slot, query_start=starts, context_len=places.context, lines=places.line)
            feature.copy_(self.before(rows.most, own, found.block_tables))
        else:
            next_places(places, found.slot_mapping)
        numbers = starts, places.context, found.block_tables, places.mapping, self._work, places.line
        meta = self.listed(AttentionMeta(*numbers, first_key=FIRST_ENTRY, decode_only=True))
        ids, at = (each.index_select(-1, places.token) for each in (batch.token_ids, batch.positions))
        logits, following = self._drafter.step(ids, feature, at, meta, self.caches)
        feature.copy_(following)
        guesses = self.guess(logits, places.slot, places.run, places.place)
        put_drafts(rows.state, batch.token_ids, guesses, Queries(places.token, places.run, places.slot, 1))

    def before(self, count: int, rows: DraftedRows, tables: Tensor) -> Tensor:
        """The features [count, H] before the first tokens of rows; those of other tokens may be anything."""
        return features_before(self._newest[:count], self._held, rows, tables)

    def enter(self, batch: Batch, streams: list[Tensor]) -> None:
        """See DrafterSteps."""
        found, rows = self.meta_of(batch), self.rows
        features = self._newest[: len(batch.token_ids)]
        features.copy_(self._drafter.feature(streams))
        before = features_before(features, self._held, rows, found.block_tables)
        keep_features(features, self._held, rows, found.slot_mapping)
        if len(self.caches) > 1:
            found = self.listed(replace(found, work=self._entry_work, last_keys=None, first_key=FIRST_ENTRY))
        self._drafter.store(self._drafter.inputs(batch), before, batch.positions, found, self.caches)

    def settle(self, rows: DraftedRows, runs: Tensor) -> None:
        """Stores the feature of the token before each row's newest token."""
        accept_features(self._held, rows, self._newest, runs)
