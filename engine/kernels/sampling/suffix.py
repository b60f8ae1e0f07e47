"""Drafts by suffix decoding: the most frequent continuations of the places that end like the row's own text now does.

    match(end)  the tokens before place `end` that equal the text's last tokens, at most `depth`
    E_m         the places with match >= m;  a path of m continues them: each time the token that most of the places
                that still agree have next (of equally many the newest place's);  p_i = places left / places in E_m
    score(m)    the sum of p_i over the path's first budget[m] tokens, cut before p_i < least_probability

The path with the highest score is drafted, of equal ones that of the longest match: a long match is trusted further
than a short one, and a text that continues in several ways is followed only as far as it is likely. Behind the text's
end a place repeats itself. Read are all places with match >= c, where c is the smallest number that at most CANDIDATES
places reach; if no number has so few, the newest CANDIDATES places of the longest match. Counts are whole numbers, so
every device drafts alike.

Two kernels: the first appends each row's run and compares all places, several programs a text; the second finds the
path, a program a row. Source: arXiv:2411.04975, over one text and without its trees. Users: engine/step/parts/drafts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from _fast.layout import SlotWord
from engine.kernels.step_tensors import SlotTensors, word
from engine.kernels.target import tl, triton

LENGTH = tl.constexpr(int(SlotWord.LENGTH))
NUM_DRAFTS = tl.constexpr(int(SlotWord.NUM_DRAFTS))
CANDIDATES = 256  # places whose continuations are counted
BLOCK = 1024  # places that are compared together
BLOCKS = 4  # of a program, if the text is not longer than MOST_PROGRAMS of them
MOST_PROGRAMS = 16  # for a text
SCANNED = 2048  # matches that are read together


@dataclass(frozen=True, slots=True, eq=False)
class Matches:
    """Workspace of a step, by row, and the budgets."""

    match: Tensor  # [max_rows, longest] uint8: of each place
    counts: Tensor  # [max_rows, bins] int32, zero between launches: places by match
    ends: Tensor  # [max_rows, CANDIDATES] int32: the places that are read, the newest first
    budget: Tensor  # [depth + 1] int32: most drafts after a match of so many tokens

    @property
    def depth(self) -> int:
        """The most tokens of a match."""
        return len(self.budget) - 1


def empty_matches(
    max_rows: int, longest: int, depth: int, factor: float, number: int, device: str | torch.device
) -> Matches:
    """Allocates the workspace for texts of up to `longest` tokens; a match of m tokens is followed by at most
    factor * m drafts, and at most `number`."""
    limits = [min(number, int(factor * m + 1e-6)) for m in range(depth + 1)]
    return Matches(
        torch.zeros(max_rows, longest, dtype=torch.uint8, device=device),
        torch.zeros(max_rows, triton.next_power_of_2(depth + 1), dtype=torch.int32, device=device),
        torch.zeros(max_rows, CANDIDATES, dtype=torch.int32, device=device),
        torch.tensor(limits, dtype=torch.int32, device=device),
    )


@triton.jit
def run_of(runs, row, words, slot, longest, WIDTH: tl.constexpr, LANES: tl.constexpr):
    """Return a row's run, the number of its tokens, and the length of its text."""
    lane = tl.arange(0, LANES)
    token = tl.load(runs + row * WIDTH + lane, mask=lane < WIDTH, other=-1)
    count = tl.sum((token >= 0).to(tl.int32), 0)
    return token, count, tl.minimum(tl.maximum(tl.load(word(words, slot, LENGTH)), count), longest)


@triton.jit
def matches_kernel(
    match,  # [rows or more, longest] uint8
    counts,  # [rows or more, BINS] int32
    words,  # [slots, SLOT_WORDS] int32
    texts,  # [slots, longest] int32
    runs,  # [rows, WIDTH] int32
    row_slot,  # [rows] int32
    longest,
    DEPTH: tl.constexpr,
    BINS: tl.constexpr,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,  # power of two >= WIDTH
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Program (row, number) compares every so many blocks of the row's text; a row without tokens has no news.

    Each program appends the run, so that it sees the run itself.
    """
    row, number = tl.program_id(0), tl.program_id(1)
    lane = tl.arange(0, LANES)
    slot = tl.load(row_slot + row).to(tl.int64)
    token, count, length = run_of(runs, row, words, slot, longest, WIDTH, LANES)
    programs = tl.minimum(tl.maximum(length // (BLOCK * BLOCKS), 1), tl.num_programs(1))
    if (count > 0) & (number < programs):
        text = texts + slot * longest
        tl.store(text + length - count + lane, token, mask=lane < count)
        tl.debug_barrier()
        for begin in range(1 + number * BLOCK, length, programs * BLOCK):
            end = begin + tl.arange(0, BLOCK)
            alike = (end < length).to(tl.int32)
            found = tl.zeros([BLOCK], tl.int32)
            back = 0
            more = 1
            while more > 0:
                mine = tl.load(text + length - 1 - back)
                theirs = tl.load(text + end - 1 - back, mask=(alike > 0) & (back < end), other=-1)
                alike = alike * (mine == theirs).to(tl.int32)
                found += alike
                back += 1
                more = tl.max(alike, 0) * (back < tl.minimum(DEPTH, length)).to(tl.int32)
            tl.store(match + row.to(tl.int64) * longest + end, found.to(tl.uint8), mask=end < length)
            tl.atomic_add(counts + row * BINS + found, 1, mask=found > 0, sem="relaxed")


@triton.jit
def candidates_of(ends, match, least, wanted, length, CANDIDATES: tl.constexpr, SCANNED: tl.constexpr):
    """Write the newest places with match >= least, the newest first, until `wanted` are found; return their number."""
    filled = 0
    begin = (length - 1) // SCANNED * SCANNED
    while (filled < wanted) & (begin >= 0):
        place = begin + tl.arange(0, SCANNED)
        value = tl.load(match + place, mask=(place > 0) & (place < length), other=0).to(tl.int32)
        taken = (value >= least).to(tl.int32)
        several = tl.sum(taken, 0)
        if several > 0:
            rank = filled + several - tl.cumsum(taken, 0)
            tl.store(ends + rank, place, mask=(taken > 0) & (rank < CANDIDATES))
        filled += several
        begin -= SCANNED
    return tl.minimum(filled, wanted)


@triton.jit
def most_frequent(token, active, CANDIDATES: tl.constexpr):
    """Return the token of most active candidates, and how many have it; of equally frequent ones the newest's."""
    lane = tl.arange(0, CANDIDATES)
    left = active
    remaining = tl.sum(left, 0)
    best, most = 0, 0
    while remaining > most:
        first = tl.min(tl.where(left > 0, lane, CANDIDATES), 0)
        one = tl.sum(tl.where(lane == first, token, 0), 0)
        same = left * (token == one).to(tl.int32)
        several = tl.sum(same, 0)
        best = tl.where(several > most, one, best)
        most = tl.maximum(several, most)
        left -= same
        remaining -= several
    return best, most


@triton.jit
def path_of(text, length, place, active, budget, least_probability, LANES: tl.constexpr, CANDIDATES: tl.constexpr):
    """Return the tokens that continue the active candidates, their number, and the sum of the places left."""
    lanes = tl.arange(0, LANES)
    path = tl.zeros([LANES], tl.int32)
    least = least_probability * tl.sum(active, 0).to(tl.float32)
    period = tl.maximum(length - place, 1)
    made, total, more = 0, 0, budget
    while more > 0:
        token = tl.load(text + place + made % period, mask=active > 0, other=-1)
        best, most = most_frequent(token, active, CANDIDATES)
        likely = (most.to(tl.float32) >= least).to(tl.int32)
        path = tl.where((lanes == made) & (likely > 0), best, path)
        active = active * (token == best).to(tl.int32)
        total += most * likely
        made += likely
        more = (budget - made) * likely
    return path, made, total


@triton.jit
def suffix_kernel(
    drafts,  # [slots, NUM] int32
    counts,  # [rows or more, BINS] int32
    ends,  # [rows or more, CANDIDATES] int32
    words,  # [slots, SLOT_WORDS] int32
    match,  # [rows or more, longest] uint8
    texts,  # [slots, longest] int32
    runs,  # [rows, WIDTH] int32
    row_slot,  # [rows] int32
    budget,  # [DEPTH + 1] int32
    longest,
    least_probability,
    BINS: tl.constexpr,
    NUM: tl.constexpr,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,  # power of two >= WIDTH and NUM
    CANDIDATES: tl.constexpr,
    SCANNED: tl.constexpr,
):
    """A program finds the path of one row; a row without tokens has no news."""
    row = tl.program_id(0)
    lane, bins, candidate = tl.arange(0, LANES), tl.arange(0, BINS), tl.arange(0, CANDIDATES)
    slot = tl.load(row_slot + row).to(tl.int64)
    _, count, length = run_of(runs, row, words, slot, longest, WIDTH, LANES)
    if count > 0:
        number = tl.load(counts + row * BINS + bins)
        tl.store(counts + row * BINS + bins, tl.zeros([BINS], tl.int32))
        reached = tl.sum(number, 0) - tl.cumsum(number, 0) + number  # places with at least so long a match
        most = tl.max(tl.where(number > 0, bins, 0), 0)
        few = (bins > 0) & (bins <= most) & (reached <= CANDIDATES)
        least = tl.minimum(tl.min(tl.where(few, bins, BINS), 0), most)
        best = tl.zeros([LANES], tl.int32)
        made, total, among = 0, 0, 1  # of the best path: drafts, the sum of places left, the places it began with
        if most > 0:
            wanted = tl.minimum(tl.sum(tl.where(bins == least, reached, 0), 0), CANDIDATES)
            own = match + row.to(tl.int64) * longest
            taken = candidates_of(ends + row * CANDIDATES, own, least, wanted, length, CANDIDATES, SCANNED)
            tl.debug_barrier()
            here = candidate < taken
            place = tl.load(ends + row * CANDIDATES + candidate, mask=here, other=0)
            alike = tl.load(own + place, mask=here, other=0).to(tl.int32)
            m = most
            while m > 0:
                active = (alike >= m).to(tl.int32)
                several, limit = tl.sum(active, 0), tl.load(budget + m)
                if limit * among > total:  # no path of so many tokens scores more than their number
                    path, found, left = path_of(
                        texts + slot * longest, length, place, active, limit, least_probability, LANES, CANDIDATES
                    )
                    better = left * among > total * several
                    best = tl.where(better, path, best)
                    made, total, among = (
                        tl.where(better, found, made),
                        tl.where(better, left, total),
                        tl.where(better, several, among),
                    )
                m = tl.max(tl.where(alike < m, alike, 0), 0)
        tl.store(drafts + slot * NUM + lane, best, mask=lane < made)
        tl.store(word(words, slot, NUM_DRAFTS), made)


def suffix(
    slots: SlotTensors, texts: Tensor, room: Matches, runs: Tensor, row_slot: Tensor, least_probability: float
) -> None:
    """Append runs to texts, and write the drafts and SlotWord.NUM_DRAFTS of their slots.

    texts int32 [max_slots + 1, longest], of which SlotWord.LENGTH counts a slot's tokens, the run's included; runs
    int32 [rows, width]: tokens, then negative numbers; row_slot int32 [rows].
    """
    run = launch_suffix if runs.is_cuda else suffix_reference
    run(slots, texts, room, runs, row_slot, least_probability)


def launch_suffix(
    slots: SlotTensors, texts: Tensor, room: Matches, runs: Tensor, row_slot: Tensor, least_probability: float
) -> None:
    """Launch the kernels on grids that depend only on shapes."""
    rows, width = runs.shape
    number, longest = slots.drafts.shape[1], texts.shape[1]
    assert texts.is_contiguous()
    assert runs.is_contiguous()
    assert len(row_slot) == rows <= len(room.match)
    assert room.match.shape[1] == longest
    bins, lanes = room.counts.shape[1], triton.next_power_of_2(max(width, number))
    matches_kernel[(rows, max(1, min(MOST_PROGRAMS, longest // (BLOCK * BLOCKS))))](
        room.match, room.counts, slots.words, texts, runs, row_slot, longest, DEPTH=room.depth, BINS=bins, WIDTH=width,
        LANES=lanes, BLOCK=BLOCK, BLOCKS=BLOCKS, num_warps=4,
    )  # fmt: skip
    suffix_kernel[(rows,)](
        slots.drafts, room.counts, room.ends, slots.words, room.match, texts, runs, row_slot, room.budget, longest,
        least_probability, BINS=bins, NUM=number, WIDTH=width, LANES=lanes, CANDIDATES=CANDIDATES, SCANNED=SCANNED,
        num_warps=4,
    )  # fmt: skip


def suffix_reference(
    slots: SlotTensors, texts: Tensor, room: Matches, runs: Tensor, row_slot: Tensor, least_probability: float
) -> None:
    budget, lengths = room.budget.tolist(), slots.word(SlotWord.LENGTH)
    for run, slot in zip(runs, row_slot.tolist()):
        tokens = run[run >= 0]
        if not len(tokens):
            continue
        length = min(max(int(lengths[slot]), len(tokens)), texts.shape[1])
        texts[slot, length - len(tokens) : length] = tokens
        drafts = drafted(texts[slot, :length].numpy(), budget, least_probability)
        slots.drafts[slot, : len(drafts)] = torch.tensor(drafts, dtype=torch.int32)
        slots.word(SlotWord.NUM_DRAFTS)[slot] = len(drafts)


def drafted(text: np.ndarray, budget: list[int], least_probability: float) -> list[int]:
    """The drafts after one text."""
    ends, match = compared(text, len(budget) - 1)
    best: tuple[list[int], int, int] = [], 0, 1  # drafts, the sum of places left, the places that the path began with
    for m in sorted(set(match.tolist()), reverse=True):
        places = ends[match >= m]
        if budget[m] * best[2] > best[1]:
            path, left = continued(text, places, budget[m], least_probability)
            if left * best[2] > best[1] * len(places):
                best = path, left, len(places)
    return best[0]


def compared(text: np.ndarray, depth: int) -> tuple[np.ndarray, np.ndarray]:
    """The places that are read, the newest first, and their matches."""
    length = len(text)
    ends = np.flatnonzero(text[:-1] == text[-1])[::-1] + 1  # match >= 1, the newest first
    match, alike = np.ones(len(ends), np.int64), np.ones(len(ends), np.bool_)
    for back in range(1, min(depth, length)):
        at = ends - 1 - back
        alike &= (at >= 0) & (text[at] == text[length - 1 - back])
        if not alike.any():
            break
        match += alike
    if not len(ends):
        return ends, match
    reached = np.bincount(match)[::-1].cumsum()[::-1]  # places with at least so long a match
    few = np.flatnonzero(reached[1:] <= CANDIDATES) + 1
    taken = match >= (few[0] if len(few) else len(reached) - 1)
    return ends[taken][:CANDIDATES], match[taken][:CANDIDATES]


def continued(text: np.ndarray, places: np.ndarray, most: int, least_probability: float) -> tuple[list[int], int]:
    """The path that continues these places, the newest first, and the sum of the places left at its tokens."""
    path: list[int] = []
    left = 0
    least = np.float32(least_probability) * np.float32(len(places))
    while len(path) < most:
        tokens = text[places + len(path) % (len(text) - places)]
        values, first, counts = np.unique(tokens, return_index=True, return_counts=True)
        chosen = min(range(len(values)), key=lambda n: (-counts[n], first[n]))
        if np.float32(counts[chosen]) < least:
            break
        path.append(int(values[chosen]))
        left += int(counts[chosen])
        places = places[tokens == values[chosen]]
    return path, left
