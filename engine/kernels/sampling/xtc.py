"""XTC (exclude top choices): with some probability, all likely tokens but the least likely of them are excluded.

    a token counts as likely if p >= threshold, where p are the probabilities after min-p, top-k and top-p
    two or more are likely:  x stays if x <= the smallest likely logit;  fewer: every token stays

All ties at the smallest likely logit stay. Whether XTC applies to a token is a draw of its own from (seed, place in the
answer), so rows without XTC draw the same tokens as before, and so do rows with XTC where it does not apply. A
threshold above 0.5 switches XTC off: two tokens cannot both reach it. Greedy rows ignore XTC. Source: the definition by
p-e-w in text-generation-webui#6335. Users: pick and cut; engine/sampling/sampler.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from _fast.layout import SamplerWord
from engine.kernels.sampling.draw import mix64, uniform
from engine.kernels.sampling.noise import fraction, fraction_reference
from engine.kernels.sampling.top_n_sigma import TOP_N_SIGMA
from engine.kernels.sampling.top_p_rejection import TRIALS
from engine.kernels.step_tensors import real, seed_of
from engine.kernels.target import tl, triton

PROBABILITY = tl.constexpr(int(SamplerWord.XTC_PROBABILITY))
THRESHOLD = tl.constexpr(int(SamplerWord.XTC_THRESHOLD))
HIGHEST = 0.5  # two tokens can reach at most this threshold
MOST = tl.constexpr(HIGHEST)
STREAM = 2 * TRIALS + 2  # the streams before belong to the draws of tokens
OWN_STREAM = tl.constexpr(STREAM)
KEY = np.uint64(0x5854_4320_6472_6177)  # separates the CPU's draws for XTC from its draws of tokens


@triton.jit
def is_narrowed(words, slot):
    """Whether a slot has top-n-sigma or XTC; then its logits are also in `work`."""
    return (real(words, slot, TOP_N_SIGMA) > 0.0) | (real(words, slot, PROBABILITY) > 0.0)


@triton.jit
def xtc_of(words, slot, place, heat):
    """Return the threshold if XTC applies to the slot's token number `place`, else 1."""
    chance, threshold = real(words, slot, PROBABILITY), 1.0
    if (chance > 0.0) & (heat > 0.0):
        least = real(words, slot, THRESHOLD)
        drawn = fraction(seed_of(words, slot), place, place * 0, OWN_STREAM)
        threshold = tl.where((drawn < chance) & (least <= MOST), least, 1.0)
    return threshold


def xtc_of_reference(chance: float, threshold: float, heat: float, seed: int, place: int) -> float:
    """Specification of xtc_of."""
    if chance <= 0 or heat <= 0 or threshold > HIGHEST:
        return 1.0
    drawn = float(fraction_reference(seed, place, torch.zeros(1, dtype=torch.int64), STREAM))
    return threshold if drawn < chance else 1.0


def xtc_applies(chance: np.ndarray, threshold: np.ndarray, seed: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Return for rows of a CPU whether XTC applies, bool [rows]; chance and threshold float32, seed uint64, index
    int64."""
    return (threshold <= HIGHEST) & (uniform(mix64(seed ^ KEY), index) < chance)


def xtc(probs: Tensor, threshold: float) -> Tensor:
    """Return probs float32 [vocab], not normalised, with 0 for the tokens that XTC excludes."""
    return xtc_reference(probs, threshold)


def xtc_reference(probs: Tensor, threshold: float) -> Tensor:
    """Specification in plain torch."""
    likely = (probs > 0) & (probs.double() >= threshold * probs.double().sum())
    return torch.where(probs > probs[likely].min(), 0.0, probs) if int(likely.sum()) > 1 else probs
