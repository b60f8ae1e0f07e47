"""A drafter's places, guesses and features in the interpreter, against the references."""

import copy
from dataclasses import fields

import pytest
import torch
import triton  # noqa: F401  (must precede the import of any kernel file; TRITON_INTERPRET sets the mode)

from engine.kernels.drafts_features import (
    Features,
    accept_features_reference,
    features_before_reference,
    keep_features_reference,
    launch_accept_features,
    launch_features_before,
    launch_keep_features,
)
from engine.kernels.drafts_places import (
    draft_places_reference,
    empty_places,
    launch_draft_places,
    launch_put_drafts,
    put_drafts_reference,
)
from tests.kernels.drafts import accepted, drafter_step, drawn


@pytest.mark.parametrize("number", [1, 3, 7])
def test_passes_are_places_of_the_step(number):
    step, _, tensors = drafter_step(12, number)
    mine, theirs = (empty_places(number, 9, "cpu") for _ in range(2))
    launch_draft_places(mine, step, tensors["mapping"])
    draft_places_reference(theirs, step, tensors["mapping"])
    for field in fields(mine):
        assert torch.equal(getattr(mine, field.name), getattr(theirs, field.name)), field.name
    assert (theirs.run >= 0).sum() == step.drafts.clamp(min=0).sum()
    guesses = drawn(17, 9 * (number + 2), low=-1, high=99)
    for j in range(number):
        ours = copy.deepcopy((step.state, tensors["tokens"]))
        launch_put_drafts(*ours, guesses, theirs, j)
        put_drafts_reference(step.state, tensors["tokens"], guesses, theirs, j)
        assert torch.equal(ours[0].drafts, step.state.drafts)
        assert torch.equal(ours[1], tensors["tokens"])


def test_features_before_tokens_are_those_of_the_step_the_slot_and_the_block():
    step, held, tensors = drafter_step(12, 3)
    made = tensors["features"]
    mine = launch_features_before(made, held, step, tensors["tables"])
    theirs = features_before_reference(made, held, step, tensors["tables"])
    count = int(step.query_start[-1])
    assert torch.equal(mine[:count], theirs[:count])
    sources = [made, held.of_slots, held.of_blocks]
    assert all((theirs[:count, None] == one[None]).all(2).any() for one in sources)


def test_the_last_features_of_rows_and_blocks_are_stored():
    step, held, tensors = drafter_step(12, 3)
    mine = copy.deepcopy(held)
    launch_keep_features(tensors["features"], mine, step, tensors["mapping"])
    before = copy.deepcopy(held)
    keep_features_reference(tensors["features"], held, step, tensors["mapping"])
    assert torch.equal(mine.of_slots, held.of_slots)
    assert torch.equal(mine.of_blocks, held.of_blocks)
    assert (held.of_blocks != before.of_blocks).any()


@pytest.mark.parametrize("number", [1, 4])
def test_the_feature_of_the_last_accepted_token_is_stored(number):
    step, *numbers = accepted(20, number, 30)
    held = Features(torch.randn(21, 30), torch.randn(1, 30), 16)
    mine, ours = copy.deepcopy((held, step))
    launch_accept_features(mine, ours, *numbers)
    accept_features_reference(held, step, *numbers)
    assert torch.equal(mine.of_slots, held.of_slots)
    assert torch.equal(ours.state.words, step.state.words)
