"""Draws from a whole row with the groups' numbers and one group of logits: greedy, temperature, and top-p by trial.

    greedy: the first group with the row's largest logit, the first such token in it
    drawn:  group = argmax log2(mass_g) + best_g * scale + noise;  token = argmax x_i * scale + noise,  i in the group
    top-p:  the first of a few such draws, each with its own noise, that top-p accepts (see top_p_rejection)

Draws are exact, because a group's mass is the mass of its tokens; a draw needs only num_groups + GROUP random numbers.
Rows with top-k, min-p, top-n-sigma or a small top-p, rows to which XTC applies, and rows whose draws were all refused,
stay OPEN. User: choose.
"""

from __future__ import annotations

import torch
from torch import Tensor

from _fast.layout import SlotWord
from engine.kernels.sampling.groups import GROUP, scale_of, scale_reference
from engine.kernels.sampling.noise import GROUP_STREAM, TOKEN_STREAM, noise, noise_reference
from engine.kernels.sampling.rules import line_of
from engine.kernels.sampling.top_n_sigma import TOP_N_SIGMA
from engine.kernels.sampling.top_p_rejection import LEAST_P, accepts, numbers
from engine.kernels.sampling.xtc import xtc_of
from engine.kernels.step_tensors import real, seed_of, word
from engine.kernels.target import tl, triton

TEMPERATURE = tl.constexpr(int(SlotWord.TEMPERATURE))
TOP_K = tl.constexpr(int(SlotWord.TOP_K))
TOP_P = tl.constexpr(int(SlotWord.TOP_P))
MIN_P = tl.constexpr(int(SlotWord.MIN_P))
LAST_TOKEN = tl.constexpr(int(SlotWord.LAST_TOKEN))
OPEN = -2  # in place of a token: `cut` draws the token


@triton.jit
def limits_of(words, slot):
    """Return a slot's temperature, top-k, top-p and min-p."""
    heat, k = real(words, slot, TEMPERATURE), tl.load(word(words, slot, TOP_K))
    return heat, k, real(words, slot, TOP_P), real(words, slot, MIN_P)


@triton.jit
def is_cut(heat, top_k, top_p, min_p, vocab):
    """Whether a row has top-k, top-p or min-p."""
    return (heat > 0.0) & (((top_k > 0) & (top_k < vocab)) | (top_p < 1.0) | (min_p > 0.0))


@triton.jit
def is_tried(top_k, top_p, min_p, vocab, LEAST_P: tl.constexpr):
    """Whether a cut row has only top-p, and it is large enough for trial draws."""
    return ((top_k <= 0) | (top_k >= vocab)) & (top_p >= LEAST_P) & (min_p <= 0.0)


@triton.jit
def draw_any(at, best, mass, num_groups, vocab, highest, scale, greedy, seed, place, stream,
             GROUP: tl.constexpr, LANES: tl.constexpr):  # fmt: skip
    """Draw a token of the whole row, and return it with its logit: first its group, then the token. Pointers are the
    row's."""
    high = tl.full([LANES], float("-inf"), tl.float32)
    winner = tl.zeros([LANES], tl.int32)
    for first in range(0, num_groups, LANES):
        top, part, group = numbers(best, mass, first, num_groups, LANES)
        score = top
        if greedy == 0:
            score = (top - highest) * scale + tl.log2(part) + noise(seed, place, group, stream + 1)
        winner = tl.where(score > high, group, winner)
        high = tl.maximum(score, high)
    group = tl.min(tl.where(high == tl.max(high, 0), winner, num_groups), 0)
    lane = tl.arange(0, GROUP)
    token = group * GROUP + lane
    x = tl.load(at + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    score = x
    if greedy == 0:
        score = (x - highest) * scale + noise(seed, place, token, stream)
    inside = tl.argmax(score, 0)
    return group * GROUP + inside, tl.max(tl.where(lane == inside, x, float("-inf")), 0)


@triton.jit
def pick_from(at, chosen, best, mass, num_groups, vocab, heat, cut, left, p, seed, place, OPEN: tl.constexpr,
              GROUP: tl.constexpr, LANES: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """Choose a row's token from logits at `at` in at most `left` draws; OPEN if all are refused. Pointers are the
    row's."""
    scale = scale_of(heat)
    result = -1
    high, bad = tl.full([LANES], float("-inf"), tl.float32), tl.zeros([LANES], tl.int32)
    for first in range(0, num_groups, LANES):
        top, part, _ = numbers(best, mass, first, num_groups, LANES)
        high = tl.maximum(high, top)
        bad = tl.where(part == part, bad, 1)
    highest = tl.max(high, 0)
    left = tl.where((tl.max(bad, 0) > 0) | (highest == float("-inf")), 0, left)
    stream, refused = 0, float("-inf")
    while left > 0:
        token, x = draw_any(at, best, mass, num_groups, vocab, highest, scale, heat <= 0.0, seed, place, stream,
                            GROUP, LANES)  # fmt: skip
        kept = cut == 0
        if cut & (x > refused):  # a logit not above a refused logit is refused too
            kept = accepts(at, chosen, best, mass, num_groups, vocab, x, p, highest, scale, GROUP, LANES, CHUNK)
        result = tl.where(kept, token, OPEN)
        refused = tl.maximum(refused, x)
        left = tl.where(kept, 0, left - 1)
        stream += 2
    return result


@triton.jit
def pick_kernel(
    tokens_out,  # [max_rows] int32
    bounds,  # [rows, 2] float32: the smallest and the largest logit that may be drawn
    chosen,  # [rows, num_groups] int32: room for a list of groups
    best,  # [rows, num_groups] float32
    mass,  # [rows, num_groups] float32
    work,  # [rows, vocab] float32: logits of rows with rules
    logits,  # [rows, vocab]: logits of the other rows
    words,  # [slots, SLOT_WORDS]
    sample_row,  # [rows], as are the next two
    sample_slot,
    sample_place,
    vocab,
    logits_stride,
    num_groups,
    RUNS: tl.constexpr,  # the chosen tokens are verified before they are the slots' newest tokens
    OPEN: tl.constexpr,
    TRIALS: tl.constexpr,
    LEAST_P: tl.constexpr,
    GROUP: tl.constexpr,
    LANES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """A program handles one row."""
    row = tl.program_id(0)
    target = tl.load(sample_row + row)
    if target >= 0:
        slot = tl.load(sample_slot + row)
        heat, k, p, floor = limits_of(words, slot)
        cut = is_cut(heat, k, p, floor, vocab)
        left = tl.where(cut, tl.where(is_tried(k, p, floor, vocab, LEAST_P), TRIALS, 0), 1)
        place = tl.load(sample_place + row)
        if (heat > 0.0) & (real(words, slot, TOP_N_SIGMA) > 0.0):
            left = 0
        if xtc_of(words, slot, place, heat) < 1.0:
            left = 0
        result = tl.where(left > 0, -1, OPEN)
        if left > 0:
            code, own = seed_of(words, slot), row.to(tl.int64) * num_groups
            # Two copies, because logits and work have different types.
            if line_of(words, slot) < 0:
                result = pick_from(
                    logits + row.to(tl.int64) * logits_stride, chosen + own, best + own, mass + own, num_groups, vocab,
                    heat, cut, left, p, code, place, OPEN, GROUP, LANES, CHUNK,
                )  # fmt: skip
            else:
                result = pick_from(
                    work + row.to(tl.int64) * vocab, chosen + own, best + own, mass + own, num_groups, vocab,
                    heat, cut, left, p, code, place, OPEN, GROUP, LANES, CHUNK,
                )  # fmt: skip
        tl.store(tokens_out + target, result)
        tl.store(bounds + 2 * row, float("-inf"))
        tl.store(bounds + 2 * row + 1, float("inf"))
        if not RUNS and result != OPEN:
            tl.store(word(words, slot, LAST_TOKEN), tl.maximum(result, 0))


def is_tried_reference(top_k: int, top_p: float, min_p: float, vocab: int) -> bool:
    return not 0 < top_k < vocab and LEAST_P <= top_p < 1 and min_p <= 0


def pick_reference(line: Tensor, best: Tensor, mass: Tensor, heat: float, seed: int, place: int, trial: int = 0) -> int:
    """Specification for one row of finite logits: line float32 [vocab], best and mass float32 [num_groups]."""
    if heat <= 0:
        return int(line.argmax())
    scale, highest, stream = scale_reference(heat), best.max(), 2 * trial
    group = torch.arange(len(best))
    score = (best - highest) * scale + torch.log2(mass) + noise_reference(seed, place, group, stream + GROUP_STREAM)
    first = int(score.argmax()) * GROUP
    part = line[first : first + GROUP]
    token = torch.arange(first, first + len(part))
    value = (part - highest) * scale + noise_reference(seed, place, token, stream + TOKEN_STREAM)
    return first + int(value.argmax())
