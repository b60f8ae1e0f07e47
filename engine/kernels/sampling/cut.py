"""Rows that pick leaves open: the exact threshold without sorting, and a token drawn from the logits at or above it.

    keep x if max - x <= n * sigma and 2^((x - max) * scale) >= min_p;  then of these, x if fewer than k are larger;
    then of these, x if the mass of larger x is below p * the mass of all of these;  then XTC (xtc.py)

as in top_n_sigma.py and top_k_top_p.py; all ties at a threshold are included. The groups' numbers give a lower bound of
the threshold: enough groups have a larger best (top-k), or hold enough mass above the bound (top-p). Only groups that
reach the bound are read again; a search over the ordered bits of their logits finds the exact threshold. Peaked rows
read a few dozen groups, a flat row reads all. Rows that already have their token are searched only if the caller needs
the thresholds. User: choose.
"""

from __future__ import annotations

import torch
from torch import Tensor

from _fast.layout import SlotWord
from engine.kernels.sampling.groups import GROUP, scale_of, scale_reference
from engine.kernels.sampling.noise import GROUP_STREAM, TOKEN_STREAM, noise, noise_reference
from engine.kernels.sampling.pick import is_cut, limits_of
from engine.kernels.sampling.rules import line_of, record_token
from engine.kernels.sampling.top_n_sigma import LINE_OF_MOMENTS, TOP_N_SIGMA, reach_of
from engine.kernels.sampling.top_p_rejection import TRIALS, numbers
from engine.kernels.sampling.xtc import is_narrowed, xtc_of
from engine.kernels.step_tensors import real, seed_of, word
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
def least_above(at, chosen, count, vocab, edge, GROUP: tl.constexpr, CHUNK: tl.constexpr):
    """Return how many of the chosen groups' logits are >= `edge`, and the smallest of them."""
    number = tl.zeros([CHUNK, GROUP], tl.int32)
    low = tl.full([CHUNK, GROUP], float("inf"), tl.float32)
    for first in range(0, count, CHUNK):
        x, _ = read(at, chosen, first, count, vocab, GROUP, CHUNK)
        number += (x >= edge).to(tl.int32)
        low = tl.minimum(low, tl.where(x >= edge, x, float("inf")))
    return tl.sum(tl.sum(number, 1), 0), tl.min(tl.min(low, 1), 0)


@triton.jit
def list_above(chosen, best, num_groups, bound, WIDE: tl.constexpr):
    """Write the list of the groups whose best is >= `bound`; return their number."""
    count = 0
    tl.debug_barrier()  # the list before has been read
    for first in range(0, num_groups, WIDE):
        group = first + tl.arange(0, WIDE)
        reached = tl.load(best + group, mask=group < num_groups, other=float("-inf")) >= bound
        tl.store(chosen + count + tl.cumsum(reached.to(tl.int32), 0) - 1, group, mask=reached)
        count += tl.sum(reached.to(tl.int32), 0)
    tl.debug_barrier()
    return count


@triton.jit
def draw_whole(best, mass, num_groups, most, highest, scale, seed, place, stream, WIDE: tl.constexpr):
    """Draw a group whose best is < `most` by its mass; return it with its score."""
    high = tl.full([WIDE], float("-inf"), tl.float32)
    winner = tl.zeros([WIDE], tl.int32)
    for first in range(0, num_groups, WIDE):
        top, part, group = numbers(best, mass, first, num_groups, WIDE)
        score = (top - highest) * scale + tl.log2(part) + noise(seed, place, group, stream + 1)
        score = tl.where((top < most) & (part > 0.0), score, float("-inf"))
        winner = tl.where(score > high, group, winner)
        high = tl.maximum(score, high)
    return tl.min(tl.where(high == tl.max(high, 0), winner, num_groups), 0), tl.max(high, 0)


@triton.jit
def draw(at, chosen, count, best, mass, num_groups, whole, vocab, least, most, highest, scale, seed, place, stream,
         NARROW: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """Draw one of the tokens with logits from `least` to `most`: first the group, then the token, as in pick.py.

    The candidates are tokens of the chosen groups; with `whole` also all tokens of groups whose best is < `most`.
    `highest`: a logit from which weights are measured. NARROW: there may be a `most`.
    """
    high = tl.full([CHUNK], float("-inf"), tl.float32)
    winner = tl.zeros([CHUNK], tl.int32)
    for first in range(0, count, CHUNK):
        x, token = read(at, chosen, first, count, vocab, GROUP, CHUNK)
        inside = x >= least
        if NARROW:
            inside = inside & (x <= most)
        held = tl.sum(tl.where(inside, tl.exp2((x - highest) * scale), 0.0), 1)
        group = tl.min(token, 1) // GROUP
        score = tl.log2(held) + noise(seed, place, group, stream + 1)
        winner = tl.where(score > high, group, winner)
        high = tl.maximum(high, score)
    group = tl.min(tl.where(high == tl.max(high, 0), winner, vocab), 0)
    if whole:
        other, score_of = draw_whole(best, mass, num_groups, most, highest, scale, seed, place, stream, WIDE)
        group = tl.where(score_of > tl.max(high, 0), other, group)
    token = group * GROUP + tl.arange(0, GROUP)
    x = tl.load(at + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    inside = x >= least
    if NARROW:
        inside = inside & (x <= most)
    score = tl.where(inside, (x - highest) * scale + noise(seed, place, token, stream), float("-inf"))
    return group * GROUP + tl.argmax(score, 0)


@triton.jit
def first_key(top, part, highest, scale, need, by_count, by_mass, gap, SHIFT: tl.constexpr, GROUP: tl.constexpr):
    """Return a lower bound of the threshold's key from the groups' numbers, and from `gap`: the threshold's least
    distance from the largest logit."""
    key = key_of(tl.full([], -3.4028234e38, tl.float32), SHIFT)
    if by_count | by_mass:
        # Slightly more than needed, because sums in another order may differ in their last bits.
        more = tl.where(by_count, need, need * 1.00001)
        key = bound_key(top, part, highest, scale, more, by_count, SHIFT, 1 if SHIFT else 4096, GROUP)
    if gap < float("inf"):
        # The first key whose value is not below the bound: a positive bfloat16 key stands for the smallest
        # of its float32 values, a negative key for the largest.
        lowest = key_of(highest - gap, 0).to(tl.int64)
        up = tl.where(lowest >= 0, (1 << SHIFT) - 1, 0)
        key = tl.maximum(key, ((lowest + up) >> SHIFT).to(tl.int32))
    return key


@triton.jit
def cut_from(
    at, chosen, best, mass, num_groups, vocab, heat, k, p, floor, reach, likely, seed, place, result,
    OPEN: tl.constexpr, TRIALS: tl.constexpr, EXACT: tl.constexpr, SHIFT: tl.constexpr, NARROW: tl.constexpr,
    GROUP: tl.constexpr, LANES: tl.constexpr, WIDE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Return token, threshold and largest possible logit of a row with logits at `at`; `result` is its token or OPEN.
    Pointers are the row's. NARROW: the row may have `reach`, the distance that top-n-sigma allows, and `likely`, XTC's
    threshold or 1."""
    scale = scale_of(heat)
    group = tl.arange(0, LANES)
    top = tl.load(best + group, mask=group < num_groups, other=float("-inf"))
    part = tl.load(mass + group, mask=group < num_groups, other=0.0)
    highest = tl.max(top, 0)
    bad = (tl.max(tl.where(part == part, 0, 1), 0) > 0) | (highest == float("-inf"))
    token, least, most = -1, float("-inf"), float("inf")
    if bad == 0:
        by_count = (k > 0) & (k < vocab)
        total = tl.sum(part * tl.exp2((top - highest) * scale), 0)
        need = tl.where(by_count, k.to(tl.float32), p * total)
        gap = reach
        if floor > 0.0:
            gap = tl.minimum(gap, -tl.log2(tl.minimum(floor, 1.0)) / scale)
        bounded = gap < float("inf")
        by_mass = (p < 1.0) & (bounded == 0)
        key = first_key(top, part, highest, scale, need, by_count, by_mass, gap, SHIFT, GROUP)
        reached = (key_of(top, SHIFT) >= key) & (group < num_groups)
        count = tl.sum(reached.to(tl.int32), 0)
        tl.store(chosen + tl.cumsum(reached.to(tl.int32), 0) - 1, group, mask=reached)
        tl.debug_barrier()
        if by_count:
            key = search(at, chosen, count, vocab, key, highest, scale, need, True, SHIFT, GROUP, CHUNK)
        if p < 1.0:
            if by_count | bounded:
                least = value_of(key, SHIFT)
                rest, _, _ = weigh(at, chosen, count, vocab, least, least, least, highest, scale, False, GROUP, CHUNK)
                need = p * rest
            key = search(at, chosen, count, vocab, key, highest, scale, need, False, SHIFT, GROUP, CHUNK)
        least = value_of(key, SHIFT)
        whole = (by_count | (p < 1.0) | bounded) == 0
        if likely < 1.0:
            if whole == 0:
                total, _, _ = weigh(at, chosen, count, vocab, least, least, least, highest, scale, False, GROUP, CHUNK)
            edge = tl.maximum(least, highest + tl.log2(likely * total) / scale)
            count = list_above(chosen, best, num_groups, edge, WIDE)
            number, low = least_above(at, chosen, count, vocab, edge, GROUP, CHUNK)
            most = tl.where(number > 1, low, float("inf"))
            count = list_above(chosen, best, num_groups, tl.where(whole, most, least), WIDE)
        token = result
        if EXACT:
            # Sums in another order may give a threshold above the drawn token's logit.
            drawn = tl.load(at + token, mask=token >= 0, other=float("inf")).to(tl.float32)
            least = tl.minimum(least, drawn)
        if token == OPEN:
            token = draw(
                at, chosen, count, best, mass, num_groups, whole if NARROW else False, vocab, least, most,
                tl.minimum(highest, most), scale, seed, place, 2 * TRIALS, NARROW, GROUP, WIDE, CHUNK,
            )  # fmt: skip
    return token, least, most


@triton.jit
def cut_kernel(
    tokens_out,  # [max_rows] int32
    bounds,  # [rows, 2] float32: the smallest and the largest logit that may be drawn
    chosen,  # [rows, num_groups] int32: room for the list of groups
    best,  # [rows, num_groups] float32
    mass,  # [rows, num_groups] float32
    work,  # [rows, vocab] float32: logits of rows that have rules or are narrowed
    logits,  # [rows, vocab]: logits of the other rows
    words,  # [slots, SLOT_WORDS]
    moments,  # [rows, num_tiles, MOMENTS] float32
    counts,  # [lines, vocab], as the next three in RuleTables
    seen,
    repeats,
    breakers,
    sample_row,  # [rows], as are the next two
    sample_slot,
    sample_place,
    vocab,
    logits_stride,
    num_groups,
    num_tiles,
    RUNS: tl.constexpr,  # as in pick
    OPEN: tl.constexpr,
    TRIALS: tl.constexpr,
    EXACT: tl.constexpr,  # rows that have their token need bounds, too
    SHIFT: tl.constexpr,  # 16 for bfloat16 logits, else 0
    GROUP: tl.constexpr,
    LANES: tl.constexpr,  # power of two >= num_groups
    TILES: tl.constexpr,  # power of two >= num_tiles
    WIDE: tl.constexpr,  # groups whose numbers are read together
    CHUNK: tl.constexpr,
    HISTORY: tl.constexpr,
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
        cut = is_cut(heat, k, p, floor, vocab) | (real(words, slot, TOP_N_SIGMA) > 0.0)
        wanted = (result == OPEN) | ((result >= 0) & cut)
    token, least, most = result, float("-inf"), float("inf")
    if wanted:
        place, code, own = tl.load(sample_place + row), seed_of(words, slot), row.to(tl.int64) * num_groups
        reach, sigmas = float("inf"), real(words, slot, TOP_N_SIGMA)
        if sigmas > 0.0:
            reach = reach_of(moments + row.to(tl.int64) * num_tiles * LINE_OF_MOMENTS, sigmas, num_tiles, TILES)
        likely = xtc_of(words, slot, place, heat)
        # A greedy row has no limits other than top-n-sigma.
        k, p, floor = tl.where(heat > 0.0, k, 0), tl.where(heat > 0.0, p, 1.0), tl.where(heat > 0.0, floor, 0.0)
        # Two copies, because logits and work have different types; only the second one is for narrowed rows.
        if (rules < 0) & (is_narrowed(words, slot) == 0):
            token, least, most = cut_from(
                logits + row.to(tl.int64) * logits_stride, chosen + own, best + own, mass + own, num_groups, vocab,
                heat, k, p, floor, float("inf"), 1.0, code, place, result, OPEN, TRIALS, EXACT, SHIFT, False, GROUP,
                LANES, WIDE, CHUNK,
            )  # fmt: skip
        else:
            token, least, most = cut_from(
                work + row.to(tl.int64) * vocab, chosen + own, best + own, mass + own, num_groups, vocab,
                heat, k, p, floor, reach, likely, code, place, result, OPEN, TRIALS, EXACT, 0, True, GROUP, LANES,
                WIDE, CHUNK,
            )  # fmt: skip
        tl.store(tokens_out + target, token)
        if not RUNS:
            tl.store(word(words, slot, LAST_TOKEN), tl.maximum(token, 0))
        tl.store(bounds + 2 * row, least)
        tl.store(bounds + 2 * row + 1, most)
    if not RUNS and (rules >= 0) & (token >= 0):
        place = tl.load(sample_place + row)
        record_token(token, vocab, words, slot, rules, place, counts, seen, repeats, breakers, HISTORY)


def threshold_reference(
    line: Tensor, heat: float, top_k: int, top_p: float, min_p: float, bound: float = float("-inf")
) -> float:
    """Specification, with sorted float64: the smallest logit of line float32 [vocab] that may be drawn; `bound`: the
    one of top-n-sigma."""
    scale = scale_reference(heat)
    ordered = line.sort(descending=True).values.double()
    weight = torch.exp2((ordered - ordered[0]) * scale)
    least = float(ordered[ordered >= bound].min()) if bound > float("-inf") else bound
    if min_p > 0:
        least = max(least, float(ordered[weight >= min(min_p, 1.0)].min()))
    if 0 < top_k < len(line):
        least = max(least, float(ordered[top_k - 1]))
    if top_p < 1:
        kept = ordered >= least
        before = weight.cumsum(0) - weight
        inside = kept & (before < top_p * weight[kept].sum())
        inside[0] = True
        least = max(least, float(ordered[inside].min()))
    return least


def most_reference(line: Tensor, least: float, heat: float, likely: float) -> float:
    """Specification: the largest logit of line float32 [vocab] that XTC leaves, of the logits >= `least`; inf: all.
    `likely`: XTC's threshold, or 1."""
    weight = torch.exp2((line.double() - float(line.max())) * scale_reference(heat))
    weight[line < least] = 0.0
    found = line[(weight > 0) & (weight >= likely * weight.sum())] if likely < 1 else line[:0]
    return float(found.min()) if len(found) > 1 else float("inf")


def draw_reference(line: Tensor, least: float, heat: float, seed: int, place: int, most: float = float("inf")) -> int:
    """Specification of the draw from line float32 [vocab], among tokens whose logit is from `least` to `most`."""
    scale, vocab, stream = scale_reference(heat), len(line), 2 * TRIALS
    inside = (line >= least) & (line <= most)
    score = torch.full((-(-vocab // GROUP) * GROUP,), float("-inf"))
    score[:vocab] = torch.where(inside, (line - min(float(line.max()), most)) * scale, float("-inf"))
    score = score.view(-1, GROUP)
    group = torch.arange(len(score))
    held = torch.log2(torch.exp2(score).sum(1)) + noise_reference(seed, place, group, stream + GROUP_STREAM)
    first = int(held.argmax()) * GROUP
    token = torch.arange(first, first + GROUP)
    return first + int((score[first // GROUP] + noise_reference(seed, place, token, stream + TOKEN_STREAM)).argmax())
