"""A drafter's places, guesses and features in the interpreter, against the references."""

import copy
from dataclasses import fields

import pytest
import torch
import triton  # noqa: F401  (must precede the import of any kernel file; TRITON_INTERPRET sets the mode)

from engine.kernels.block_convolution import block_convolution_reference, launch_block_convolution
from engine.kernels.drafts_blocks import block_places_reference, empty_block, launch_block_places
from engine.kernels.drafts_confidence import launch_take_confidence, take_confidence_reference
from engine.kernels.drafts_features import (
    Features,
    accept_features_reference,
    accept_reference,
    features_before_reference,
    keep_features_reference,
    launch_accept,
    launch_features_before,
    launch_keep_features,
)
from engine.kernels.drafts_places import (
    Queries,
    draft_places_reference,
    empty_places,
    launch_draft_places,
    launch_next_places,
    launch_put_drafts,
    next_places_reference,
    put_drafts_reference,
)
from tests.kernels.drafts import accepted, confidences, convolved_blocks, drafter_step, drawn


@pytest.mark.parametrize("number", [1, 3, 7])
def test_passes_are_places_of_the_step(number):
    step, _, tensors = drafter_step(12, number)
    mine, theirs = (empty_places(9, "cpu") for _ in range(2))
    guesses, count = drawn(17, 9 * (number + 2), low=-1, high=99), 0
    for j in range(number):
        for places, first, further in (
            (mine, launch_draft_places, launch_next_places),
            (theirs, draft_places_reference, next_places_reference),
        ):
            further(places, tensors["mapping"]) if j else first(places, step, tensors["mapping"])
        for field in fields(mine):
            assert torch.equal(getattr(mine, field.name), getattr(theirs, field.name)), field.name
        count += int((theirs.run >= 0).sum())
        ours = copy.deepcopy((step.state, tensors["tokens"]))
        queries = Queries(theirs.token, theirs.run, theirs.slot, 1)
        launch_put_drafts(*ours, guesses, queries)
        put_drafts_reference(step.state, tensors["tokens"], guesses, queries)
        assert torch.equal(ours[0].drafts, step.state.drafts)
        assert torch.equal(ours[1], tensors["tokens"])
    assert count == step.drafts.clamp(min=0).sum()


def test_a_pass_behind_the_last_guess_of_a_row_computes_nothing_for_it():
    step, _, tensors = drafter_step(12, 3)
    places = empty_places(9, "cpu")
    launch_draft_places(places, step, tensors["mapping"])
    drafts = step.drafts[step.drafts > 0]
    for j in range(1, 5):
        launch_next_places(places, tensors["mapping"])
        over = torch.ones(9, dtype=torch.bool)
        over[: len(drafts)] = drafts <= j
        assert (places.run[over] == -1).all()
        assert (places.mapping[over] == -1).all()
        assert (places.context[over] == 2).all()
        begin = step.query_start[:-1][step.drafts > 0]
        assert torch.equal(places.token[~over], (begin + j)[drafts > j].long())


@pytest.mark.parametrize("skipped", [0, 1])
@pytest.mark.parametrize(("number", "rows", "queries"), [(1, 9, 30), (7, 12, 60), (4, 5, 40)])
def test_queries_of_blocks_are_places_of_the_step(number, rows, queries, skipped):
    """Also with room for fewer rows than the step has."""
    step, _, tensors = drafter_step(12, number)
    mine, theirs = (empty_block(rows, queries, "cpu") for _ in range(2))
    numbers = step, tensors["tokens"], tensors["mapping"], 77, skipped
    launch_block_places(mine, *numbers)
    block_places_reference(theirs, *numbers)
    for field in fields(mine):
        assert torch.equal(getattr(mine, field.name), getattr(theirs, field.name)), field.name
    guessed = int(step.drafts[step.drafts > 0][:rows].sum())
    assert (theirs.run >= 0).sum() == guessed
    assert (theirs.ids == 77).sum() == theirs.query_start[-1] - (step.drafts > 0).sum().clamp(max=rows)
    guesses = drawn(17, rows * (number + 2), low=-1, high=99)
    ours = copy.deepcopy((step.state, tensors["tokens"]))
    chosen = Queries(theirs.token, theirs.run, theirs.slot, 1 - skipped)
    launch_put_drafts(*ours, guesses, chosen)
    put_drafts_reference(step.state, tensors["tokens"], guesses, chosen)
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
    launch_accept(mine.of_slots, ours, *numbers)
    accept_features_reference(held, step, *numbers)
    assert torch.equal(mine.of_slots, held.of_slots)
    assert torch.equal(ours.state.words, step.state.words)


def test_rows_of_a_drafter_without_features_get_drafts():
    step, _, runs = accepted(20, 3, 30)
    ours = copy.deepcopy(step)
    launch_accept(None, ours, None, runs)
    accept_reference(step, runs)
    assert torch.equal(ours.state.words, step.state.words)


@pytest.mark.parametrize("number", [1, 5, 8])
def test_survivals_follow_from_the_confidence_of_a_drafter(number):
    step, confidence = confidences(20, number)
    ours = copy.deepcopy(step)
    launch_take_confidence(ours, confidence)
    before = step.state.survivals.survivals.clone()
    take_confidence_reference(step, confidence)
    assert torch.equal(ours.state.survivals.survivals, step.state.survivals.survivals)
    changed = (before != step.state.survivals.survivals).any(1).nonzero().flatten()
    assert 3 < len(changed) < 20
    assert set(changed.tolist()) <= set(step.slots[step.drafts > 0].tolist())


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize(("groups", "group", "taps"), [(4, 16, 2), (33, 32, 3), (5, 1, 1)])
def test_convolutions_stay_inside_their_blocks(groups, group, taps, side):
    """Width 1,056 takes two programs a query."""
    x, delta, base, before = convolved_blocks(21, groups, group, taps, torch.float32)
    wanted = block_convolution_reference(x, delta, base, before, side)
    assert torch.allclose(launch_block_convolution(x, delta, base, before, side), wanted, atol=1e-5)
    first = before == 0
    alone = (base[side, 0] + delta.view(21, 2, taps, groups)[:, side, 0].repeat_interleave(group, 1)) * x
    assert torch.allclose(wanted[first], alone[first], atol=1e-5)
