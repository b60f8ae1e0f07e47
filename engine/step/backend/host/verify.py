"""Verification of drafts on the CPU: a draft counts if it equals the token that the row's own sampling chooses there.

Runs on the stream. The sampler walks the places of all rows together, first places first, and drops a row at its first
difference: rules of a place count all tokens before it, and only emitted tokens are recorded.
"""

from __future__ import annotations

import numpy as np
import torch

from _fast.layout import RowFlag, RunEnd, SlotWord, TokenCode
from engine.base.mask_lines import Lines
from engine.base.request import TokenLogprob
from engine.kernels.sampling.surviving import surviving_reference
from engine.kernels.survivals import learn_reference
from engine.sampling.sampler import Sampler
from engine.step.backend.host.slots import HostSlots
from engine.step.rows import RowArrays


def verify(
    sampler: Sampler,
    logits: torch.Tensor,
    rows: RowArrays,
    slots: HostSlots,
    lines: Lines | None,
    logprobs: dict[int, TokenLogprob],
    survivals: torch.Tensor | None = None,
) -> np.ndarray:
    """Each sampled row's run of tokens, int32 [S, width], also written to `slots`; and their log-probabilities.

    logits float32 [num_lines, vocab]: a row's line for its first token, then a line per draft. rows: from `resolve`.
    lines: masks of all tokens of rows with grammars. A run ends before a place with invalid logits, or without a token
    that may follow; such a first place is -1. Its end counts the drafts without valid logits of the drafter (RunEnd).
    logprobs: by plan row * width + place in the run.
    survivals: see kernels/sampling/verify.
    """
    sampled, width = rows.sampled, slots.tensors.drafts.shape[1] + 2
    runs = np.full((len(sampled), width), int(TokenCode.END), np.int32)
    slot_of = rows.slots[sampled]
    fed = (rows.flags[sampled] & RowFlag.FEED) > 0
    drafts = np.where(fed, rows.lens[sampled] - 1, 0)
    first = (1 + drafts).cumsum() - (1 + drafts)  # each row's first line
    known = rows.computed[sampled] + rows.lens[sampled] - drafts  # tokens before the row's first choice
    index = known - slots.positions.prompt_len[slot_of]
    counts, right = np.zeros(len(sampled), np.int64), np.zeros(len(sampled), np.int64)
    active, guesses = np.arange(len(sampled)), np.full((len(sampled), width), -1, np.int64)
    guesses[:, : width - 2] = np.where(
        np.arange(width - 2) < drafts[:, None], slots.tensors.drafts.numpy()[slot_of], -1
    )
    forced = None if survivals is None else forced_of(guesses, slots, slot_of, index, survivals)
    for place in range(width):
        at = first[active] + place
        given = logits if len(at) == len(logits) else logits[torch.from_numpy(at)]
        masks = None if lines is None else lines.behind(place, active)
        stated = None if forced is None else forced[active, place]
        tokens, found = sampler.sample(given, slot_of[active], index[active] + place, masks, stated)
        for number, entry in found.items():
            logprobs[int(sampled[active[number]]) * width + place] = entry
        valid = tokens >= 0
        if place == 0:
            runs[:, 0] = tokens
        else:
            runs[active[valid], place] = tokens[valid]
        counts[active[valid]] += 1
        active, tokens = active[valid], tokens[valid]
        wanted = (guesses if forced is None else forced)[active, place]
        active = active[(wanted >= 0) & (tokens == wanted)]
        right[active] += 1
        if not len(active):
            break
    invalid = ((guesses < 0) & (np.arange(width) < drafts[:, None])).sum(1, dtype=np.int32)
    runs -= (runs <= TokenCode.END) * (RunEnd.INVALID * invalid)[:, None]
    begins = slots.words[slot_of, SlotWord.LENGTH] == 0
    own, verified, good = (torch.from_numpy(each.astype(np.int64)) for each in (slot_of, drafts, right))
    learn_reference(slots.tensors.survivals, own, verified, good, torch.from_numpy(begins))
    slots.words[slot_of, SlotWord.LENGTH] = known + counts
    slots.last_token[slot_of] = np.maximum(runs[np.arange(len(runs)), np.maximum(counts - 1, 0)], 0)
    return runs


def forced_of(
    guesses: np.ndarray, slots: HostSlots, slot_of: np.ndarray, index: np.ndarray, survivals: torch.Tensor
) -> np.ndarray:
    """The drafts int64 [S, width] that count whatever is chosen at their places, -1 elsewhere; `index`: numbers of the
    rows' first drafts in the answers."""
    own, place = torch.from_numpy(slot_of.astype(np.int64)), torch.from_numpy(index.clip(min=0))
    count = surviving_reference(slots.tensors, own, place, survivals).numpy()
    return np.where(np.arange(guesses.shape[1]) < count[:, None], guesses, -1)
