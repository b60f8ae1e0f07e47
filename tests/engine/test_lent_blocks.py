"""Pinned blocks that pictures are decoded into: whose they are, and when they may be written again."""

import gc

import numpy as np
import pytest
import torch

from engine.step.lent_blocks import SMALLEST, LentBlocks


class Copied:
    """An event that fires when told."""

    def __init__(self) -> None:
        self.fired, self.lost = True, False

    def record(self) -> None:
        self.fired = False

    def query(self) -> bool:
        if self.lost:
            raise RuntimeError("the device is lost")
        return self.fired


class Device:
    """Stands where an accelerator would."""

    def __init__(self) -> None:
        self.events: list[Copied] = []

    def pinned(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int32)

    def event(self) -> Copied:
        self.events.append(Copied())
        return self.events[-1]


@pytest.fixture
def device() -> Device:
    return Device()


def blocks_of(device: Device, count: int) -> LentBlocks:
    return LentBlocks(device, 2 * SMALLEST, count)


def place(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def test_a_block_is_lent_to_one_until_its_last_array_is_gone(device):
    blocks = blocks_of(device, 2)
    first, second = blocks.lend(2 * SMALLEST), blocks.lend(SMALLEST)
    assert (len(first), len(second)) == (2 * SMALLEST, SMALLEST)
    assert blocks.num_lent == 2
    assert not np.shares_memory(first, second)
    assert blocks.lend(SMALLEST) is None
    view, where = second.reshape(-1, 4)[None, 1:], place(second)
    del second
    gc.collect()
    assert blocks.lend(SMALLEST) is None
    del view
    assert blocks.num_lent == 1
    assert place(blocks.lend(SMALLEST)) == where


@pytest.mark.parametrize("size", [0, 1, SMALLEST - 1, 2 * SMALLEST + 1])
def test_what_does_not_suit_is_not_lent(device, size):
    assert blocks_of(device, 1).lend(size) is None


def test_a_block_is_written_again_only_after_its_copy(device):
    blocks = blocks_of(device, 2)
    room = blocks.lend(SMALLEST)
    room[:] = 7
    where, target = place(room), torch.zeros(SMALLEST, dtype=torch.uint8)
    assert blocks.send(room, target)
    assert bool((target == 7).all())
    del room
    other = blocks.lend(SMALLEST)
    assert place(other) != where
    assert blocks.lend(SMALLEST) is None
    for event in device.events:
        event.fired = True
    assert place(blocks.lend(SMALLEST)) == where


def test_other_memory_is_not_sent(device):
    blocks = blocks_of(device, 1)
    target = torch.zeros(8, dtype=torch.uint8)
    assert not blocks.send(np.ones(8, np.uint8), target)
    room = blocks.lend(SMALLEST)
    assert not blocks.send(room[8:16], target)
    assert not target.any()


def test_a_lost_device_lends_nothing(device):
    blocks = blocks_of(device, 1)
    device.events[0].lost = True
    assert blocks.lend(SMALLEST) is None
    device.events[0].lost = False
    assert blocks.lend(SMALLEST) is not None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")
def test_a_real_device_copies_from_where_the_pixels_lie():
    from engine.device import Accelerator

    accelerator = Accelerator("cuda:0")
    blocks = LentBlocks(accelerator, 2 * SMALLEST, 2)
    room = blocks.lend(2 * SMALLEST)
    wanted = np.random.default_rng(0).integers(0, 256, len(room), np.uint8)
    room[:] = wanted
    where, target = place(room), torch.empty(len(room), dtype=torch.uint8, device="cuda")
    torch.cuda._sleep(200_000_000)  # a tenth of a second: the copy waits behind it
    assert blocks.send(room, target)
    del room
    other = blocks.lend(SMALLEST)
    assert place(other) != where
    assert blocks.lend(SMALLEST) is None
    torch.cuda.synchronize()
    assert place(blocks.lend(SMALLEST)) == where
    np.testing.assert_array_equal(target.cpu().numpy(), wanted)
