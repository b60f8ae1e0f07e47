"""A drafter's places, guesses and features on a real GPU against the references."""

import copy
from dataclasses import fields

import pytest
import torch

from engine.kernels.block_convolution import block_convolution, block_convolution_reference
from engine.kernels.drafts_blocks import block_places, block_places_reference, empty_block
from engine.kernels.drafts_confidence import take_confidence, take_confidence_reference
from engine.kernels.drafts_features import (
    Features,
    accept_features,
    accept_features_reference,
    features_before,
    features_before_reference,
    keep_features,
    keep_features_reference,
)
from engine.kernels.drafts_places import (
    Queries,
    draft_places,
    draft_places_reference,
    empty_places,
    next_places,
    next_places_reference,
    put_drafts,
    put_drafts_reference,
)
from tests.kernels.drafts import accepted, confidences, convolved_blocks, drafter_step, drawn
from tests.kernels.test_on_device_drafts import there

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")]


@pytest.mark.parametrize("number", [1, 3, 64])
def test_passes_and_guesses_equal_the_reference(number):
    step, _, tensors = drafter_step(200, number)
    mine, theirs, mapping = empty_places(150, "cuda"), empty_places(150, "cpu"), tensors["mapping"].cuda()
    guesses, ours, ids = drawn(17, 150 * (number + 2), low=-1, high=99), there(step.state), tensors["tokens"].cuda()
    for j in range(number):
        next_places(mine, mapping) if j else draft_places(mine, there(step), mapping)
        if j:
            next_places_reference(theirs, tensors["mapping"])
        else:
            draft_places_reference(theirs, step, tensors["mapping"])
        for field in fields(mine):
            assert torch.equal(getattr(mine, field.name).cpu(), getattr(theirs, field.name)), field.name
        put_drafts(ours, ids, guesses.cuda(), Queries(mine.token, mine.run, mine.slot, 1))
        queries = Queries(theirs.token, theirs.run, theirs.slot, 1)
        put_drafts_reference(step.state, tensors["tokens"], guesses, queries)
    assert torch.equal(ours.drafts.cpu(), step.state.drafts)
    assert torch.equal(ids.cpu(), tensors["tokens"])


@pytest.mark.parametrize("skipped", [0, 1])
def test_queries_of_blocks_equal_the_reference(skipped):
    step, _, tensors = drafter_step(200, 15)
    mine, theirs = empty_block(100, 1700, "cuda"), empty_block(100, 1700, "cpu")
    block_places(mine, there(step), tensors["tokens"].cuda(), tensors["mapping"].cuda(), 77, skipped)
    block_places_reference(theirs, step, tensors["tokens"], tensors["mapping"], 77, skipped)
    for field in fields(mine):
        assert torch.equal(getattr(mine, field.name).cpu(), getattr(theirs, field.name)), field.name


def test_features_equal_the_reference():
    step, held, tensors = drafter_step(200, 3, width=4096)
    mine, made = there(held), tensors["features"]
    count = int(step.query_start[-1])
    before = features_before(made.cuda(), mine, there(step), tensors["tables"].cuda())
    assert torch.equal(before[:count].cpu(), features_before_reference(made, held, step, tensors["tables"])[:count])
    keep_features(made.cuda(), mine, there(step), tensors["mapping"].cuda())
    keep_features_reference(made, held, step, tensors["mapping"])
    assert torch.equal(mine.of_slots.cpu(), held.of_slots)
    assert torch.equal(mine.of_blocks.cpu(), held.of_blocks)


def test_accepted_features_equal_the_reference():
    step, *numbers = accepted(300, 4, 3000)
    held = Features(torch.randn(301, 3000), torch.randn(1, 3000), 16)
    mine, ours = there(copy.deepcopy(held)), there(step)
    accept_features(mine, ours, *(each.cuda() for each in numbers))
    accept_features_reference(held, step, *numbers)
    assert torch.equal(mine.of_slots.cpu(), held.of_slots)
    assert torch.equal(ours.state.words.cpu(), step.state.words)


def test_survivals_of_a_confident_drafter_equal_the_reference():
    step, confidence = confidences(300, 7)
    ours = there(copy.deepcopy(step))
    take_confidence(ours, confidence.cuda())
    take_confidence_reference(step, confidence)
    assert torch.equal(ours.state.survivals.survivals.cpu(), step.state.survivals.survivals)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_convolutions_of_blocks_equal_the_reference(dtype):
    x, delta, base, before = convolved_blocks(300, 416, 16, 2, dtype)
    for side in range(2):
        mine = block_convolution(x.cuda(), delta.cuda(), base.cuda(), before.cuda(), side)
        torch.testing.assert_close(mine.cpu(), block_convolution_reference(x, delta, base, before, side))
