"""Exchanges of rows and logits in Triton's interpreter: each phase runs on all ranks before the next."""

import random
from dataclasses import replace

import pytest
import torch
import triton.language as tl

from _fast.layout import SlotWord
from engine.kernels.parallel import choice as choice_file
from engine.kernels.parallel import room as rooms_file
from engine.kernels.parallel.choice import (
    await_logits,
    await_logits_reference,
    fetch_logits_reference,
    make_choice_rooms,
    send_logits,
    send_logits_reference,
)
from engine.kernels.parallel.exchange import exchange_reference, launch_exchange
from engine.kernels.parallel.one_shot import CONSUME, PUBLISH, launch_one_shot
from engine.kernels.parallel.room import EPOCH, FAILED, RoomLayout, make_rooms
from engine.kernels.parallel.two_shot import PUSH, REDUCE, TAKE, launch_two_shot
from engine.layers.norm import RMSNorm
from engine.parallel.device import DeviceGroup, Needs
from tests.engine.host_accelerator import HostAccelerator
from tests.kernels.accelerator.cases_interpreter_rank_tokens import stepped

WAYS = {launch_one_shot: (PUBLISH, CONSUME), launch_two_shot: (PUSH, REDUCE, TAKE)}
# The interpreter cuts float32 to bfloat16 instead of rounding; float16 has the same size and is rounded.
DTYPES = [torch.float32, torch.float16]


@pytest.fixture(autouse=True)
def little_one_shot(monkeypatch):
    """One-shot takes two rows of 48 float32 values."""
    monkeypatch.setattr(rooms_file, "ONE_SHOT_BYTES", {})
    monkeypatch.setattr(rooms_file, "ONE_SHOT_ELSE", 2 * 48 * 4)
    torch.manual_seed(0)


def made(ranks, rows, dtype=torch.float32, width=48, mapped=None):
    error = torch.zeros(1, dtype=torch.int32)
    return make_rooms(RoomLayout(ranks, rows, width, dtype), ["cpu"] * ranks, error, mapped)


def of_host(size):
    """Memory that all devices address."""
    return torch.zeros(size, dtype=torch.uint8)


def turns(room):
    """A view of the turns of the room's rows."""
    first, last = room.layout.offsets[:2]
    return room.memory[first:last].view(torch.int32)


def exchanged(rooms, launch, partials, residual=None, weight=None, programs=2):
    """Runs all phases -> each rank's residual, each rank's result."""
    residuals = [None if residual is None else residual.clone() for _ in rooms]
    for phase in WAYS[launch]:
        outs = [
            launch(room, part, rest, weight, 1e-6, programs=programs, phases=phase)
            for room, part, rest in zip(rooms, partials, residuals)
        ]
    return residuals, outs


def check(rooms, launch, rows, dtype, adds, norms):
    width = rooms[0].layout.width
    partials = [torch.randn(rows, width).to(dtype) for _ in rooms]
    partials[0][0, :3] = -0.0  # the mark of an empty place
    partials[-1][0, 1:4] = -0.0
    residual = torch.randn(rows, width).to(dtype) if adds else None
    weight = torch.rand(width) if norms else None
    residuals, outs = exchanged(rooms, launch, partials, residual, weight)
    want = exchange_reference(partials, residual, weight, 1e-6)
    for rest, out in zip(residuals, outs):
        if adds:
            assert torch.equal(rest, residual)
        assert torch.equal(out, outs[0])
        assert torch.allclose(out.float(), want.float(), atol=1e-6 if dtype == torch.float32 else 2e-3)


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", range(2, 9))
def test_both_ways_sum_in_rank_order(ranks, dtype):
    rooms = made(ranks, 11, dtype, width=40)
    check(rooms, launch_one_shot, 2, dtype, adds=True, norms=True)
    check(rooms, launch_two_shot, 2, dtype, adds=True, norms=ranks % 2 == 0)
    check(rooms, launch_two_shot, 11, dtype, adds=ranks % 2 == 1, norms=False)
    check(rooms, launch_one_shot, 1, dtype, adds=False, norms=False)


@pytest.mark.parametrize("rows", [3, 8, 9])
def test_rows_that_do_not_fill_their_batches(rows):
    rooms = made(3, 9)
    check(rooms, launch_two_shot, rows, torch.float32, adds=True, norms=True)
    check(rooms, launch_two_shot, 1, torch.float32, adds=True, norms=True)


def test_both_ways_have_the_same_bits():
    rooms = made(4, 8, torch.float16)
    partials, residual = [torch.randn(2, 48).half() for _ in rooms], torch.randn(2, 48).half()
    weight = torch.rand(48)
    one = exchanged(rooms, launch_one_shot, partials, residual, weight)
    two = exchanged(rooms, launch_two_shot, partials, residual, weight)
    for first, second in zip(one[0] + one[1], two[0] + two[1]):
        assert torch.equal(first, second)


@pytest.mark.parametrize("ranks", [2, 5])
def test_rooms_in_host_memory(ranks):
    rooms = made(ranks, 19, mapped=of_host)
    for _ in range(3):
        for launch, rows in ((launch_one_shot, 2), (launch_two_shot, 19)):
            check(rooms, launch, rows, torch.float32, True, True)
    assert not rooms[0].error.item()
    lost = [replace(room, polls=3) for room in made(ranks, 19, mapped=of_host)]
    launch_two_shot(lost[0], torch.ones(19, 48), programs=2)  # no other rank comes
    assert (lost[0].error.item(), int(lost[0].state()[FAILED])) == (1, 1)


def test_a_value_that_is_no_number_arrives_everywhere():
    for launch in WAYS:
        rooms, partials = made(2, 8), [torch.zeros(2, 48) for _ in range(2)]
        partials[1][1, 5], partials[0][0, 7] = float("nan"), float("inf")
        _, outs = exchanged(rooms, launch, partials)
        for out in outs:
            assert out[1, 5].isnan()
            assert out[0, 7].isinf()
            assert out.isfinite().sum() == 2 * 48 - 2


def walk(rounds):
    """Exchanges of random sizes, both ways; a rank may publish the next one before others have read the last."""
    random.seed(1)
    rooms = made(3, 6)
    for _ in range(rounds):
        rows = random.randint(1, 6)
        launch = launch_two_shot if rows > 2 else random.choice(list(WAYS))
        partials, residual = [torch.randn(rows, 48) for _ in rooms], torch.randn(rows, 48)
        residuals, _ = exchanged(rooms, launch, partials, residual, programs=random.randint(1, 3))
        exchange_reference(partials, residual)
        for rest in residuals:
            assert torch.equal(rest, residual)
        assert not rooms[0].error.item()


def test_areas_are_used_again():
    walk(12)


@pytest.mark.full
def test_areas_are_used_a_thousand_times():
    walk(1000)


def published_early():
    """Both ranks publish exchanges 0 to 2 before rank 1 reads exchange 0 -> rank 1's sums, their values, the rooms."""
    rooms = made(2, 8)
    parts = torch.randn(3, 2, 1, 48)  # [exchange, rank]
    got = []
    for number in range(3):
        launch_one_shot(rooms[1], parts[number, 1], phases=PUBLISH)
        turns(rooms[1])[0] = (number + 1) % rooms_file.TURNS
    turns(rooms[1])[0] = 0
    for number in range(3):
        launch_one_shot(rooms[0], parts[number, 0])
    for number in range(3):
        got.append(launch_one_shot(rooms[1], parts[number, 1], phases=CONSUME))
    return torch.stack(got), parts.sum(1), rooms


def test_an_area_holds_its_exchange_while_the_next_two_are_published():
    got, want, rooms = published_early()
    assert torch.equal(got, want)
    assert turns(rooms[0])[0] == turns(rooms[1])[0] == 0


def test_two_areas_in_place_of_three_are_found(monkeypatch):
    monkeypatch.setattr(rooms_file, "TURNS", 2)
    monkeypatch.setattr("engine.kernels.parallel.one_shot.T_TURNS", tl.constexpr(2))
    monkeypatch.setattr(rooms_file, "POLLS", 3)
    got, want, _ = published_early()
    assert not torch.equal(got, want)


@pytest.mark.parametrize("repeats", [False, True])
def test_a_counter_that_the_host_repeats_is_found(repeats):
    """A captured graph repeats every number of the host: its epoch has passed, and it does not wait for rank 1."""
    rooms = [replace(room, polls=3) for room in made(2, 8)]
    exchanged(rooms, launch_two_shot, [torch.ones(7, 48)] * 2)
    if repeats:
        rooms[0].state()[EPOCH] -= 1
    for phase in WAYS[launch_two_shot]:  # rank 1 does not come
        launch_two_shot(rooms[0], torch.ones(7, 48), phases=phase)
    assert rooms[0].error.item() == (not repeats)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_epochs_wrap_around():
    rooms = made(2, 8)
    for room in rooms:
        room.state()[EPOCH] = 2**31 - 2
        first, last = room.layout.offsets[1], room.layout.offsets[3]
        room.memory[first:last].view(torch.int32).fill_(2**31 - 2)
    for _ in range(3):
        check(rooms, launch_two_shot, 7, torch.float32, adds=True, norms=False)
        assert not rooms[0].error.item()
    assert rooms[0].state()[EPOCH] == -(2**31) + 1


@pytest.mark.parametrize("launch", WAYS)
def test_a_wait_in_vain_ends_and_is_reported(launch):
    rooms = [replace(room, polls=3) for room in made(2, 8)]
    for phase in WAYS[launch]:  # rank 1 does not come
        launch(rooms[0], torch.ones(2, 48), phases=phase)
    assert rooms[0].error.item() == 1
    assert rooms[0].state()[FAILED] == 1
    patient = replace(rooms[0], polls=1 << 30)  # the next exchange waits no more
    for phase in WAYS[launch]:
        launch(patient, torch.ones(2, 48), phases=phase)


def test_the_number_of_rows_decides_the_way(monkeypatch):
    rooms, taken = made(2, 8), []
    for launch in WAYS:
        monkeypatch.setattr(
            f"engine.kernels.parallel.exchange.{launch.__name__}", lambda *_, way=launch: taken.append(way)
        )
    for rows in (2, 3):
        launch_exchange(rooms[0], torch.ones(rows, 48))
    assert taken == list(WAYS)


def test_a_room_without_large_exchanges_has_no_areas_for_them():
    few, many = RoomLayout(2, 2, 48, torch.float32), RoomLayout(2, 3, 48, torch.float32)
    assert not few.has_large
    assert few.offsets[4] == few.offsets[5] == few.num_bytes
    assert many.num_bytes - many.offsets[4] >= (2 * many.own_rows + 3) * 48 * 4


@pytest.mark.parametrize(("ranks", "mapped"), [(2, None), (3, None), (8, None), (2, of_host), (3, of_host)])
def test_all_logits_reach_rank_0(ranks, mapped, monkeypatch):
    monkeypatch.setattr(choice_file, "BLOCK", 8)  # a row is several programs
    vocab, error = 13 * ranks - 3, torch.zeros(1, dtype=torch.int32)
    rooms = make_choice_rooms(8, 4, vocab, torch.float32, ["cpu"] * ranks, error, mapped)
    for number, rows in enumerate((3, 1, 4)):
        logits = torch.randn(rows, vocab)
        parts, whole = logits.tensor_split(ranks, 1), torch.zeros(4, vocab)
        for room, part in zip(rooms[1:], parts[1:]):
            column = vocab - sum(each.shape[1] for each in parts[room.rank :])
            send_logits(room, part.contiguous(), column)
            send_logits_reference(whole, part, column)
        assert torch.equal(await_logits(rooms[0], parts[0]), logits)
        assert torch.equal(fetch_logits_reference(whole, parts[0]), logits)
        assert torch.equal(await_logits_reference(whole, parts[0]), logits)
        for room in rooms:
            room.state()[EPOCH] = number + 1  # as after the tokens of this choice
    assert not error.item()


def test_logits_that_do_not_come_are_reported():
    error = torch.zeros(1, dtype=torch.int32)
    rooms = [replace(room, polls=3) for room in make_choice_rooms(8, 4, 10, torch.float32, ["cpu"] * 2, error)]
    await_logits(rooms[0], torch.zeros(1, 5))
    assert (error.item(), int(rooms[0].state()[FAILED])) == (1, 1)


def test_sums_of_squares_are_exchanged_in_rows_of_two():
    rooms = made(2, 20, width=2)
    partials = [torch.randn(20, 2) for _ in rooms]
    _, outs = exchanged(rooms, launch_one_shot, partials)
    assert torch.equal(outs[0], partials[0] + partials[1])


@pytest.mark.parametrize("mapped", [False, True])
def test_a_group_waits_for_no_rank_until_it_is_ready_and_begins_with_empty_rooms(mapped):
    kinds = (torch.float32, 48), (torch.float32, 2)
    group = DeviceGroup([HostAccelerator()] * 2, Needs(kinds, 9, 8, 16, 10, torch.float32), programs=2, mapped=mapped)
    norm = RMSNorm(48, 1e-6)
    norm.weight = torch.ones(48)
    for rows in (1, 9):  # both ways; a rank launches everything before the other begins
        for link in group.links:
            link.total(torch.ones(rows, 2))
            link.add_to(torch.ones(rows, 48), torch.ones(rows, 48))
            link.add_then(torch.ones(rows, 48), torch.ones(rows, 48), norm)
            link.gather(torch.ones(min(rows, 4), 5), 5 * group.links.index(link))
            inputs, slots = stepped(1, 0)
            link.share_guesses(inputs)
            link.share(inputs, slots)
    assert group.error.item() == 1
    group.ready()
    assert group.error.item() == 0
    fresh = DeviceGroup([HostAccelerator()] * 2, Needs(kinds, 9, 8, 16, 10, torch.float32), mapped=mapped)
    fresh.ready()
    for own, new in zip(group.memories(), fresh.memories(), strict=True):
        assert torch.equal(own, new)
    logits = torch.randn(3, 10)
    group.links[1].gather(logits[:, 5:], 5)
    assert torch.equal(group.links[0].gather(logits[:, :5], 0), logits)
    (inputs, slots), (others, other_slots) = stepped(1, 0), stepped(2, 0)
    group.links[0].share_guesses(inputs)
    group.links[1].share_guesses(others)
    assert torch.equal(inputs.token_ids[inputs.sample_index[:3]], others.token_ids[inputs.sample_index[:3]])
    group.links[0].share(inputs, slots)
    group.links[1].share(others, other_slots)
    newest = slots.word(SlotWord.LAST_TOKEN)
    assert torch.equal(other_slots.word(SlotWord.LAST_TOKEN)[inputs.sample_slot[:3]], newest[inputs.sample_slot[:3]])
    assert group.error.item() == 0
