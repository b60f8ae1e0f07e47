"""Greedy rows and rows with a temperature only: the token, from the groups' numbers and one group of logits.

    greedy: the first group with the row's largest logit, the first such token in it
    drawn:  group = argmax log2(mass_g) + best_g * scale + noise;  token = argmax x_i * scale + noise,  i in the group

Both draws are exact, since a group's mass is that of its tokens; together they need numbers for num_groups + GROUP
candidates only. Rows with top-k, top-p or min-p are left alone. Users: engine/kernels/sampling/choose.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.sampling.groups import GROUP, scale_of, scale_reference
from engine.kernels.sampling.noise import GROUP_STREAM, TOKEN_STREAM, noise, noise_reference
from engine.kernels.target import tl, triton


@triton.jit
def is_cut(heat, top_k, top_p, min_p, vocab):
    """True for a row with top-k, top-p or min-p."""
    return (heat > 0.0) & (((top_k > 0) & (top_k < vocab)) | (top_p < 1.0) | (min_p > 0.0))


@triton.jit
def pick_kernel(
    tokens_out,  # [max_rows] int32
    last_token,  # [slots] int32
    threshold,  # [rows] float32: the smallest logit that may be drawn
    best,  # [rows, num_groups] float32
    mass,  # [rows, num_groups] float32
    logits,  # [rows, vocab]
    temperature,  # [slots], as are the next four
    top_k,
    top_p,
    min_p,
    seed,
    sample_row,  # [rows], as are the next two
    sample_slot,
    sample_place,
    vocab,
    logits_stride,
    num_groups,
    GROUP: tl.constexpr,
    LANES: tl.constexpr,  # power of two >= num_groups
):
    """One row per program."""
    row = tl.program_id(0)
    target = tl.load(sample_row + row)
    slot = tl.load(sample_slot + row)
    heat = tl.load(temperature + slot)
    cut = is_cut(heat, tl.load(top_k + slot), tl.load(top_p + slot), tl.load(min_p + slot), vocab)
    if (target >= 0) & (cut == 0):
        scale = scale_of(heat)
        key, place = tl.load(seed + slot), tl.load(sample_place + row)
        group = tl.arange(0, LANES)
        line = row.to(tl.int64) * num_groups + group
        top = tl.load(best + line, mask=group < num_groups, other=float("-inf"))
        part = tl.load(mass + line, mask=group < num_groups, other=0.0)
        highest = tl.max(top, 0)
        bad = (tl.max(tl.where(part == part, 0, 1), 0) > 0) | (highest == float("-inf"))
        highest = tl.where(highest == float("-inf"), 0.0, highest)
        if heat > 0.0:
            score = (top - highest) * scale + tl.log2(part) + noise(key, place, group, 1)
            chosen = tl.argmax(score, 0)
        else:
            chosen = tl.argmax(top, 0)
        token = chosen * GROUP + tl.arange(0, GROUP)
        x = tl.load(logits + row.to(tl.int64) * logits_stride + token, mask=token < vocab, other=float("-inf"))
        x = x.to(tl.float32)
        if heat > 0.0:
            inside = tl.argmax((x - highest) * scale + noise(key, place, token, 0), 0)
        else:
            inside = tl.argmax(x, 0)
        result = tl.where(bad, -1, chosen * GROUP + inside).to(tl.int32)
        tl.store(tokens_out + target, result)
        tl.store(last_token + slot, tl.maximum(result, 0))
        tl.store(threshold + row, float("-inf"))


def pick_reference(line: Tensor, best: Tensor, mass: Tensor, heat: float, seed: int, place: int) -> int:
    """The specification for one row of finite logits: line float32 [vocab], best and mass float32 [num_groups]."""
    if heat <= 0:
        return int(line.argmax())
    scale, highest = scale_reference(heat), best.max()
    group = torch.arange(len(best))
    score = (best - highest) * scale + torch.log2(mass) + noise_reference(seed, place, group, GROUP_STREAM)
    first = int(score.argmax()) * GROUP
    part = line[first : first + GROUP]
    token = torch.arange(first, first + len(part))
    return first + int(((part - highest) * scale + noise_reference(seed, place, token, TOKEN_STREAM)).argmax())
