"""A drafter's places, guesses and features on a real GPU against the references."""

import copy
from dataclasses import fields

import pytest
import torch

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
    draft_places,
    draft_places_reference,
    empty_places,
    put_drafts,
    put_drafts_reference,
)
from tests.kernels.drafts import chosen_runs, drafter_step, drawn
from tests.kernels.test_on_device_drafts import there

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")]


@pytest.mark.parametrize("number", [1, 3, 64])
def test_passes_and_guesses_equal_the_reference(number):
    slots, step, _, tensors = drafter_step(200, number)
    numbers = tensors["drafts"], step.slots, step.context_len, step.query_start, step.lines, tensors["mapping"]
    mine, theirs = empty_places(number, 150, "cuda"), empty_places(number, 150, "cpu")
    draft_places(mine, there(slots), *(each.cuda() for each in numbers))
    draft_places_reference(theirs, slots, *numbers)
    for field in fields(mine):
        assert torch.equal(getattr(mine, field.name).cpu(), getattr(theirs, field.name)), field.name
    guesses, ours, ids = drawn(17, 150 * (number + 2), low=-1, high=99), there(slots), tensors["tokens"].cuda()
    for j in range(number):
        put_drafts(ours, ids, guesses.cuda(), mine, j)
        put_drafts_reference(slots, tensors["tokens"], guesses, theirs, j)
    assert torch.equal(ours.drafts.cpu(), slots.drafts)
    assert torch.equal(ids.cpu(), tensors["tokens"])


def test_features_equal_the_reference():
    _, step, held, tensors = drafter_step(200, 3, width=4096)
    mine, made = there(held), tensors["features"]
    count = int(step.query_start[-1])
    before = features_before(made.cuda(), mine, there(step))
    assert torch.equal(before[:count].cpu(), features_before_reference(made, held, step)[:count])
    keep_features(made.cuda(), mine, there(step), tensors["mapping"].cuda())
    keep_features_reference(made, held, step, tensors["mapping"])
    assert torch.equal(mine.of_slots.cpu(), held.of_slots)
    assert torch.equal(mine.of_blocks.cpu(), held.of_blocks)


def test_accepted_features_equal_the_reference():
    runs, slots, _, inputs = chosen_runs(300, 4)
    inputs.query_start.copy_(torch.arange(301) * 5)
    held = Features(torch.randn(301, 3000), torch.randn(1, 3000))
    mine, ours = there(copy.deepcopy(held)), there(slots)
    numbers = torch.randn(1506, 3000), runs, inputs.row_slot, inputs.row_drafts, inputs.query_start
    accept_features(mine, ours, *(each.cuda() for each in numbers))
    accept_features_reference(held, slots, *numbers)
    assert torch.equal(mine.of_slots.cpu(), held.of_slots)
    assert torch.equal(ours.words.cpu(), slots.words)
