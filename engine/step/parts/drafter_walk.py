"""WalkSteps: a drafter that guesses in one pass over a block, and then chooses its drafts in order.

    step n    | pass over blocks | draft 1 | draft 2 behind it | ... | forward: streams -> entries | choice, verified |

A draft's logits follow from the pass and from the draft before. A drafter that estimates how often its drafts are right
writes this over the survivals that the budget of drafts reads. Thread: the stream.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor

from engine.kernels.drafts_blocks import BlockPlaces
from engine.kernels.drafts_confidence import take_confidence
from engine.kernels.drafts_places import Queries, put_drafts
from engine.kernels.drafts_rows import DraftedRows
from engine.layers.batch import Batch
from engine.models.drafters.base import ConfidentDrafter, WalkingDrafter
from engine.step.parts.drafter_blocks import MaskedSteps
from engine.step.parts.drafter_steps import Runs


class Walk(NamedTuple):
    """The queries of B rows by the number of their guess, K at most; B is the most drafted rows of the step."""

    queries: Tensor  # [K, B] int64
    tokens: Tensor  # [K, B] int64: the query's token in the step
    run: Tensor  # [K, B] int32: place of the guess among runs; -1: the row has no such draft
    slots: Tensor  # [K, B] int32, as the next
    place: Tensor  # number of the guess in the answer
    first: Tensor  # [B] int64: the newest token's id
    own: Tensor  # [B] int64: the row's slot; behind the rows with drafts the dummy


class WalkSteps(MaskedSteps):
    """A block drafter whose drafts depend on those before them."""

    def __init__(self, drafter: WalkingDrafter, runs: Runs) -> None:
        super().__init__(drafter, runs)
        self._walking, sizes, device = drafter, runs.sizes, runs.rank.device
        self._confident = cast(ConfidentDrafter, drafter) if drafter.confident else None
        self._ahead = torch.arange(sizes.num_drafts, device=device)[:, None]
        self._confidence = torch.zeros(sizes.max_slots + 1, sizes.num_drafts, device=device)

    def draft(self, batch: Batch, rows: DraftedRows, first: bool) -> None:
        """See DrafterSteps."""
        places, block = self.queries(batch, rows)
        drafter, walk = self._walking, self._walk(places)
        found, before = drafter.passed(block), [walk.first]
        state = drafter.begun(found, walk.queries[0], walk.first)
        for j in range(self.sizes.num_drafts):
            logits, state = drafter.walked(found, walk.queries[j], before[j], state)
            guesses = self.guess(logits, walk.slots[j], walk.run[j], walk.place[j])
            queries = Queries(walk.tokens[j], walk.run[j], walk.slots[j], 1 - drafter.skipped)
            put_drafts(rows.state, batch.token_ids, guesses, queries)
            before.append(rows.state.drafts[:, j].index_select(0, walk.own).clamp(min=0).long())
        if self._confident is not None:
            confidence = self._confident.confidence(found, walk.queries.flatten(), torch.cat(before[:-1]))
            self._confidence[walk.own] = confidence.view(walk.queries.shape).T

    def _walk(self, places: BlockPlaces) -> Walk:
        most, start = len(places.token) - 1, places.query_start.long()
        query = start[:-1] + self._walking.skipped + self._ahead
        here = (query < start[1:]) & (query <= most)
        query, begin = query.clamp(max=most), start[:-1].clamp(max=most)
        at, shape = query.flatten(), query.shape
        tokens, run, slots, place = (
            each.index_select(0, at).view(shape) for each in (places.token, places.run, places.slot, places.place)
        )
        dummy = len(self._confidence) - 1
        own = places.slot.index_select(0, begin).long().where(start[1:] > start[:-1], dummy)
        return Walk(query, tokens, run.where(here, -1), slots, place, places.ids.index_select(0, begin), own)

    def settle(self, rows: DraftedRows, runs: Tensor) -> None:
        """See MaskedSteps."""
        super().settle(rows, runs)
        if self._confident is not None:
            take_confidence(rows, self._confidence)
