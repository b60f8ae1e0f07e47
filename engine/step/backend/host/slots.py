"""HostSlots: per-slot state that steps on the host read by slot number: last sampled token, block tables, positions.

Owner: the device thread stages a slot at admission, when no step in flight contains the slot; after that only the
stream reads and writes the slot, in step order. A plan contains the changes of block tables. The first step that needs
the changes applies them, so a running step never reads the tables of a later step.
"""

from __future__ import annotations

import numpy as np
import torch

from _fast.layout import RowFlag, SlotWord, UpdateWord
from _fast.plan import StepPlan
from engine.base.bidirectional import Bidirectional
from engine.base.request import Request
from engine.kernels.deal_drafts import deal_drafts_reference
from engine.kernels.step_tensors import empty_slots
from engine.step.live import Place
from engine.step.positions import Positions
from engine.step.rows import RowArrays


class HostSlots:
    """Arrays indexed by slot; `reset` clears a slot in each array."""

    __slots__ = ("adapter", "block_tables", "last_token", "outside", "positions", "tensors", "words")

    def __init__(
        self,
        max_slots: int,
        max_blocks: int,
        num_groups: int,
        bidirectional: Bidirectional = "",
        num_drafts: int = 0,
    ) -> None:
        self.positions = Positions(max_slots, bidirectional)
        self.adapter = np.zeros(max_slots, np.int32)  # the number of the request's adapter; 0: none
        self.last_token = np.zeros(max_slots, np.int64)  # the token that the slot's last step sampled
        self.block_tables = np.zeros((num_groups, max_slots, max_blocks), np.int32)
        self.outside = np.zeros(max_slots, np.bool_)  # True: a token id of the slot is outside the embedding
        self.tensors = empty_slots(max_slots, 0, 0, "cpu", num_drafts)  # drafts, and the words that `resolve` reads
        self.words = self.tensors.words.numpy()

    def admit(self, slot: int, request: Request, place: Place) -> None:
        """Stages a new request in its slot."""
        self.words[slot] = 0
        self.words[slot, SlotWord.LAST_PLACE] = place.last_place
        self.words[slot, SlotWord.PROMPT_LEN] = len(request.prompt_token_ids)
        self.positions.admit(slot, request)
        self.last_token[slot] = 0
        self.block_tables[:, slot] = 0
        self.outside[slot] = False
        self.adapter[slot] = place.adapter

    def reset(self, slot: int, poison: bool = False) -> None:
        """Clears a freed slot; `poison` writes values that no live row may use."""
        bad = np.iinfo(np.int32).max if poison else 0
        self.positions.reset(slot, poison)
        self.last_token[slot] = bad
        self.block_tables[:, slot] = bad
        self.outside[slot] = poison
        self.adapter[slot] = bad
        self.words[slot] = bad

    def resolve(self, rows: RowArrays) -> RowArrays:
        """The rows as the stream computes them. A fed row begins at its slot's newest token, and its share of the
        step's drafts follows. Later rows move up."""
        fed = np.flatnonzero(rows.flags & RowFlag.FEED)
        slots, computed, lens = rows.slots[fed], rows.computed.copy(), rows.lens.copy()
        words, exact = self.words[slots], (rows.flags[fed] & RowFlag.EXACT) > 0
        length = np.where(exact, computed[fed] + 1, words[:, SlotWord.LENGTH])
        room = np.minimum(lens[fed] - 1, words[:, SlotWord.LAST_PLACE] - length)
        drafts = np.minimum(words[:, SlotWord.NUM_DRAFTS], room).clip(min=0).astype(np.int64)
        own = torch.from_numpy(slots.astype(np.int64))
        drafts = deal_drafts_reference(self.tensors, own, torch.from_numpy(drafts), rows.places).numpy()
        computed[fed], lens[fed] = length - 1, 1 + drafts
        return rows.moved(computed, lens)

    def drafts_of(self, rows: RowArrays) -> np.ndarray:
        """See Backend; rows: from `resolve`. The drafts of rows that verify none may be anything."""
        sampled = rows.sampled
        fed = (rows.flags[sampled] & RowFlag.FEED) > 0
        counts = np.where(fed, rows.lens[sampled] - 1, 0).astype(np.int32)
        return np.column_stack((counts, self.tensors.drafts.numpy()[rows.slots[sampled]]))

    def apply(self, plan: StepPlan) -> None:
        """Writes the plan's changes of block tables; the last change of an entry wins."""
        updates = np.asarray(plan.updates)[: plan.num_updates]  # [num_updates, UPDATE_WORDS]
        slot, index, block, group = (updates[:, word] for word in UpdateWord)
        self.block_tables[group, slot, index] = block
