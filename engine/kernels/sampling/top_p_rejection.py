"""Top-p by rejection sampling: tokens are drawn from the whole row until top-p accepts the drawn token.

    x is accepted if the mass of all logits above x is below p * the mass of all logits

An accepted token has the distribution of a draw from the set that top-p accepts. On average a row needs at most 1 / p
draws. Acceptance compares one sum: the groups' masses bound the sum, and if the bound does not decide, one pass over
the groups with a larger logit computes the sum. The threshold itself is not needed. User: pick.
"""

from __future__ import annotations

from engine.kernels.target import tl, triton

TRIALS = 16  # draws; then `cut` handles a row without an accepted token
LEAST_P = 0.6  # below this p, cut's search is faster for a peaked row
LANES, WIDE = 1024, 128  # groups whose numbers, and groups whose logits, are read together


@triton.jit
def listed(chosen, first, count, CHUNK: tl.constexpr):
    """Load groups [CHUNK] of the list from `first` on; after its end return a group beyond every vocabulary."""
    number = first + tl.arange(0, CHUNK)
    return tl.load(chosen + number, mask=number < count, other=1 << 24)


@triton.jit
def tile(at, group, vocab, GROUP: tl.constexpr):
    token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    return tl.load(at + token, mask=token < vocab, other=float("-inf"))


@triton.jit
def mass_above(at, chosen, count, vocab, x, highest, scale, GROUP: tl.constexpr, CHUNK: tl.constexpr):
    """Return the mass, relative to `highest`, of the chosen groups' logits above x."""
    above = tl.zeros([CHUNK, GROUP], tl.float32)
    group = listed(chosen, 0, count, CHUNK)
    y = tile(at, group, vocab, GROUP)
    group = listed(chosen, CHUNK, count, CHUNK)
    for first in range(0, count, CHUNK):
        after = tile(at, group, vocab, GROUP)  # loads while the current chunk is summed
        group = listed(chosen, first + 2 * CHUNK, count, CHUNK)
        z = y.to(tl.float32)
        above += tl.where(z > x, tl.exp2((z - highest) * scale), 0.0)
        y = after
    return tl.sum(tl.sum(above, 1), 0)


@triton.jit
def numbers(best, mass, first, num_groups, LANES: tl.constexpr):
    """Load best and mass [LANES] of the row's groups from `first` on; also return the groups' numbers."""
    group = first + tl.arange(0, LANES)
    top = tl.load(best + group, mask=group < num_groups, other=float("-inf"))
    return top, tl.load(mass + group, mask=group < num_groups, other=0.0), group


@triton.jit
def accepts(at, chosen, best, mass, num_groups, vocab, x, p, highest, scale,
            GROUP: tl.constexpr, LANES: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """Whether less than p of the mass is above x; best, mass and `chosen` (room for a list) are the row's lines."""
    total, most, least = tl.zeros([LANES], tl.float32), tl.zeros([LANES], tl.float32), tl.zeros([LANES], tl.float32)
    # In a group with a larger logit, at most GROUP - 1 tokens are <= x.
    others = (GROUP - 1) * tl.exp2((x - highest) * scale)
    for first in range(0, num_groups, LANES):
        top, part, _ = numbers(best, mass, first, num_groups, LANES)
        peak = tl.exp2((top - highest) * scale)
        held = part * peak
        total += held
        most += tl.where(top > x, held, 0.0)
        least += tl.where(top > x, tl.maximum(peak, held - others), 0.0)
    need = p * tl.sum(total, 0)
    kept = tl.sum(most, 0) < need * 0.99999  # sums taken in another order may differ in their last bits
    if (kept == 0) & (tl.sum(least, 0) < need * 1.00001):
        count = 0
        tl.debug_barrier()  # the list of the draw before has been read
        for first in range(0, num_groups, LANES):
            top, _, group = numbers(best, mass, first, num_groups, LANES)
            reached = (top > x).to(tl.int32)
            tl.store(chosen + count + tl.cumsum(reached, 0) - 1, group, mask=top > x)
            count += tl.sum(reached, 0)
        tl.debug_barrier()
        kept = mass_above(at, chosen, count, vocab, x, highest, scale, GROUP, CHUNK) < need
    return kept
