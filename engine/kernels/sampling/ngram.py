"""Drafts copied from a row's own text: what followed the newest earlier place that ends like the text now does.

    n      = the longest match, least <= n <= most: text[end - n : end] == text[length - n : length], end < length
    draft  i = text[end + i], end the newest such place; behind the text's end the drafts repeat themselves

A text that repeats a part of itself, such as a document that is edited, is continued by this part. After each choice
the kernel appends the row's run of tokens to its text on the device and writes the drafts of the next step.
Users: engine/step/parts/drafts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from _fast.layout import SlotWord
from engine.kernels.step_tensors import SlotTensors, word
from engine.kernels.target import tl, triton

LENGTH = tl.constexpr(int(SlotWord.LENGTH))
NUM_DRAFTS = tl.constexpr(int(SlotWord.NUM_DRAFTS))
BLOCK = 1024  # places that are compared together


@triton.jit
def ngram_kernel(
    drafts,  # [slots, NUM] int32
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
):
    """A program handles one row; a row without tokens has no news."""
    row = tl.program_id(0)
    lane = tl.arange(0, LANES)
    token = tl.load(runs + row * WIDTH + lane, mask=lane < WIDTH, other=-1)
    count = tl.sum((token >= 0).to(tl.int32), 0)
    if count > 0:
        slot = tl.load(row_slot + row).to(tl.int64)
        length = tl.minimum(tl.maximum(tl.load(word(words, slot, LENGTH)), count), longest)
        text = texts + slot * longest
        tl.store(text + length - count + lane, token, mask=lane < count)
        tl.debug_barrier()
        best = tl.zeros([BLOCK], tl.int64)
        for first in range(1, length, BLOCK):
            end = first + tl.arange(0, BLOCK)
            alike = end < length
            match = tl.zeros([BLOCK], tl.int32)
            for back in tl.static_range(MOST):
                mine = tl.load(text + length - 1 - back, mask=back < length, other=-2)
                theirs = tl.load(text + end - 1 - back, mask=alike & (back < end), other=-1)
                alike = alike & (mine == theirs)
                match += alike.to(tl.int32)
            found = tl.where(match >= least, (match.to(tl.int64) << 32) + end, 0)
            best = tl.maximum(best, found)
        at = (tl.max(best, 0) & 0xFFFFFFFF).to(tl.int32)
        number = tl.where(at > 0, NUM, 0)
        period = tl.maximum(length - at, 1)
        draft = tl.load(text + at + lane % period, mask=lane < number, other=0)
        tl.store(drafts + slot * NUM + lane, draft, mask=lane < number)
        tl.store(word(words, slot, NUM_DRAFTS), number)


def ngram(slots: SlotTensors, texts: Tensor, runs: Tensor, row_slot: Tensor, least: int, most: int) -> None:
    """Append runs to texts, and write the drafts and SlotWord.NUM_DRAFTS of their slots.

    texts int32 [slots, longest]: each slot's tokens; SlotWord.LENGTH counts them, the run's included. runs int32
    [rows, width]: tokens, then negative numbers; row_slot int32 [rows]. least, most: tokens of a match, 1 or more.
    """
    if runs.is_cuda:
        launch_ngram(slots, texts, runs, row_slot, least, most)
    else:
        ngram_reference(slots, texts, runs, row_slot, least, most)


def launch_ngram(slots: SlotTensors, texts: Tensor, runs: Tensor, row_slot: Tensor, least: int, most: int) -> None:
    """Launch the kernel on a grid that depends only on shapes."""
    rows, width = runs.shape
    number = slots.drafts.shape[1]
    assert texts.is_contiguous()
    assert runs.is_contiguous()
    assert len(row_slot) == rows
    ngram_kernel[(rows,)](
        slots.drafts, slots.words, texts, runs, row_slot, texts.shape[1], least, MOST=most, NUM=number, WIDTH=width,
        LANES=triton.next_power_of_2(max(width, number)), BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


def ngram_reference(slots: SlotTensors, texts: Tensor, runs: Tensor, row_slot: Tensor, least: int, most: int) -> None:
    lengths, counts = slots.word(SlotWord.LENGTH), slots.word(SlotWord.NUM_DRAFTS)
    number = slots.drafts.shape[1]
    for run, slot in zip(runs, row_slot.tolist()):
        tokens = run[run >= 0]
        if not len(tokens):
            continue
        length = min(max(int(lengths[slot]), len(tokens)), texts.shape[1])
        text = texts[slot, :length]
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
