"""Words of slots and guesses on their way to all ranks in Triton's interpreter: rank 0 launches before the others."""

from dataclasses import replace

import pytest
import torch
import triton  # noqa: F401 (must precede the import of any kernel file)

from _fast.layout import SLOT_WORDS, SlotWord
from engine.kernels.parallel import tokens as tokens_file
from engine.kernels.parallel.choice import make_choice_rooms
from engine.kernels.parallel.room import EPOCH, FAILED, PASSES
from engine.kernels.parallel.tokens import (
    SENT,
    send_guesses,
    send_guesses_reference,
    send_slots,
    send_slots_reference,
    sent_guesses,
    sent_slots,
    take_guesses,
    take_guesses_reference,
    take_slots,
    take_slots_reference,
    width_of,
    words_of,
)
from engine.kernels.step_tensors import empty_inputs, empty_slots

ROWS, TOKENS, SLOTS = 8, 32, 9


def of_host(size):
    """Memory that all devices address."""
    return torch.zeros(size, dtype=torch.uint8)


def stepped(seed, num_drafts, rows=3):
    """Random inputs and slots of a step in which `rows` rows of 8 choose tokens; places are those of seed 0."""
    draw, places = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(rows)
    lines = 16 if num_drafts else 0
    inputs = empty_inputs(ROWS, TOKENS, 1, 1, "cpu", max_lines=lines)
    slots = empty_slots(SLOTS, 4, 1, "cpu", num_drafts)
    for tensor, most in ((inputs.token_ids, 999), (slots.words, 1 << 20), (slots.drafts, 999)):
        tensor.copy_(torch.randint(-1, most, tensor.shape, generator=draw).clamp(min=0 if tensor.ndim == 1 else -1))
    slots.survivals.survivals.copy_(torch.randint(1, 1 << 15, slots.drafts.shape, generator=draw))
    chosen, own = torch.randperm(ROWS, generator=places)[:rows].sort().values, torch.randperm(SLOTS, generator=places)
    verified = torch.randint(0, num_drafts + 1, (rows,), generator=places)
    line, at = 0, 0
    for row, slot, drafts in zip(chosen.tolist(), own.tolist(), verified.tolist()):
        at += 2
        for place in range(1 + drafts):
            inputs.sample_row[line], inputs.sample_slot[line] = row * width_of(num_drafts) + place, slot
            inputs.sample_index[line] = at
            line, at = line + 1, at + 1
    inputs.num_sampled.fill_(line)
    inputs.sample_slot[line:] = SLOTS
    return inputs, slots


def rooms_of(ranks, num_drafts, mapped=None):
    error = torch.zeros(1, dtype=torch.int32)
    return make_choice_rooms(ROWS * words_of(num_drafts), 16, 10, torch.float32, ["cpu"] * ranks, error, mapped)


@pytest.mark.parametrize("num_drafts", [0, 1, 5])
@pytest.mark.parametrize(("ranks", "mapped"), [(2, None), (3, None), (8, None), (2, of_host)])
def test_the_words_of_rows_that_have_chosen_reach_all_slots(ranks, mapped, num_drafts, monkeypatch):
    monkeypatch.setattr(tokens_file, "BLOCK", 32)  # several rounds
    rooms = rooms_of(ranks, num_drafts, mapped)
    for number, rows in enumerate((3, 8 if num_drafts < 2 else 2, 1), 1):
        inputs, slots = stepped(number, num_drafts, rows)
        send_slots(rooms[0], inputs, slots)
        found = [room.memory.clone() for room in rooms]
        send_slots_reference(rooms, inputs, slots)
        assert all(torch.equal(room.memory, memory) for room, memory in zip(rooms, found))
        for room in rooms[1:]:
            made = [stepped(100 + room.rank, num_drafts, rows) for _ in range(2)]
            take_slots(room, *made[0])
            take_slots_reference(sent_slots(inputs, slots), *made[1])
            own, want = made[0][1], made[1][1]
            assert torch.equal(own.words, want.words)
            assert torch.equal(own.drafts, want.drafts)
            assert torch.equal(own.survivals.survivals, want.survivals.survivals)
            check_those_of_rank_0(inputs, own, slots, num_drafts)
    assert [int(room.state()[EPOCH]) for room in rooms] == [3] * ranks
    assert not rooms[0].error.item()


def check_those_of_rank_0(inputs, own, slots, num_drafts):
    """What the next prep reads of the chosen rows' slots is rank 0's, and nothing else."""
    chosen = inputs.sample_slot[: int(inputs.num_sampled)].unique().long()
    words = list(SENT if num_drafts else SENT[:1])
    others = [word for word in range(SLOT_WORDS) if word not in words]
    assert torch.equal(own.words[chosen][:, words], slots.words[chosen][:, words])
    assert (own.words[chosen][:, others] != slots.words[chosen][:, others]).any()
    assert torch.equal(own.drafts[chosen], slots.drafts[chosen])
    assert torch.equal(own.survivals.survivals[chosen], slots.survivals.survivals[chosen])
    rest = [slot for slot in range(SLOTS) if slot not in chosen.tolist()]
    if rest:
        assert (own.words[rest] != slots.words[rest]).any()


@pytest.mark.parametrize(("ranks", "mapped"), [(2, None), (5, None), (8, None), (2, of_host)])
def test_the_guesses_of_passes_reach_the_steps_of_all_ranks(ranks, mapped, monkeypatch):
    monkeypatch.setattr(tokens_file, "BLOCK", 4)  # several rounds
    rooms = rooms_of(ranks, 3, mapped)
    for number in (1, 2):
        inputs, _ = stepped(number, 3)
        send_guesses(rooms[0], inputs)
        found = [room.memory.clone() for room in rooms]
        send_guesses_reference(rooms, inputs)
        assert all(torch.equal(room.memory, memory) for room, memory in zip(rooms, found))
        for room in rooms[1:]:
            own, want = stepped(100 + room.rank, 3)[0], stepped(100 + room.rank, 3)[0]
            take_guesses(room, own)
            take_guesses_reference(sent_guesses(inputs), want)
            assert torch.equal(own.token_ids, want.token_ids)
            lines = inputs.sample_index[: int(inputs.num_sampled)]
            assert torch.equal(own.token_ids[lines], inputs.token_ids[lines])
            assert not torch.equal(own.token_ids, inputs.token_ids)
    assert [int(room.state()[PASSES]) for room in rooms] == [2] * ranks
    assert not rooms[0].error.item()


def test_a_rank_that_takes_a_pass_late_has_the_drafts_of_all_passes():
    """Rank 0 may launch its last pass before another rank has taken the first; that rank then takes both."""
    rooms = rooms_of(2, 3)
    inputs, _ = stepped(1, 3)
    for _ in range(2):
        inputs.token_ids[inputs.sample_index[1]] += 1
        send_guesses(rooms[0], inputs)
    own, _ = stepped(2, 3)
    lines = inputs.sample_index[: int(inputs.num_sampled)]
    for _ in range(2):
        take_guesses(rooms[1], own)
        assert torch.equal(own.token_ids[lines], inputs.token_ids[lines])
    assert not rooms[0].error.item()


def test_words_and_guesses_have_places_and_counts_of_their_own():
    rooms = rooms_of(2, 2)
    (inputs, slots), (others, other_slots) = stepped(1, 2), stepped(2, 2)
    send_guesses(rooms[0], inputs)
    send_slots(rooms[0], inputs, slots)
    take_slots(rooms[1], others, other_slots)
    take_guesses(rooms[1], others)
    check_those_of_rank_0(inputs, other_slots, slots, 2)
    lines = inputs.sample_index[: int(inputs.num_sampled)]
    assert torch.equal(others.token_ids[lines], inputs.token_ids[lines])


@pytest.mark.parametrize("taken", ["words", "guesses"])
def test_what_does_not_come_is_reported(taken):
    room = replace(rooms_of(2, 2)[1], polls=3)
    inputs, slots = stepped(1, 2)
    take_slots(room, inputs, slots) if taken == "words" else take_guesses(room, inputs)
    assert (room.error.item(), int(room.state()[FAILED])) == (1, 1)


def test_the_newest_token_alone_is_sent_on_a_server_without_drafts():
    inputs, slots = stepped(1, 0)
    rows, own = inputs.sample_row[:3].long(), inputs.sample_slot[:3].long()
    assert torch.equal(sent_slots(inputs, slots)[rows, 0], slots.word(SlotWord.LAST_TOKEN)[own])
