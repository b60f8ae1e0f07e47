"""DeviceMemory: the places of adapters on an accelerator, filled by one copy from pinned host memory.

Owner: Places (engine/lora/places.py), which fills a place on a thread of its own while no row uses the place. An
adapter is packed into pinned memory in the layout of a place once, and stays there until the room is needed. All memory
is allocated at start.

    packed adapter -> pinned room | values, words | --copy stream--> place      only the filling thread waits
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.base.errors import ConfigError
from engine.device.memory import gib
from engine.kernels.lora.matrices import PlaceMatrices, empty_matrices, place_size, rounded, word_of
from engine.layers.placed_device import DevicePlaces
from engine.lora.adapter import Adapter

if TYPE_CHECKING:
    from engine.device.accelerator import Accelerator


class Rooms:
    """Pinned memory for packed adapters. A thread allocates it during the start, because pinning takes 0.4 s per GB."""

    def __init__(self, accelerator: Accelerator, count: int, size: int) -> None:
        """`size`: bytes of a room."""
        self._accelerator, self._count, self._size = accelerator, count, size
        pool = ThreadPoolExecutor(1, "omniloop-pinned", accelerator.bind)
        self._made = pool.submit(self._make)
        pool.shutdown(wait=False)

    def _make(self) -> list[Tensor]:
        size, sets = self._size, groups(self._count, self._size)
        return [room for rooms in sets for room in self._accelerator.pinned_bytes(rooms * size).split(size)]

    def all(self) -> list[Tensor]:
        """The rooms, uint8 [size]; waits for the thread."""
        return self._made.result()


def groups(count: int, size: int) -> Iterator[int]:
    """How many rooms are allocated together, so that powers of two of bytes hold little more than the rooms."""
    while count:
        wanted = count * size
        power = 1 << (wanted - 1).bit_length()
        taken = count if 4 * wanted >= 3 * power else max(1, power // 2 // size)
        yield taken
        count -= taken


class DeviceMemory:
    """The places of a model's sites; a Memory."""

    def __init__(
        self, sites: Mapping[str, DevicePlaces], accelerator: Accelerator, matrices: PlaceMatrices, rooms: int
    ) -> None:
        """`rooms`: packed adapters in pinned memory."""
        self._sites, self._accelerator, self._matrices = sites, accelerator, matrices
        self._words = accelerator.pinned(2 * matrices.words.shape[1]).view(torch.int64)
        self._packed: OrderedDict[bytes, tuple[Tensor, Tensor]] = OrderedDict()  # hash -> values, words; newest last
        self._stream, self._copied = accelerator.side_stream(), accelerator.event()
        # Last: while the driver pins the first rooms, 0.2 s, it allocates no other pinned memory.
        self.rooms = Rooms(accelerator, rooms, matrices.values[0].nbytes)

    def fill(self, number: int, adapter: Adapter) -> None:
        self._accelerator.bind()
        values, words = self._found(adapter)
        self._words.copy_(words)
        with self._stream:
            self._matrices.values[number - 1, : len(values)].copy_(values, non_blocking=True)
            self._matrices.words[number - 1].copy_(self._words, non_blocking=True)
            self._copied.record()
        self._copied.synchronize()

    def _found(self, adapter: Adapter) -> tuple[Tensor, Tensor]:
        """The adapter in the layout of a place: values in pinned memory, words int64 [sites]."""
        found = self._packed.pop(adapter.sha256, None)
        if found is None:
            rooms = self.rooms.all()
            if len(self._packed) == len(rooms):
                _, (oldest, _) = self._packed.popitem(last=False)
                room = next(each for each in rooms if each.data_ptr() == oldest.data_ptr())
            else:
                room = rooms[len(self._packed)]
            found = self._pack(adapter, room.view(self._matrices.values.dtype))
        self._packed[adapter.sha256] = found
        return found

    def _pack(self, adapter: Adapter, room: Tensor) -> tuple[Tensor, Tensor]:
        words = torch.zeros(self._matrices.words.shape[1], dtype=torch.int64)
        offset = 0
        for path, matrices in adapter.sites.items():
            site = self._sites.get(path)
            assert site is not None, f"no place for {path}"
            shape, rank = site.shape, rounded(matrices.rank)
            assert rank <= self._matrices.max_rank, f"{path}: rank {matrices.rank}, a place's {self._matrices.max_rank}"
            words[shape.number] = word_of(offset, rank)
            middle = offset + shape.experts * rank * shape.pieces * shape.in_features
            end = middle + shape.experts * rank * shape.width
            a = room[offset:middle].view(shape.experts, shape.pieces, rank, -1)
            _put(a, matrices.a.unflatten(-2, (shape.pieces, -1)))
            start = 0
            b = room[middle:end].view(shape.experts, -1, rank)
            for piece, rows in zip(matrices.b, shape.out_features):
                _put(b[:, start : start + rows], piece)
                start += rows
            offset += shape.size(rank)
        return room[:offset], words


def _put(target: Tensor, matrix: Tensor) -> None:
    """Copies matrices into the first rows and columns of `target`; the rest becomes zero."""
    if target.shape[-2:] != matrix.shape[-2:]:
        target.zero_()
        target = target[..., : matrix.shape[-2], : matrix.shape[-1]]
    target.copy_(matrix)


def place_bytes(sites: Mapping[str, DevicePlaces], max_rank: int, dtype: torch.dtype) -> int:
    """Bytes of a place."""
    return place_size([site.shape for site in sites.values()], max_rank) * dtype.itemsize


def device_memory_of(
    sites: Mapping[str, DevicePlaces],
    accelerator: Accelerator,
    places: int,
    max_rank: int,
    dtype: torch.dtype,
    rooms: int,
) -> DeviceMemory:
    """Allocates the places and gives them to the sites. Raises ConfigError if the device has too little free memory."""
    each, free = place_bytes(sites, max_rank, dtype), accelerator.memory().free
    if each * places > free:
        raise ConfigError(
            f"--max-loras {places}: {places} places of {gib(each)} do not fit into {gib(free)} of free memory; at most "
            f"{free // each} fit, or set a lower --max-lora-rank or fewer --lora-target-modules"
        )
    shapes = [site.shape for site in sites.values()]
    matrices = empty_matrices(shapes, places, max_rank, dtype, accelerator.device)
    branch = accelerator.branch()
    for site in sites.values():
        site.place_in(matrices, branch)
    return DeviceMemory(sites, accelerator, matrices, rooms)
