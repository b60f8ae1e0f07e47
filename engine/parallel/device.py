"""DeviceGroup: the ranks of an engine that drives several devices, one for each rank.

Owner: the device thread; rank 0 is launched by it, every other rank by a thread that is bound to the rank's device and
stream. The kernels of the ranks wait for each other on the devices, with a limit of about ten seconds; a kernel that
has waited in vain sets an error word in pinned memory. Until `ready` no kernel waits: modules are loaded, memory is
allocated and products are timed then, which a kernel that waits for another device would block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.device.accelerator import Accelerator
from engine.kernels.parallel.choice import ChoiceRoom, await_logits, make_choice_rooms, send_logits
from engine.kernels.parallel.exchange import launch_exchange
from engine.kernels.parallel.room import FAILED, ExchangeRoom, RoomLayout, make_rooms
from engine.kernels.parallel.tokens import send_guesses, send_slots, take_guesses, take_slots
from engine.kernels.step_tensors import SlotTensors, StepInputs
from engine.layers.norm import Normed, RMSNorm
from engine.parallel.group import Group

Kind = tuple[torch.dtype, int]  # dtype and width of the rows that a room takes


@dataclass(frozen=True, slots=True)
class Needs:
    """The sizes of what ranks exchange."""

    kinds: tuple[Kind, ...]
    rows: int  # of the largest step
    words: int  # of slots that a choice changes
    lines: int  # of logits
    vocab: int
    dtype: torch.dtype  # of the logits


def room_bytes(ranks: int, needs: Needs) -> int:
    """Bytes of one rank's rooms for exchanges."""
    return sum(RoomLayout(ranks, needs.rows, width, dtype).num_bytes for dtype, width in needs.kinds)


class DeviceExchange:
    """A rank's Link."""

    def __init__(self, rooms: Mapping[Kind, ExchangeRoom], choice: ChoiceRoom, programs: int = 0) -> None:
        """`programs`: at most so many programs of an exchange, all resident; 0: one per unit of the device."""
        self._rooms, self._choice, self._programs = rooms, choice, programs

    def total(self, partial: Tensor) -> Tensor:
        return launch_exchange(self._room(partial), partial, programs=self._programs)

    def add_to(self, residual: Tensor, partial: Tensor) -> None:
        launch_exchange(self._room(partial), partial, residual, programs=self._programs)

    def add_then(self, residual: Tensor, partial: Tensor, norm: RMSNorm) -> Normed:
        room = self._room(partial)
        return Normed(None, launch_exchange(room, partial, residual, norm.weight, norm.eps, programs=self._programs))

    def gather(self, logits: Tensor, column: int) -> Tensor:
        if not self._choice.rank:
            return await_logits(self._choice, logits)
        send_logits(self._choice, logits.contiguous(), column)
        return logits

    def share(self, inputs: StepInputs, slots: SlotTensors) -> None:
        move = take_slots if self._choice.rank else send_slots
        move(self._choice, inputs, slots)

    def share_guesses(self, inputs: StepInputs) -> None:
        move = take_guesses if self._choice.rank else send_guesses
        move(self._choice, inputs)

    def _room(self, partial: Tensor) -> ExchangeRoom:
        return self._rooms[partial.dtype, partial.shape[1]]


class DeviceGroup(Group):
    """A device for each rank."""

    def __init__(
        self, accelerators: Sequence[Accelerator], needs: Needs, programs: int = 0, mapped: bool = False
    ) -> None:
        """`mapped`: the devices cannot address each other's memory, and exchange through the host's."""
        super().__init__(len(accelerators))
        self._accelerators = accelerators
        self.devices = [each.device for each in accelerators]
        memory = (lambda size: accelerators[0].pinned_bytes(size).zero_()) if mapped else None
        for one in () if mapped else self.devices:
            for other in self.devices:
                torch.zeros(8, device=one).to(other)  # torch opens the access of each device to the other's memory
        self.error = accelerators[0].pinned(1)  # not 0 after a kernel has waited in vain
        self._rooms = {
            (dtype, width): make_rooms(
                RoomLayout(self.ranks, needs.rows, width, dtype), self.devices, self.error, memory
            )
            for dtype, width in needs.kinds
        }
        sizes = needs.words, needs.lines, needs.vocab
        self._choice = make_choice_rooms(*sizes, needs.dtype, self.devices, self.error, memory)
        self.links = [
            DeviceExchange({kind: rooms[rank] for kind, rooms in self._rooms.items()}, self._choice[rank], programs)
            for rank in range(self.ranks)
        ]
        states = [room.state() for rooms in self._rooms.values() for room in rooms]
        for state in [*states, *(room.state() for room in self._choice)]:
            state[FAILED] = 1  # such a rank waits for no other

    def memories(self) -> list[Tensor]:
        """The rooms' memory, rank after rank within each kind."""
        rooms = [room.memory for rooms in self._rooms.values() for room in rooms]
        return [*rooms, *(room.memory for room in self._choice)]

    def exchange_bytes(self, rank: int) -> int:
        of_kinds = sum(rooms[rank].memory.nbytes for rooms in self._rooms.values())
        return of_kinds + self._choice[rank].memory.nbytes

    def enter(self, rank: int) -> None:
        self._accelerators[rank].enter()

    def ready(self) -> None:
        """Empties the rooms, because launches before wrote into them in any order; graphs hold their addresses."""
        self.synchronize()
        for rooms in self._rooms.values():
            for room, fresh in zip(rooms, make_rooms(rooms[0].layout, self.devices, self.error)):
                room.memory.copy_(fresh.memory)
        for choice in self._choice:
            choice.memory.zero_()
        self.synchronize()
        self.error.zero_()

    def synchronize(self) -> None:
        """Waits for all devices."""
        for accelerator in self._accelerators:
            accelerator.synchronize()

    def copies_of(self, tensor: Tensor) -> list[Tensor]:
        first, *others = self._accelerators
        for other in others:
            other.follow(first)
        return [tensor.to(device, non_blocking=True) for device in self.devices]

    def collect(self, parts: Sequence[Tensor]) -> Tensor:
        first, *others = self._accelerators
        for other in others:
            first.follow(other)
        return torch.cat([part.to(self.devices[0], non_blocking=True) for part in parts], -1)

    def fail(self) -> None:
        """Does nothing: the kernels of the other ranks end by themselves, and set the error word."""

    def renew(self, errors: list[BaseException]) -> BaseException:
        return errors[0]
