"""Drafts from recorded answers, of which a set part is right: for measurements.

    draft j = recorded token, if j < the number of right drafts (kernels/sampling/surviving), else the token after it

"The token after it" is the next number of the vocabulary, which the row does not choose if it repeats its recording.
User: engine/step/parts/replay, after each choice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from _fast.layout import SlotWord
from engine.kernels.sampling.surviving import surviving, surviving_reference
from engine.kernels.step_tensors import SlotTensors, word
from engine.kernels.target import tl, triton

LENGTH = tl.constexpr(int(SlotWord.LENGTH))
PROMPT_LEN = tl.constexpr(int(SlotWord.PROMPT_LEN))
NUM_DRAFTS = tl.constexpr(int(SlotWord.NUM_DRAFTS))


@triton.jit
def replay_kernel(
    drafts,  # [slots, NUM] int32
    words,  # [slots, SLOT_WORDS] int32
    texts,  # [slots, longest] int32
    runs,  # [rows, WIDTH] int32
    row_slot,  # [rows] int32
    survivals,  # [NUM] float32
    longest,
    vocab,
    NUM: tl.constexpr,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,  # power of two >= WIDTH and NUM
):
    """A program handles one row; a row without tokens has no news."""
    row = tl.program_id(0)
    lane = tl.arange(0, LANES)
    token = tl.load(runs + row * WIDTH + lane, mask=lane < WIDTH, other=-1)
    if tl.max(token, 0) >= 0:
        slot = tl.load(row_slot + row).to(tl.int64)
        length = tl.maximum(tl.load(word(words, slot, LENGTH)), 0)
        place = tl.maximum(length - tl.load(word(words, slot, PROMPT_LEN)), 0)
        right = surviving(words, slot, place, survivals, NUM, LANES)
        here = (lane < NUM) & (length + lane < longest)
        ahead = tl.load(texts + slot * longest + length + lane, mask=here, other=-1)
        wrong = tl.where(ahead + 1 < vocab, ahead + 1, 0)
        tl.store(drafts + slot * NUM + lane, tl.where(lane < right, ahead, wrong), mask=ahead >= 0)
        tl.store(word(words, slot, NUM_DRAFTS), tl.sum((ahead >= 0).to(tl.int32), 0))


def replay(slots: SlotTensors, texts: Tensor, runs: Tensor, row_slot: Tensor, survivals: Tensor, vocab: int) -> None:
    """Write the drafts and SlotWord.NUM_DRAFTS of the runs' slots.

    texts int32 [max_slots + 1, longest]: recorded tokens by their place behind the prompt, then -1; runs int32 [rows,
    width]: tokens, then negative numbers; row_slot int32 [rows]; survivals float32 [K]; vocab: number of tokens.
    """
    run = launch_replay if runs.is_cuda else replay_reference
    run(slots, texts, runs, row_slot, survivals, vocab)


def launch_replay(
    slots: SlotTensors, texts: Tensor, runs: Tensor, row_slot: Tensor, survivals: Tensor, vocab: int
) -> None:
    """Launch the kernel on a grid that depends only on shapes."""
    (rows, width), number = runs.shape, slots.drafts.shape[1]
    assert texts.is_contiguous()
    assert runs.is_contiguous()
    assert len(row_slot) == rows
    assert len(survivals) == number
    replay_kernel[(rows,)](
        slots.drafts, slots.words, texts, runs, row_slot, survivals, texts.shape[1], vocab, NUM=number, WIDTH=width,
        LANES=triton.next_power_of_2(max(width, number)), num_warps=1,
    )  # fmt: skip


def replay_reference(
    slots: SlotTensors, texts: Tensor, runs: Tensor, row_slot: Tensor, survivals: Tensor, vocab: int
) -> None:
    number = slots.drafts.shape[1]
    for run, slot in zip(runs, row_slot.long()):
        if int(run.max()) < 0:
            continue
        length = int(slots.word(SlotWord.LENGTH)[slot].clamp(min=0))
        place = (length - slots.word(SlotWord.PROMPT_LEN)[slot]).clamp(min=0).view(1)
        right = int(surviving_reference(slots, slot.view(1), place, survivals))
        ahead = texts[slot, length : length + number]
        ahead = ahead[ahead >= 0]
        wrong = torch.where(ahead + 1 < vocab, ahead + 1, 0)
        slots.drafts[slot, : len(ahead)] = torch.where(torch.arange(len(ahead)) < right, ahead, wrong)
        slots.word(SlotWord.NUM_DRAFTS)[slot] = len(ahead)
