"""The exchange of rows on devices against its reference, replayed and eager.

With one card all ranks are streams of that card, and their rooms lie in its memory: the kernels wait for each other in
the same way. With several cards each rank has a card.
"""

import random

import pytest
import torch

from engine.kernels.parallel.choice import await_logits, make_choice_rooms, send_logits
from engine.kernels.parallel.dealt_norm import (
    Parts,
    dealt_norm_reference,
    dealt_squares,
    dealt_squares_reference,
    normalise_dealt,
)
from engine.kernels.parallel.exchange import exchange_reference, launch_exchange
from engine.kernels.parallel.one_shot import CONSUME, PUBLISH, launch_one_shot
from engine.kernels.parallel.room import FAILED, RoomLayout, make_rooms
from engine.kernels.parallel.tokens import (
    send_guesses,
    send_slots,
    sent_guesses,
    sent_slots,
    take_guesses,
    take_guesses_reference,
    take_slots,
    take_slots_reference,
    words_of,
)
from engine.kernels.parallel.two_shot import PUSH, REDUCE, TAKE, launch_two_shot
from engine.kernels.step_tensors import empty_inputs, empty_slots

pytestmark = pytest.mark.gpu
WIDTH = 4096
SIZES = [1, 3, 64, 700]
PROGRAMS = 12  # of each rank: all ranks' programs are resident, even on one card


class Group:
    """Ranks with a stream, a room, and fixed tensors for graphs."""

    def __init__(self, ranks: int, rows: int) -> None:
        cards = torch.cuda.device_count()
        self.devices = [torch.device("cuda", rank % cards) for rank in range(ranks)]
        for card in self.devices:
            for other in self.devices:
                torch.zeros(8, device=card).to(other)  # torch opens peer access
        error = torch.zeros(1, dtype=torch.int32).pin_memory()
        layout = RoomLayout(ranks, rows, WIDTH, torch.bfloat16)
        self.rooms = make_rooms(layout, self.devices, error)
        self.streams = [torch.cuda.Stream(device) for device in self.devices]
        self.x = [torch.zeros(rows, WIDTH, device=device, dtype=torch.bfloat16) for device in self.devices]
        self.residual = [torch.zeros_like(x) for x in self.x]
        self.weight = [torch.rand(WIDTH, generator=torch.Generator().manual_seed(0)).to(d) for d in self.devices]
        self.out = [torch.zeros_like(x) for x in self.x]
        self.load()
        self.synchronise()

    def synchronise(self):
        for device in self.devices:
            torch.cuda.synchronize(device)

    def on(self, rank):
        return torch.cuda.stream(self.streams[rank])  # also makes the stream's device current

    def load(self):
        """Loads the kernels of whole launches on every rank: a module that is loaded behind a waiting kernel hangs."""
        for room in self.rooms:
            room.state()[FAILED] = 1  # nothing waits
        self.synchronise()
        layout, error = self.rooms[0].layout, self.rooms[0].error
        for rows in (1, layout.rows):
            for rank in range(len(self.rooms)):
                with self.on(rank):
                    self.launch(rank, rows)
                self.synchronise()
        fresh = make_rooms(layout, self.devices, error)
        for old, new in zip(self.rooms, fresh):
            old.memory.copy_(new.memory)
        self.synchronise()
        error.zero_()

    def launch(self, rank, rows):
        x, residual, out = (each[rank][:rows] for each in (self.x, self.residual, self.out))
        launch_exchange(self.rooms[rank], x, residual, self.weight[rank], 1e-6, out, PROGRAMS)

    def check(self, rows, run):
        """Draws partials, runs one exchange on every rank, and compares."""
        parts = [torch.randn(rows, WIDTH).bfloat16() for _ in self.rooms]
        residual = torch.randn(rows, WIDTH).bfloat16()
        for rank, part in enumerate(parts):
            self.x[rank][:rows].copy_(part)
            self.residual[rank][:rows].copy_(residual)
        self.synchronise()
        for rank in range(len(self.rooms)):
            with self.on(rank):
                run(rank)
        self.synchronise()
        want = exchange_reference(parts, residual, self.weight[0].cpu(), 1e-6)
        for rank in range(len(self.rooms)):
            assert torch.equal(self.residual[rank][:rows].cpu(), residual)
            torch.testing.assert_close(self.out[rank][:rows].cpu(), want, rtol=2e-2, atol=2e-2)
            assert torch.equal(self.out[rank][:rows].cpu(), self.out[0][:rows].cpu())
        assert self.rooms[0].error.item() == 0


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_replayed_and_eager_exchanges_in_any_order(ranks):
    torch.manual_seed(0)
    random.seed(0)
    group, graphs = Group(ranks, SIZES[-1]), {}
    for rank in range(ranks):
        for rows in SIZES[:-1]:
            graph = graphs[rank, rows] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=group.streams[rank]):
                group.launch(rank, rows)
    for _ in range(40):
        rows = random.choice(SIZES)
        if rows != SIZES[-1] and random.random() < 0.7:
            group.check(rows, lambda rank, size=rows: graphs[rank, size].replay())
        else:
            group.check(rows, lambda rank, size=rows: group.launch(rank, size))


@pytest.mark.parametrize(
    ("launch", "phases"), [(launch_one_shot, (PUBLISH, CONSUME)), (launch_two_shot, (PUSH, REDUCE, TAKE))]
)
def test_both_ways_phase_by_phase(launch, phases):
    error = torch.zeros(1, dtype=torch.int32).pin_memory()
    rooms = make_rooms(RoomLayout(2, 700, WIDTH, torch.bfloat16), ["cuda:0"] * 2, error)
    parts = [torch.randn(20, WIDTH, device="cuda").bfloat16() for _ in rooms]
    outs = []
    for phase in phases:
        outs = [launch(room, part, phases=phase) for room, part in zip(rooms, parts)]
    want = exchange_reference([part.cpu() for part in parts])
    for out in outs:
        assert torch.equal(out.cpu(), want)
    assert error.item() == 0


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_logits_reach_rank_0_and_its_tokens_the_other_ranks(num_drafts):
    """In one stream, in an order in which no kernel waits."""
    error = torch.zeros(1, dtype=torch.int32).pin_memory()
    rooms = make_choice_rooms(8 * words_of(num_drafts), 32, 32_000, torch.float32, ["cuda:0"] * 2, error)
    for rows in (8, 1, 5):
        logits = torch.randn(rows, 32_000)
        first, second = logits.cuda().tensor_split(2, 1)
        send_logits(rooms[1], second.contiguous(), first.shape[1])
        assert torch.equal(await_logits(rooms[0], first).cpu(), logits)
        own, others, want = (stepped(rows, num_drafts, device) for device in ("cuda", "cuda", "cpu"))
        own[0].token_ids.random_(99)
        for tensor in (own[1].words, own[1].drafts, own[1].survivals.survivals):
            tensor.random_(99)
        send_guesses(rooms[0], own[0])
        take_guesses(rooms[1], others[0])
        take_guesses_reference(sent_guesses(own[0]).cpu(), want[0])
        assert torch.equal(others[0].token_ids.cpu(), want[0].token_ids)
        send_slots(rooms[0], *own)
        take_slots(rooms[1], *others)
        take_slots_reference(sent_slots(*own).cpu(), *want)
        for one, other in zip((others[1].words, others[1].drafts), (want[1].words, want[1].drafts)):
            assert torch.equal(one.cpu(), other)
        assert torch.equal(others[1].survivals.survivals.cpu(), want[1].survivals.survivals)
    assert error.item() == 0


@pytest.mark.parametrize("rows", [1, 37])
@pytest.mark.parametrize("parts", [Parts((5120, 1024), (10240, 4096), 0, 2), Parts((4096,), (8192,), 1, 2)])
def test_norms_whose_sums_are_of_several_ranks(rows, parts):
    """A row's sums are those of the row alone, to the last bit."""
    torch.manual_seed(0)
    width, gated = sum(parts.widths), len(parts.widths) == 1
    x, gates = torch.randn(2, rows, width + 16, device="cuda").bfloat16()
    weights = [torch.randn(each, device="cuda") for each in parts.widths]
    wide, sums, want = x.double(), dealt_squares(x, parts), dealt_squares_reference(x.double(), parts)
    assert (sums - want).norm() / want.norm() < 1e-6
    assert torch.equal(dealt_squares(x[-1:], parts), sums[-1:])
    normalise_dealt(x, sums, weights, parts, 1e-5, gates if gated else None)
    dealt_norm_reference(wide, want, weights, parts, 1e-5, gates.double() if gated else None)
    assert (x.double() - wide).norm() / wide.norm() < 4e-3


def stepped(rows, num_drafts, device):
    """Inputs and slots of a step with so many rows, each with all its drafts."""
    inputs = empty_inputs(8, 64, 1, 1, device, max_lines=32 if num_drafts else 0)
    width, each = (num_drafts + 2 if num_drafts else 1), 1 + num_drafts
    lines = rows * each
    line = torch.arange(lines, device=device)
    inputs.sample_row[:lines] = (rows - 1 - line // each) * width + line % each
    inputs.sample_slot[:lines] = line // each
    inputs.sample_index[:lines] = 2 * line
    inputs.num_sampled.fill_(lines)
    return inputs, empty_slots(8, 4, 1, device, num_drafts)
