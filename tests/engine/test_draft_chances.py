"""How often drafts that are drawn with a row's own noise are right, and the distribution of what the row draws.

Draws of an accelerator: the token with the largest log2(weight) + noise, whose noise is a function of seed, place and
token. If two distributions with the total variation distance TV draw with the same noise, both draw the same token at
least (1 - TV) / (1 + TV) of the time (arXiv 2408.07978).
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from _fast.layout import SLOT_WORDS
from engine.base.request import SamplingParams
from engine.kernels.sampling.noise import TOKEN_STREAM, noise_reference
from engine.kernels.sampling.top_logprobs import LINE
from engine.kernels.step_tensors import empty_inputs, empty_slots
from engine.sampling.device import DeviceSampler
from tests.kernels.sampling import fits

VOCAB, SEED = 32, 12


def logits_of(number: int) -> tuple[Tensor, Tensor]:
    """Logits [VOCAB] of a target, and of a drafter that knows it roughly."""
    random = torch.Generator().manual_seed(number)
    target = 2 * torch.randn(VOCAB, generator=random)
    return target, target + 0.7 * torch.randn(VOCAB, generator=random)


def drawn(logits: Tensor, places: Tensor) -> Tensor:
    """The tokens [n] that a row of temperature 1 draws at the places [n] of its answer."""
    at, numbers = np.repeat(places.numpy().astype(np.int64), VOCAB), torch.arange(VOCAB).repeat(len(places))
    noise = noise_reference(SEED, at, numbers, TOKEN_STREAM).view(-1, VOCAB)
    return (logits / math.log(2) + noise).argmax(1)


def test_rows_and_drafters_draw_by_the_same_formula():
    count = 60
    slots, words = empty_slots(1, 1, 1, "cpu"), np.zeros(SLOT_WORDS, np.int32)
    reports = torch.zeros(1, count, 1, LINE, dtype=torch.int32)
    sampler = DeviceSampler(slots, 1, count, VOCAB, "cpu", "raw_logprobs", 20, reports)
    sampler.admit(0, SamplingParams(), np.zeros(1, np.int32), SEED, words)
    sampler.take_lines(np.zeros(1, np.int64))
    slots.words[0] = torch.from_numpy(words)
    inputs, places = empty_inputs(count, 8, 1, 1, "cpu"), torch.arange(count, dtype=torch.int32)
    inputs.sample_row.copy_(places)
    inputs.sample_place.copy_(places)
    target, drafter = logits_of(0)
    tokens = torch.empty(count, dtype=torch.int32)
    sampler.launch_plain(inputs, target.expand(count, -1).contiguous(), tokens)
    guesses = sampler.guess(drafter.expand(count, -1).contiguous(), torch.zeros_like(places), places, places)
    assert tokens.tolist() == drawn(target, places).tolist()
    assert guesses.tolist() == drawn(drafter, places).tolist()
    assert guesses.tolist() != tokens.tolist()


@pytest.mark.parametrize("count", [20_000, pytest.param(200_000, marks=pytest.mark.full)])
@pytest.mark.parametrize("number", range(3))
def test_drafts_are_as_often_right_as_the_distance_of_the_distributions_allows(number, count):
    target, drafter = logits_of(number)
    places = torch.arange(count)
    tokens, guesses = drawn(target, places), drawn(drafter, places)
    weights, others = target.double().softmax(0), drafter.double().softmax(0)
    for found, wanted in ((tokens, weights), (guesses, others)):
        assert fits(np.bincount(found.numpy(), minlength=VOCAB), wanted.numpy())
    distance = float((weights - others).abs().sum() / 2)
    least, alone = (1 - distance) / (1 + distance), float((weights * others).sum())
    assert alone < least - 0.1, "draws with noise of their own would do as well"
    assert float((tokens == guesses).double().mean()) >= least - 0.01
