"""Log-probability and rank of the chosen token, and the most likely tokens, for rows that request them.

    logprob = logit - log(sum(exp(logits)));  rank = 1 + number of strictly larger logits

A row requests them with SlotWord.TOP_LOGPROBS = 1 + k. They are written to the row's line of the step's host buffer:

    token | logprob | rank | k ids, lowest id first among equals | from 3 + MOST on their k logprobs    (floats as bits)

The numbers refer to the model's logits before rules. The k tokens are in the k groups with the highest largest logits,
so a row is read once, and then k of its groups. One launch on a fixed grid; programs of other rows end at once. Like
`home`, the kernel writes over the bus directly. User: engine/sampling/device.
"""

# ruff: noqa: PT018 (a launcher checks in few lines)
from __future__ import annotations

import torch
from torch import Tensor

from _fast.layout import SlotWord
from engine.kernels.sampling.groups import GROUP
from engine.kernels.sampling.logprobs import logprobs
from engine.kernels.step_tensors import SlotTensors, word
from engine.kernels.target import tl, triton

TOP_LOGPROBS = tl.constexpr(int(SlotWord.TOP_LOGPROBS))
MOST = 20  # largest k
LINE = 3 + 2 * MOST  # words of a row
TILE = 64  # groups that are read together
NO_KEY = tl.constexpr(-(2**63))  # below every key


@triton.jit
def order(bits):
    """Map the bits of a float32 to an int32 with the same order, or back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def keys_of(value, number):
    """Return an int64 key with the order of value; among equal values the lowest number has the largest key."""
    return (value.to(tl.int64) << 32) | (0x7FFFFFFF - number)


@triton.jit
def number_in(key):
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def top_logprobs_kernel(
    ring,  # [num_buffers, max_rows, LINE] int32, on the host
    tops,  # [rows, num_groups] int32: room for the groups' largest logits
    logits,  # [rows, vocab]
    words,  # [slots, SLOT_WORDS]
    tokens,  # [max_rows] int32
    home,  # [1] int32
    sample_row,  # [rows], as is the next
    sample_slot,
    vocab,
    logits_stride,
    num_groups,
    num_buffers,
    max_rows,
    AS_LOGITS: tl.constexpr,
    MOST: tl.constexpr,
    WIDTH: tl.constexpr,  # power of two >= MOST
    LANES: tl.constexpr,  # power of two >= num_groups
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
    """A program handles one row."""
    row = tl.program_id(0)
    target = tl.load(sample_row + row)
    asked = tl.load(word(words, tl.load(sample_slot + row), TOP_LOGPROBS))
    if (target >= 0) & (asked > 0):
        token = tl.load(tokens + target)
        at, own_tops = logits + row.to(tl.int64) * logits_stride, tops + row.to(tl.int64) * num_groups
        own = tl.load(at + tl.maximum(token, 0)).to(tl.float32)
        best = tl.full([TILE, GROUP], float("-inf"), tl.float32)
        total = tl.zeros([TILE, GROUP], tl.float32)
        above = tl.zeros([TILE, GROUP], tl.int32)
        for first in range(0, num_groups, TILE):
            group = first + tl.arange(0, TILE)
            name = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
            x = tl.load(at + name, mask=name < vocab, other=float("-inf")).to(tl.float32)
            tl.store(own_tops + group, tl.max(order(x.to(tl.int32, bitcast=True)), 1), mask=group < num_groups)
            above += (x > own).to(tl.int32)
            higher = tl.maximum(best, x)
            beside = tl.where(tl.abs(higher) == float("inf"), 0.0, higher)  # avoids inf - inf
            total = total * tl.exp(best - beside) + tl.exp(x - beside)
            best = higher
        highest = tl.max(tl.max(best, 1), 0)
        norm = tl.log(tl.sum(tl.sum(total * tl.exp(best - highest), 1), 0)) + highest
        if AS_LOGITS:
            norm = 0.0
        tl.debug_barrier()
        # First the top k groups, then the top k of their tokens.
        lane, group = tl.arange(0, WIDTH), tl.arange(0, LANES)
        keys = keys_of(tl.load(own_tops + group, mask=group < num_groups, other=0), group)
        keys = tl.where(group < num_groups, keys, NO_KEY)
        count = tl.minimum(tl.minimum(asked - 1, MOST), num_groups)
        picked = tl.zeros([WIDTH], tl.int32)
        for number in range(count):
            first_key = tl.max(keys, 0)
            picked = tl.where(lane == number, number_in(first_key), picked)
            keys = tl.where(keys == first_key, NO_KEY, keys)
        name = picked[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        inside = (lane < count)[:, None] & (name < vocab)
        x = tl.load(at + name, mask=inside, other=0.0).to(tl.float32)
        found = tl.where(inside, keys_of(order(x.to(tl.int32, bitcast=True)), name), NO_KEY)
        k = tl.minimum(tl.minimum(asked - 1, MOST), vocab)
        ids, values = tl.zeros([WIDTH], tl.int32), tl.zeros([WIDTH], tl.float32)
        for number in range(k):
            first_key = tl.max(tl.max(found, 1), 0)
            value = order((first_key >> 32).to(tl.int32)).to(tl.float32, bitcast=True)
            ids = tl.where(lane == number, number_in(first_key), ids)
            values = tl.where(lane == number, value - norm, values)
            found = tl.where(found == first_key, NO_KEY, found)
        buffer = tl.minimum(tl.maximum(tl.load(home), 0), num_buffers - 1)
        line = ring + (buffer * max_rows + target) * (3 + 2 * MOST)
        tl.store(line, token)
        tl.store(line + 1, (own - norm).to(tl.int32, bitcast=True))
        tl.store(line + 2, tl.sum(tl.sum(above, 1), 0) + 1)
        tl.store(line + 3 + lane, ids, mask=lane < k)
        tl.store(line + 3 + MOST + lane, values.to(tl.int32, bitcast=True), mask=lane < k)


def top_logprobs(
    ring: Tensor,
    tops: Tensor,
    logits: Tensor,
    slots: SlotTensors,
    tokens: Tensor,
    home: Tensor,
    sample_row: Tensor,
    sample_slot: Tensor,
    as_logits: bool = False,
) -> None:
    """Write lines to ring int32 [num_buffers, max_rows, LINE] (pinned); tops: int32 [rows or more, groups], workspace.

    logits [rows, vocab], bfloat16, float16 or float32, unit stride along the row; tokens int32 [max_rows] by plan row;
    home int32 [1], clamped. as_logits: write logits in place of logprobs. A line with token -1 is empty.
    """
    if not logits.is_cuda:
        top_logprobs_reference(ring, tops, logits, slots, tokens, home, sample_row, sample_slot, as_logits)
        return
    launch_top_logprobs(ring, tops, logits, slots, tokens, home, sample_row, sample_slot, as_logits)


def launch_top_logprobs(
    ring: Tensor,
    tops: Tensor,
    logits: Tensor,
    slots: SlotTensors,
    tokens: Tensor,
    home: Tensor,
    sample_row: Tensor,
    sample_slot: Tensor,
    as_logits: bool = False,
) -> None:
    """Launch the kernel on a grid that depends only on shapes."""
    rows, vocab = logits.shape
    buffers, max_rows, line = ring.shape
    num_groups = tops.shape[1]
    assert ring.is_contiguous() and tops.is_contiguous() and ring.dtype is tops.dtype is tokens.dtype is torch.int32
    assert line == LINE and num_groups == -(-vocab // GROUP) and len(tokens) == max_rows and logits.stride(1) == 1
    if rows:
        top_logprobs_kernel[(rows,)](
            ring, tops, logits, slots.words, tokens, home, sample_row, sample_slot, vocab, logits.stride(0), num_groups,
            buffers, max_rows, AS_LOGITS=as_logits, MOST=MOST, WIDTH=triton.next_power_of_2(MOST),
            LANES=triton.next_power_of_2(num_groups), GROUP=GROUP, TILE=TILE, num_warps=8,
        )  # fmt: skip


def top_logprobs_reference(
    ring: Tensor,
    tops: Tensor,
    logits: Tensor,
    slots: SlotTensors,
    tokens: Tensor,
    home: Tensor,
    sample_row: Tensor,
    sample_slot: Tensor,
    as_logits: bool = False,
) -> None:
    buffer = ring[min(max(int(home), 0), len(ring) - 1)]
    for row, (target, slot) in enumerate(zip(sample_row.tolist()[: len(logits)], sample_slot.tolist())):
        asked = int(slots.word(SlotWord.TOP_LOGPROBS)[slot])
        if target < 0 or not asked:
            continue
        k = min(asked - 1, MOST, logits.shape[1])
        x, token = logits[row : row + 1].float(), tokens[target : target + 1].long()
        own, rank, ids, values = logprobs(x, token.clamp(min=0), k, as_logits)
        line = buffer[target]
        line[0], line[1], line[2] = token[0], own.view(torch.int32)[0], rank[0]
        line[3 : 3 + k] = ids[0]
        line[3 + MOST : 3 + MOST + k] = values.contiguous().view(torch.int32)[0]
