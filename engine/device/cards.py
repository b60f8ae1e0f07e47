"""The cards of an engine with several ranks, and what they must have in common.

Thread: device, at start. In: the cards as torch names them, and variables that change how the driver works. Out: a
ConfigError in one line if the ranks could not work together: they wait for each other on the devices, and each has the
same part of everything.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from engine.base.errors import ConfigError
from engine.device.memory import gib

FLAG = "--tensor-parallel-size"
DRIVER = "libcuda.so.1"
NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
COPIED = 256 << 20  # bytes of a timed copy
LEAST_FREE = 0.9  # of the free memory of the card that has most


@dataclass(frozen=True, slots=True)
class Card:
    """One device."""

    name: str
    free: int  # bytes
    unreached: tuple[int, ...] = ()  # numbers of the other cards whose memory this card cannot address


def cards_of(ranks: int) -> list[Card]:
    """The first `ranks` cards, or fewer if there are fewer."""
    numbers = range(min(ranks, torch.cuda.device_count()))
    return [
        Card(
            torch.cuda.get_device_name(number),
            torch.cuda.mem_get_info(number)[0],
            tuple(to for to in numbers if to != number and not torch.cuda.can_device_access_peer(number, to)),
        )
        for number in numbers
    ]


def check_cards(
    ranks: int, cards: Sequence[Card], variables: Mapping[str, str], require_peer_access: bool = False
) -> None:
    """Raises ConfigError if `ranks` ranks cannot run on these cards; `variables`: of the process's environment."""
    said = f"{FLAG} {ranks}"
    if len(cards) < ranks:
        raise ConfigError(f"{said}: this process sees {len(cards)} GPUs; possible: 1 to {len(cards)}")
    kinds = list(dict.fromkeys(card.name for card in cards))
    if len(kinds) > 1:
        raise ConfigError(
            f"{said}: the GPUs are of different kinds ({', '.join(kinds)}), and every rank has the same part; choose "
            "GPUs of one kind with CUDA_VISIBLE_DEVICES"
        )
    most = max(card.free for card in cards)
    for number, card in enumerate(cards):
        if card.free < LEAST_FREE * most:
            raise ConfigError(
                f"{said}: GPU {number} has {gib(card.free)} free, another {gib(most)}; every GPU needs at least "
                f"{LEAST_FREE:.0%} of the most: end the processes that use it, or choose others with "
                "CUDA_VISIBLE_DEVICES"
            )
        if card.unreached and require_peer_access:
            raise ConfigError(
                f"--require-peer-access: GPU {number} cannot address the memory of GPU {card.unreached[0]}; choose "
                "GPUs with peer access (nvidia-smi topo -p2p r), or leave the flag out: sums then pass host memory"
            )
    if variables.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        raise ConfigError(
            f"{said}: with CUDA_LAUNCH_BLOCKING={variables['CUDA_LAUNCH_BLOCKING']} a launch waits for its kernel, "
            "and kernels of several GPUs wait for each other; unset it"
        )
    for name, value in variables.items():
        if "expandable_segments:true" in value.replace(" ", "").lower():
            raise ConfigError(
                f"{said}: {name} has expandable_segments:True, whose memory other GPUs cannot address; leave it out"
            )


def detour_line(cards: Sequence[Card]) -> str:
    """The warning of a start whose cards cannot address each other's memory; "": they can."""
    pairs = [(number, card.unreached[0]) for number, card in enumerate(cards) if card.unreached]
    if not pairs:
        return ""
    return (
        f"GPU {pairs[0][0]} cannot address the memory of GPU {pairs[0][1]}: sums of ranks go through host memory. "
        "Each of a layer's two sums takes about 10 us instead of 2, and long prompts take the time of the bus; "
        "--require-peer-access refuses this"
    )


def ranks_line(devices: Sequence[torch.device], room_bytes: int) -> str:
    """One line for the log of a start: the ranks' cards, and how fast one copies from another."""
    kinds = " and ".join(dict.fromkeys(torch.cuda.get_device_name(device) for device in devices))
    line = f"{len(devices)} ranks on {len(set(devices))} x {kinds}, {gib(room_bytes)} for exchanges on each"
    if len(set(devices)) == 1:
        return line
    rate = peer_rate(devices[0], devices[1]) / 1e9
    return f"{line}; a copy between GPU 0 and 1 runs at {rate:.0f} GB/s {link_between(0, 1)}".rstrip()


def link_between(one: int, other: int) -> str:
    """Words for the link between two cards: over NVLink cards have atomic operations on each other's memory."""
    found = ctypes.c_int()
    with contextlib.suppress(OSError, AttributeError):  # a build for AMD's cards
        if not ctypes.CDLL(DRIVER).cuDeviceGetP2PAttribute(ctypes.byref(found), NATIVE_ATOMICS, one, other):
            return "over NVLink" if found.value else "over PCIe"
    return ""


def peer_rate(one: torch.device, other: torch.device) -> float:
    """Bytes per second of a copy from a device to another, one way."""
    source = torch.empty(COPIED, dtype=torch.uint8, device=one)
    target = torch.empty(COPIED, dtype=torch.uint8, device=other)
    for _ in range(2):  # the first copy opens the access
        torch.cuda.synchronize(one)
        begun = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize(one)
        took = time.perf_counter() - begun
    return COPIED / took
