"""ExchangeRoom: the memory of one rank that its peers write into, and the words that count its exchanges.

Owner: device thread. One plain allocation per rank, made at start, because peers cannot address memory of expandable
segments. If devices cannot address each other's memory at all, the rooms are MAPPED: pinned host memory, which every
device addresses over its bus. Kernels get the addresses of all ranks' rooms, in rank order; every room has the same
layout:

    state     int32 [STATE_WORDS]: EPOCH, ARRIVED, FAILED, FENCE (and PASSES: choice.py); only the own rank uses them
    turns     int32 [rows of an area]: the area that the row's next one-shot exchange takes; only the own rank uses them
    pushed    int32 [ranks, batches]: the epoch in which a rank pushed its partials of a batch
    gathered  int32 [batches]: the epoch in which the batch's sums were written here
    small     values [TURNS, ranks, small]: partials of one-shot exchanges; EMPTY wherever nothing has arrived
    partials  values [ranks, own rows, width]: partials of the rows that this rank sums in a two-shot exchange
    sums      values [rows, width]: sums of a two-shot exchange

Every row of one-shot exchanges has its own turn, so no program of a launch waits for another program of the launch. The
kernels advance all counters, so a captured graph can be replayed in any order with others and with eager launches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.target import tl, triton

MOST_RANKS = 8
# Areas of a row in one-shot exchanges. A rank is at most one exchange of the row before its peers. The third area
# separates a peer's stores from this rank's clearing stores, because the end of a kernel orders stores for this device
# only.
TURNS = 3
BATCH = 4  # rows of a two-shot exchange that share a flag
STATE_WORDS = 32
STATE = EPOCH, ARRIVED, FAILED, FENCE, PASSES = range(5)
# One-shot moves ranks / 2 times the bytes that two-shot moves in one direction, but waits only once.
ONE_SHOT_BYTES = {2: 4 << 20, 3: 512 << 10, 4: 1 << 20}  # the largest one-shot exchange by number of ranks
ONE_SHOT_ELSE = 256 << 10
POLLS = 20_000_000  # a poll takes about 0.5 us, so a kernel waits about ten seconds for a peer
ALIGNED = 256  # bytes to which areas are aligned


@dataclass(frozen=True, slots=True)
class RoomLayout:
    """Byte offsets of a room's areas, equal on every rank."""

    ranks: int
    rows: int  # of the largest exchange
    width: int
    dtype: torch.dtype

    @property
    def small(self) -> int:
        """Values of the largest one-shot exchange: a multiple of the width."""
        most = ONE_SHOT_BYTES.get(self.ranks, ONE_SHOT_ELSE) // (self.width * self.dtype.itemsize)
        return min(self.rows, max(1, most)) * self.width

    @property
    def batches(self) -> int:
        """Batches of the largest two-shot exchange."""
        return -(-self.rows // BATCH)

    @property
    def own_rows(self) -> int:
        """Rows that a rank sums in the largest two-shot exchange."""
        return -(-self.batches // self.ranks) * BATCH

    @property
    def offsets(self) -> tuple[int, int, int, int, int, int]:
        """Offsets of turns, pushed, gathered, small, partials and sums."""
        return self._bounds()[:6]

    @property
    def num_bytes(self) -> int:
        """Bytes of a room."""
        return self._bounds()[6]

    @property
    def has_large(self) -> bool:
        """Whether exchanges are possible that one-shot does not take."""
        return self.rows * self.width > self.small

    def _bounds(self) -> tuple[int, int, int, int, int, int, int]:
        large, size = self.has_large, self.dtype.itemsize
        areas = [
            4 * STATE_WORDS,
            4 * (self.small // self.width),
            4 * self.ranks * self.batches,
            4 * self.batches,
            TURNS * self.ranks * self.small * size,
            self.ranks * self.own_rows * self.width * size * large,
            self.rows * self.width * size * large,
        ]
        ends = [0]
        for area in areas:
            ends.append(ends[-1] + -(-area // ALIGNED) * ALIGNED)
        _, turns, pushed, gathered, small, partials, sums, end = ends
        return turns, pushed, gathered, small, partials, sums, end


@dataclass(frozen=True, slots=True, eq=False)
class ExchangeRoom:
    """One rank's room, and what its kernels need to reach the other rooms."""

    layout: RoomLayout
    rank: int
    memory: Tensor  # uint8 [layout.num_bytes]
    addresses: tuple[int, ...]  # of all ranks' rooms as this rank addresses them, in rank order
    error: Tensor  # int32 [1] that the host can read: not 0 after a kernel has waited in vain
    polls: int = POLLS
    mapped: bool = False  # the rooms are host memory

    def state(self) -> Tensor:
        """A view of the counters, int32 [STATE_WORDS]."""
        return self.memory[: 4 * STATE_WORDS].view(torch.int32)


def make_rooms(
    layout: RoomLayout,
    devices: Sequence[torch.device | str],
    error: Tensor,
    mapped: Callable[[int], Tensor] | None = None,
) -> list[ExchangeRoom]:
    """Make the rooms of all ranks, empty; `mapped`: bytes -> zeroed uint8 in host memory that all devices address, if
    the devices cannot address each other's memory."""
    memories = memories_of(layout.num_bytes, devices, mapped)
    small, first = layout.offsets[3:5]
    signed = {2: torch.int16, 4: torch.int32}[layout.dtype.itemsize]
    for memory in memories:
        assert memory.data_ptr() % 16 == 0, "vectors of 16 bytes"
        memory[small:first].view(signed).fill_(torch.iinfo(signed).min)
    addresses = tuple(memory.data_ptr() for memory in memories)
    polls = polls_of(mapped)
    return [
        ExchangeRoom(layout, rank, memory, addresses, error, polls, mapped is not None)
        for rank, memory in enumerate(memories)
    ]


def memories_of(
    size: int, devices: Sequence[torch.device | str], mapped: Callable[[int], Tensor] | None
) -> list[Tensor]:
    """Zeroed uint8 [size] for each rank."""
    return [
        torch.zeros(size, dtype=torch.uint8, device=device) if mapped is None else mapped(size) for device in devices
    ]


def polls_of(mapped: object) -> int:
    """Polls of about ten seconds; over the bus a poll takes longer."""
    return POLLS if mapped is None else POLLS // 4


T_EPOCH, T_ARRIVED, T_FAILED, T_FENCE, T_PASSES = (tl.constexpr(word) for word in STATE)
T_TURNS = tl.constexpr(TURNS)


@triton.jit
def words_at(address, offset, BITS: tl.constexpr):
    """A pointer to integers of BITS bits, `offset` bytes after an address; areas begin at multiples of ALIGNED."""
    kind: tl.constexpr = tl.int16 if BITS == 16 else tl.int32
    return tl.multiple_of((address + offset).to(tl.pointer_type(kind)), 16)


@triton.jit
def take_words(at, inside, polls, PTX: tl.constexpr, BITS: tl.constexpr):
    """Load words from the own room until none of them is empty -> (words, 1 if polls ran out).

    Empty is -0.0: the smallest integer. Every word is its own flag, so the order in which words arrive is irrelevant.
    """
    empty: tl.constexpr = -32768 if BITS == 16 else -2147483648
    fresh: tl.constexpr = "" if PTX else ".cv"  # PTX has no cache operators for volatile loads, and needs none
    words = tl.load(at, mask=inside, other=0, volatile=True, cache_modifier=fresh)
    tries = 0
    while (tl.max((words == empty).to(tl.int32), 0) > 0) & (tries < polls):
        words = tl.load(at, mask=inside, other=0, volatile=True, cache_modifier=fresh)
        tries += 1
    return words, (tl.max((words == empty).to(tl.int32), 0) > 0).to(tl.int32)


@triton.jit
def wait_flag(flag, epoch, polls, state, MAPPED: tl.constexpr):
    """Wait until a flag of the own room has reached `epoch` -> 1 if polls ran out. Epochs may wrap around."""
    tries = 0
    if MAPPED:  # over the bus an atomic addition is a load and a store, which could undo the peer's store
        late = tl.load(flag, volatile=True) - epoch < 0
        while late & (tries < polls):
            late = tl.load(flag, volatile=True) - epoch < 0
            tries += 1
        tl.atomic_add(state + T_FENCE, 0, sem="acquire", scope="sys")  # orders later loads behind the flag
    else:
        late = tl.atomic_add(flag, 0, sem="acquire", scope="sys") - epoch < 0
        while late & (tries < polls):
            late = tl.atomic_add(flag, 0, sem="acquire", scope="sys") - epoch < 0
            tries += 1
    tl.debug_barrier()  # all threads of the program read behind the flag
    return late.to(tl.int32)


@triton.jit
def raise_flag(flag, epoch):
    """Publish everything that the program has stored, then set a flag of a peer's room."""
    tl.debug_barrier()
    tl.atomic_xchg(flag, epoch, sem="release", scope="sys")


@triton.jit
def report(state, error, failed):
    """Note that a peer did not come; later exchanges of this rank then wait for no peer."""
    if failed > 0:
        tl.store(state + T_FAILED, 1)
        tl.store(error.to(tl.pointer_type(tl.int32)), 1)


@triton.jit
def is_last(state):
    """True in the last program of the launch to call, which then advances a counter."""
    tl.debug_barrier()
    return tl.atomic_add(state + T_ARRIVED, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1


@triton.jit
def write_row(out, scale, total, row, width, eps, NORM: tl.constexpr, BLOCK: tl.constexpr):
    """Write a row, float32 [BLOCK], or its norm; `scale`: of the norm, float32 [BLOCK]."""
    column = tl.arange(0, BLOCK)
    if NORM:
        total = total * (1.0 / tl.sqrt_rn(tl.sum(total * total, 0) / width + eps)) * scale
    tl.store(out + row * width + column, total.to(out.dtype.element_ty), mask=column < width)


@triton.jit
def scale_of(weight, width, NORM: tl.constexpr, BLOCK: tl.constexpr):
    """A norm's weights, float32 [BLOCK]; they may be read before the previous kernel has ended."""
    column = tl.arange(0, BLOCK)
    if NORM:
        return tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    else:
        return tl.zeros([BLOCK], tl.float32)
