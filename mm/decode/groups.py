"""Groups of pictures: which packets of a film hold its wanted frames, and which groups can be decoded by themselves.

Pure functions, pool. In: packets with their times, in decoding order, and the wanted times, ascending. Out: groups, and
parts: groups that follow each other and need no frame of the groups before them.

    packets  K p p p p K p p p p I p p p p      K: key frame that begins anew, I: key frame of an open group
    wanted   ^     ^     ^     ^     ^
    groups   |-------| |---------|-----|        a part: the first group; the others are the second part
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import av

Packets = Sequence[tuple[int, "av.Packet"]]  # with the time of each
Keys = Sequence[tuple[int, int]]  # (time, number) of each key packet, ascending by time

_UNITS, _SEI_BYTES = 64, 1024  # most NAL units examined per packet, and most bytes per SEI unit


@dataclass(frozen=True, slots=True)
class Group:
    """The packets from a key frame to the last wanted frame of its group."""

    start: int  # number of the key packet
    following: int  # index of the first wanted time after the group
    stop: int  # number of the packet after the last wanted frame's packet
    drains: bool  # whether so many packets after `stop` are skipped that draining the decoder is cheaper


@dataclass(frozen=True, slots=True)
class Part:
    """A range of wanted times that a decoder can serve without earlier packets, and the number of packets that it is
    fed.
    """

    first: int
    last: int  # exclusive
    num_packets: int


def find_keys(packets: Packets, codec: str, extradata: bytes | None, check: Callable[[], None]) -> Keys:
    """The key frames at which a decoder may start."""
    found = []
    for index, (time, packet) in enumerate(packets):
        if packet.is_keyframe:
            check()
            if not heals(memoryview(packet), codec, extradata or b""):
                found.append((time, index))
    return sorted(found)


def find_groups(packets: Packets, keys: Keys, wanted: Sequence[int], num_threads: int) -> list[Group]:
    """The groups that hold wanted frames. A decoder of `num_threads` threads returns a frame that many packets late."""
    key_times = [time for time, _ in keys]
    places = {time: index for index, (time, _) in enumerate(packets)}
    found: list[Group] = []
    last = len(wanted)
    following_start = 2 * len(packets)  # start of the group after this one; after the last group nothing has to be fed
    while last:
        at = bisect.bisect_right(key_times, wanted[last - 1]) - 1
        first = bisect.bisect_left(wanted, key_times[at]) if at >= 0 else 0
        start = keys[at][1] if at >= 0 else 0
        stop = max(places[time] for time in wanted[first:last]) + 1
        found.append(Group(start, last, stop, following_start - stop > num_threads))
        following_start, last = start, first
    return found[::-1]


def find_parts(packets: Packets, keys: Keys, wanted: Sequence[int], codec: str, extradata: bytes | None) -> list[Part]:
    """The wanted times, split before each group that begins anew."""
    found: list[Part] = []
    first = fed = following = 0
    for group in find_groups(packets, keys, wanted, 1):
        if following and begins_anew(memoryview(packets[group.start][1]), codec, extradata or b""):
            found.append(Part(first, following, fed))
            first, fed = following, 0
        fed += group.stop - group.start
        following = group.following
    return [*found, Part(first, following, fed)]


def begins_anew(packet: memoryview, codec: str, extradata: bytes) -> bool:
    """Whether frames from this key frame on, in display order, are predicted from no earlier frame.

    In H.264, this holds for IDR pictures: frames after the other key frames of a container may refer to frames before
    them. In HEVC it holds for IRAP pictures, in VP9 for key frames. False for other codecs, and for packets without
    lengths.
    """
    if codec == "h264" and extradata[:1] == b"\x01" and len(extradata) > 4:
        return any(unit[0] & 31 == 5 for unit in _units(packet, (extradata[4] & 3) + 1))
    if codec == "hevc" and extradata[:1] == b"\x01" and len(extradata) > 21:
        return any(16 <= unit[0] >> 1 & 63 <= 21 for unit in _units(packet, (extradata[21] & 3) + 1))
    if codec == "vp9" and len(packet):  # 2 bits marker, 2 profile, 1 show_existing_frame, 1 not a key frame
        return packet[0] & 0x30 != 0x30 and packet[0] & 0x0C == 0
    return False


def heals(packet: memoryview, codec: str, extradata: bytes) -> bool:
    """Whether a picture of H.264 starts a gradual refresh: containers mark the picture as a key frame, but the decoded
    frames are correct only some frames later."""
    if codec != "h264" or extradata[:1] != b"\x01" or len(extradata) < 5:
        return False
    return any(unit[0] & 31 == 6 and _is_gradual(unit) for unit in _units(packet, (extradata[4] & 3) + 1))


def _is_gradual(unit: memoryview) -> bool:
    """Whether a SEI unit holds a recovery point (payload type 6) at a later frame; the code of distance 0 is
    the bit 1.
    """
    data = bytes(unit[1:_SEI_BYTES]).replace(b"\0\0\3", b"\0\0")
    at = 0
    while at + 2 < len(data):
        numbers = []  # payload type and size; a byte of 255 is added to the byte that follows
        for _ in range(2):
            number = 0
            while at < len(data) and data[at] == 255:
                number, at = number + 255, at + 1
            numbers.append(number + (data[at] if at < len(data) else 0))
            at += 1
        if numbers[0] == 6:
            return at < len(data) and data[at] < 128
        at += numbers[1]
    return False


def _units(packet: memoryview, length_size: int) -> Iterator[memoryview]:
    """The first NAL units that are not empty; a length precedes each unit."""
    at = 0
    for _ in range(_UNITS):
        if at + length_size >= len(packet):
            return
        start = at + length_size
        at = start + int.from_bytes(packet[at:start], "big")
        if at > start:
            yield packet[start:at]
