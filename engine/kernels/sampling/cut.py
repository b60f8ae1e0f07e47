"""Rows that pick leaves open: the exact threshold without sorting, and a token drawn from the logits at or above it.

    keep x if 2^((x - max) * scale) >= min_p;  then of these, x if fewer than k are larger;
    then of these, x if the mass of larger x is below p * the mass of all of these

as in top_k_top_p.py; all ties at a threshold are included. The groups' numbers give a lower bound of the threshold:
enough groups have a larger best (top-k), or hold enough mass above the bound (top-p). Only groups that reach the bound
are read again; a search over the ordered bits of their logits finds the exact threshold. Peaked rows read a few dozen
groups, a flat row reads all. Rows that already have their token are searched only if the caller needs the thresholds.
User: choose.
"""

from __future__ import annotations

import torch
from torch import Tensor

from _fast.layout import SlotWord
from engine.kernels.sampling.groups import GROUP, scale_of, scale_reference
from engine.kernels.sampling.noise import GROUP_STREAM, TOKEN_STREAM, noise, noise_reference
from engine.kernels.sampling.pick import is_cut, limits_of
from engine.kernels.sampling.rules import count_token, line_of
from engine.kernels.sampling.top_p_rejection import TRIALS
from engine.kernels.step_tensors import seed_of, word
from engine.kernels.target import tl, triton

LAST_TOKEN = tl.constexpr(int(SlotWord.LAST_TOKEN))
CHUNK = 64  # groups that are read together


@triton.jit
def key_of(x, SHIFT: tl.constexpr):
    """Return an int32 key with the order of float32 x; SHIFT is 16 if x came from bfloat16. -0 counts as 0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def value_of(key, SHIFT: tl.constexpr):
    """Return a float32 that is above all values of smaller keys and not above the values of `key`."""
    bits = key << SHIFT
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def bound_key(top, part, highest, scale, need, by_count, SHIFT: tl.constexpr, GRAIN: tl.constexpr, GROUP: tl.constexpr):
    """Return a lower bound of the threshold's key: tokens at or above it number `need`, or have mass `need`."""
    keys = key_of(top, SHIFT)
    peak = tl.exp2((top - highest) * scale)
    low = key_of(tl.full([], -3.4028234e38, tl.float32), SHIFT).to(tl.int64)
    high = key_of(highest, SHIFT).to(tl.int64) + 1
    while high - low > GRAIN:
        middle = low + ((high - low) >> 1)
        edge = tl.exp2((value_of(middle.to(tl.int32), SHIFT) - highest) * scale)
        # In a group that reaches the key, at most GROUP - 1 tokens are below the key.
        held = tl.where(by_count, 1.0, tl.maximum(peak, part * peak - (GROUP - 1) * edge))
        enough = tl.sum(tl.where(keys >= middle.to(tl.int32), held, 0.0), 0) >= need
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low.to(tl.int32)


@triton.jit
def read(at, chosen, first, count, vocab, GROUP: tl.constexpr, CHUNK: tl.constexpr):
    """Read logits and token ids [CHUNK, GROUP] of the chosen groups from `first` on; -inf after the last."""
    number = first + tl.arange(0, CHUNK)
    group = tl.load(chosen + number, mask=number < count, other=0)
    token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = (number < count)[:, None] & (token < vocab)
    return tl.load(at + token, mask=inside, other=float("-inf")).to(tl.float32), token


@triton.jit
def weigh(at, chosen, count, vocab, low, middle, high, highest, scale,
          BY_COUNT: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """Return, for each of three values, the number or the mass of the chosen groups' tokens at or above the value."""
    above_low = tl.zeros([CHUNK, GROUP], tl.float32)
    above_middle = tl.zeros([CHUNK, GROUP], tl.float32)
    above_high = tl.zeros([CHUNK, GROUP], tl.float32)
    for first in range(0, count, CHUNK):
        x, _ = read(at, chosen, first, count, vocab, GROUP, CHUNK)
        # Comparisons become numbers, because products run on units that are idle during comparisons.
        is_low, is_middle, is_high = (x >= low).to(tl.float32), (x >= middle).to(tl.float32), (x >= high).to(tl.float32)
        if BY_COUNT:
            above_low += is_low
            above_middle += is_middle
            above_high += is_high
        else:
            weight = tl.exp2((x - highest) * scale)
            above_low += is_low * weight
            above_middle += is_middle * weight
            above_high += is_high * weight
    return tl.sum(tl.sum(above_low, 1), 0), tl.sum(tl.sum(above_middle, 1), 0), tl.sum(tl.sum(above_high, 1), 0)


@triton.jit
def search(at, chosen, count, vocab, lowest, highest, scale, need,
           BY_COUNT: tl.constexpr, SHIFT: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """Return the smallest key >= `lowest` with less than `need` above it; each pass finds two of its bits."""
    low = lowest.to(tl.int64) - 1
    high = key_of(highest, SHIFT).to(tl.int64)
    while high - low > 1:
        a = low + tl.maximum((high - low) >> 2, 1)
        b = low + ((high - low) >> 1)
        c = low + (((high - low) * 3) >> 2)
        if (low < -1) & (high > 1):
            # Most keys are close to zero, but most logits are not: first find the sign and the rough magnitude.
            far = tl.maximum(value_of((low + 1).to(tl.int32), SHIFT), highest - 32.0 / scale)
            a = tl.minimum(tl.maximum(key_of(far * 0.125, SHIFT).to(tl.int64), low + 1), -1)
            b = low * 0
            c = tl.maximum(key_of(value_of(high.to(tl.int32), SHIFT) * 0.125, SHIFT).to(tl.int64), 1)
        above_a, above_b, above_c = weigh(
            at, chosen, count, vocab, value_of((a + 1).to(tl.int32), SHIFT), value_of((b + 1).to(tl.int32), SHIFT),
            value_of((c + 1).to(tl.int32), SHIFT), highest, scale, BY_COUNT, GROUP, CHUNK,
        )  # fmt: skip
        old = high
        high = tl.where(above_a < need, a, tl.where(above_b < need, b, tl.where(above_c < need, c, old)))
        low = tl.where(above_c >= need, c, tl.where(above_b >= need, b, tl.where(above_a >= need, a, low)))
    return high.to(tl.int32)


@triton.jit
def draw(at, chosen, count, vocab, least, highest, scale, seed, place, stream,
         GROUP: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """Draw one of the tokens whose logit is >= `least`: first the group, then the token, as in pick.py."""
    best = tl.full([CHUNK], float("-inf"), tl.float32)
    winner = tl.zeros([CHUNK], tl.int32)
    for first in range(0, count, CHUNK):
        x, token = read(at, chosen, first, count, vocab, GROUP, CHUNK)
        held = tl.sum(tl.where(x >= least, tl.exp2((x - highest) * scale), 0.0), 1)
        group = tl.min(token, 1) // GROUP
        score = tl.log2(held) + noise(seed, place, group, stream + 1)
        winner = tl.where(score > best, group, winner)
        best = tl.maximum(best, score)
    group = tl.min(tl.where(best == tl.max(best, 0), winner, vocab), 0)
    token = group * GROUP + tl.arange(0, GROUP)
    x = tl.load(at + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    score = tl.where(x >= least, (x - highest) * scale + noise(seed, place, token, stream), float("-inf"))
    return group * GROUP + tl.argmax(score, 0)


@triton.jit
def cut_from(
    at, chosen, best, mass, num_groups, vocab, heat, k, p, floor, seed, place, result,
    OPEN: tl.constexpr, TRIALS: tl.constexpr, EXACT: tl.constexpr, SHIFT: tl.constexpr, GROUP: tl.constexpr,
    LANES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Return token and threshold of a row with logits at `at`; `result` is its token or OPEN. Pointers are the
    row's."""
    scale = scale_of(heat)
    group = tl.arange(0, LANES)
    top = tl.load(best + group, mask=group < num_groups, other=float("-inf"))
    part = tl.load(mass + group, mask=group < num_groups, other=0.0)
    highest = tl.max(top, 0)
    bad = (tl.max(tl.where(part == part, 0, 1), 0) > 0) | (highest == float("-inf"))
    token, least = -1, float("-inf")
    if bad == 0:
        by_count = (k > 0) & (k < vocab)
        total = tl.sum(part * tl.exp2((top - highest) * scale), 0)
        need = tl.where(by_count, k.to(tl.float32), p * total)
        key = key_of(tl.full([], -3.4028234e38, tl.float32), SHIFT)
        if by_count | (floor <= 0.0):
            # Slightly more than needed, because sums in another order may differ in their last bits.
            more = tl.where(by_count, need, need * 1.00001)
            key = bound_key(top, part, highest, scale, more, by_count, SHIFT, 1 if SHIFT else 4096, GROUP)
        if floor > 0.0:
            # The first key whose value is not below the bound: a positive bfloat16 key stands for the smallest
            # of its float32 values, a negative key for the largest.
            lowest = key_of(highest + tl.log2(tl.minimum(floor, 1.0)) / scale, 0).to(tl.int64)
            up = tl.where(lowest >= 0, (1 << SHIFT) - 1, 0)
            key = tl.maximum(key, ((lowest + up) >> SHIFT).to(tl.int32))
        reached = (key_of(top, SHIFT) >= key) & (group < num_groups)
        count = tl.sum(reached.to(tl.int32), 0)
        tl.store(chosen + tl.cumsum(reached.to(tl.int32), 0) - 1, group, mask=reached)
        tl.debug_barrier()
        if by_count:
            key = search(at, chosen, count, vocab, key, highest, scale, need, True, SHIFT, GROUP, CHUNK)
        if p < 1.0:
            if by_count | (floor > 0.0):
                least = value_of(key, SHIFT)
                rest, _, _ = weigh(at, chosen, count, vocab, least, least, least, highest, scale, False, GROUP, CHUNK)
                need = p * rest
            key = search(at, chosen, count, vocab, key, highest, scale, need, False, SHIFT, GROUP, CHUNK)
        least = value_of(key, SHIFT)
        token = result
        if EXACT:
            # Sums in another order may give a threshold above the drawn token's logit.
            drawn = tl.load(at + token, mask=token >= 0, other=float("inf")).to(tl.float32)
            least = tl.minimum(least, drawn)
        if token == OPEN:
            token = draw(at, chosen, count, vocab, least, highest, scale, seed, place, 2 * TRIALS, GROUP, CHUNK)
    return token, least


@triton.jit
def cut_kernel(
    tokens_out,  # [max_rows] int32
    threshold,  # [rows] float32: the smallest logit that may be drawn
    chosen,  # [rows, num_groups] int32: room for the list of groups
    best,  # [rows, num_groups] float32
    mass,  # [rows, num_groups] float32
    work,  # [rows, vocab] float32: logits of rows with rules
    logits,  # [rows, vocab]: logits of the other rows
    words,  # [slots, SLOT_WORDS]
    counts,  # [lines, vocab], as the next in RuleTables
    seen,
    sample_row,  # [rows], as are the next two
    sample_slot,
    sample_place,
    vocab,
    logits_stride,
    num_groups,
    OPEN: tl.constexpr,
    TRIALS: tl.constexpr,
    EXACT: tl.constexpr,  # rows that have their token need thresholds, too
    SHIFT: tl.constexpr,  # 16 for bfloat16 logits, else 0
    GROUP: tl.constexpr,
    LANES: tl.constexpr,  # power of two >= num_groups
    CHUNK: tl.constexpr,
):
    """A program handles one row. It ends at once if the row has no cut and no rules, or has its token and not EXACT."""
    row = tl.program_id(0)
    target = tl.load(sample_row + row)
    slot = tl.load(sample_slot + row)
    heat, k, p, floor = limits_of(words, slot)
    rules = line_of(words, slot)
    result = tl.load(tokens_out + target, mask=target >= 0, other=-1)
    wanted = result == OPEN
    if EXACT:
        wanted = (result == OPEN) | ((result >= 0) & is_cut(heat, k, p, floor, vocab))
    token, least = result, float("-inf")
    if wanted:
        place, code, own = tl.load(sample_place + row), seed_of(words, slot), row.to(tl.int64) * num_groups
        # Two copies, because logits and work have different types.
        if rules < 0:
            token, least = cut_from(
                logits + row.to(tl.int64) * logits_stride, chosen + own, best + own, mass + own, num_groups, vocab,
                heat, k, p, floor, code, place, result, OPEN, TRIALS, EXACT, SHIFT, GROUP, LANES, CHUNK,
            )  # fmt: skip
        else:
            token, least = cut_from(
                work + row.to(tl.int64) * vocab, chosen + own, best + own, mass + own, num_groups, vocab,
                heat, k, p, floor, code, place, result, OPEN, TRIALS, EXACT, 0, GROUP, LANES, CHUNK,
            )  # fmt: skip
        tl.store(tokens_out + target, token)
        tl.store(word(words, slot, LAST_TOKEN), tl.maximum(token, 0))
        tl.store(threshold + row, least)
    if (rules >= 0) & (token >= 0):
        count_token(token, vocab, words, slot, rules, counts, seen)


def threshold_reference(line: Tensor, heat: float, top_k: int, top_p: float, min_p: float) -> float:
    """Specification, with sorted float64: the smallest logit of line float32 [vocab] that may be drawn."""
    scale = scale_reference(heat)
    ordered = line.sort(descending=True).values.double()
    weight = torch.exp2((ordered - ordered[0]) * scale)
    least = float("-inf")
    if min_p > 0:
        least = float(ordered[weight >= min(min_p, 1.0)].min())
    if 0 < top_k < len(line):
        least = max(least, float(ordered[top_k - 1]))
    if top_p < 1:
        kept = ordered >= least
        before = weight.cumsum(0) - weight
        inside = kept & (before < top_p * weight[kept].sum())
        inside[0] = True
        least = max(least, float(ordered[inside].min()))
    return least


def draw_reference(line: Tensor, least: float, heat: float, seed: int, place: int) -> int:
    """Specification of the draw from line float32 [vocab], among tokens whose logit is >= `least`."""
    scale, vocab, stream = scale_reference(heat), len(line), 2 * TRIALS
    score = torch.full((-(-vocab // GROUP) * GROUP,), float("-inf"))
    score[:vocab] = torch.where(line >= least, (line - line.max()) * scale, float("-inf"))
    score = score.view(-1, GROUP)
    group = torch.arange(len(score))
    held = torch.log2(torch.exp2(score).sum(1)) + noise_reference(seed, place, group, stream + GROUP_STREAM)
    first = int(held.argmax()) * GROUP
    token = torch.arange(first, first + GROUP)
    return first + int((score[first // GROUP] + noise_reference(seed, place, token, stream + TOKEN_STREAM)).argmax())
