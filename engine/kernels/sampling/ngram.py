"""Drafts copied from a row's own text: what followed the newest earlier place that ends like the text now does.

    n      = the longest match, least <= n <= most: text[end - n : end] == text[length - n : length], end < length
    draft  i = text[end + i], end the newest such place; behind the text's end the drafts repeat themselves

A text that repeats a part of itself, such as a document that is edited, is continued by this part. After each choice
the kernel appends the row's run of tokens to its text on the device and writes the drafts of the next step. Several
programs read a long text; the last one to arrive writes the drafts. Users: engine/step/parts/drafts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from _fast.layout import SlotWord
from engine.kernels.step_tensors import SlotTensors, word
from engine.kernels.target import tl, triton

LENGTH = tl.constexpr(int(SlotWord.LENGTH))
NUM_DRAFTS = tl.constexpr(int(SlotWord.NUM_DRAFTS))
BLOCK = 1024  # places that are compared together
BLOCKS = 4  # of a program, if the text is not longer than MOST_PROGRAMS of them
MOST_PROGRAMS = 16  # for a text


@dataclass(frozen=True, slots=True, eq=False)
class Texts:
    """The tokens of live slots, and counters of the programs that read them for n-grams."""

    tokens: Tensor  # [max_slots + 1, longest] int32; the last row is for padding. SlotWord.LENGTH counts a slot's
    best: Tensor  # [max_rows] int64, zero between launches: the match's length and end, the longest and newest so far
    arrived: Tensor  # [max_rows] int32, zero between launches


def empty_texts(max_slots: int, longest: int, max_rows: int, device: str | torch.device) -> Texts:
    """Allocates texts of up to `longest` tokens."""
    shapes = ((max_slots + 1, longest), torch.int32), ((max_rows,), torch.int64), ((max_rows,), torch.int32)
    return Texts(*(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in shapes))


@triton.jit
def longest_match(text, length, least, first, step, MOST: tl.constexpr, BLOCK: tl.constexpr):
    """Compare the places first .. first + BLOCK - 1, and so on by `step`, with the text's end; return match << 32 +
    place of the longest and newest match, 0 for none."""
    best = tl.zeros([BLOCK], tl.int64)
    for begin in range(first, length, step):
        end = begin + tl.arange(0, BLOCK)
        alike = end < length
        match = tl.zeros([BLOCK], tl.int32)
        for back in tl.static_range(MOST):
            mine = tl.load(text + length - 1 - back, mask=back < length, other=-2)
            theirs = tl.load(text + end - 1 - back, mask=alike & (back < end), other=-1)
            alike = alike & (mine == theirs)
            match += alike.to(tl.int32)
        best = tl.maximum(best, tl.where(match >= least, (match.to(tl.int64) << 32) + end, 0))
    return tl.max(best, 0)


@triton.jit
def ngram_kernel(
    drafts,  # [slots, NUM] int32
    best,  # [rows or more] int64
    arrived,  # [rows or more] int32
    words,  # [slots, SLOT_WORDS] int32
    texts,  # [slots, longest] int32
    runs,  # [rows, WIDTH] int32
    row_slot,  # [rows] int32
    longest,
    least,
    MOST: tl.constexpr,
    NUM: tl.constexpr,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,  # power of two >= WIDTH and NUM
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Program (row, number) compares every so many blocks of the row's text; a row without tokens has no news.

    Each program appends the run, so that it sees the run itself.
    """
    row, number = tl.program_id(0), tl.program_id(1)
    lane = tl.arange(0, LANES)
    token = tl.load(runs + row * WIDTH + lane, mask=lane < WIDTH, other=-1)
    count = tl.sum((token >= 0).to(tl.int32), 0)
    slot = tl.load(row_slot + row).to(tl.int64)
    length = tl.minimum(tl.maximum(tl.load(word(words, slot, LENGTH)), count), longest)
    programs = tl.minimum(tl.maximum(length // (BLOCK * BLOCKS), 1), tl.num_programs(1))
    if (count > 0) & (number < programs):
        text = texts + slot * longest
        tl.store(text + length - count + lane, token, mask=lane < count)
        tl.debug_barrier()
        found = longest_match(text, length, least, 1 + number * BLOCK, programs * BLOCK, MOST, BLOCK)
        tl.atomic_max(best + row, found, sem="acq_rel")
        if tl.atomic_add(arrived + row, 1, sem="acq_rel") == programs - 1:
            at = (tl.atomic_xchg(best + row, found * 0, sem="acq_rel") & 0xFFFFFFFF).to(tl.int32)
            tl.store(arrived + row, 0)
            made = tl.where(at > 0, NUM, 0)
            period = tl.maximum(length - at, 1)
            draft = tl.load(text + at + lane % period, mask=lane < made, other=0)
            tl.store(drafts + slot * NUM + lane, draft, mask=lane < made)
            tl.store(word(words, slot, NUM_DRAFTS), made)


def ngram(slots: SlotTensors, texts: Texts, runs: Tensor, row_slot: Tensor, least: int, most: int) -> None:
    """Append runs to texts, and write the drafts and SlotWord.NUM_DRAFTS of their slots.

    SlotWord.LENGTH counts a text's tokens, the run's included. runs int32 [rows, width]: tokens, then negative numbers;
    row_slot int32 [rows]. least, most: tokens of a match, 1 or more.
    """
    if runs.is_cuda:
        launch_ngram(slots, texts, runs, row_slot, least, most)
    else:
        ngram_reference(slots, texts, runs, row_slot, least, most)


def launch_ngram(slots: SlotTensors, texts: Texts, runs: Tensor, row_slot: Tensor, least: int, most: int) -> None:
    """Launch the kernel on a grid that depends only on shapes."""
    rows, width = runs.shape
    number, longest = slots.drafts.shape[1], texts.tokens.shape[1]
    assert texts.tokens.is_contiguous()
    assert runs.is_contiguous()
    assert len(row_slot) == rows <= len(texts.best)
    ngram_kernel[(rows, max(1, min(MOST_PROGRAMS, longest // (BLOCK * BLOCKS))))](
        slots.drafts, texts.best, texts.arrived, slots.words, texts.tokens, runs, row_slot, longest, least, MOST=most,
        NUM=number, WIDTH=width, LANES=triton.next_power_of_2(max(width, number)), BLOCK=BLOCK, BLOCKS=BLOCKS,
        num_warps=4,
    )  # fmt: skip


def ngram_reference(slots: SlotTensors, texts: Texts, runs: Tensor, row_slot: Tensor, least: int, most: int) -> None:
    lengths, counts = slots.word(SlotWord.LENGTH), slots.word(SlotWord.NUM_DRAFTS)
    number = slots.drafts.shape[1]
    for run, slot in zip(runs, row_slot.tolist()):
        tokens = run[run >= 0]
        if not len(tokens):
            continue
        length = min(max(int(lengths[slot]), len(tokens)), texts.tokens.shape[1])
        text = texts.tokens[slot, :length]
        text[length - len(tokens) :] = tokens
        match = torch.zeros(length, dtype=torch.int64)  # by `end`; 0 is no end
        alike = torch.arange(length) > 0
        for back in range(min(most, length)):
            shifted = torch.full((length,), -1, dtype=torch.int32)
            shifted[back + 1 :] = text[: length - 1 - back]
            alike = alike & (shifted == text[length - 1 - back])
            match += alike
        longest = int(match.max())
        counts[slot] = number * (longest >= least)
        if longest >= least:
            end = int((match == longest).nonzero().max())
            slots.drafts[slot] = text[end + torch.arange(number) % (length - end)]
