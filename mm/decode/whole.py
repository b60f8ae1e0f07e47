"""Checks that a container is complete, by its own size fields, before any decoder runs.

Pure functions, pool. In: encoded bytes. Out: nothing, or MediaError if the container announces more bytes than the file
has: an answer about half a film would look like an answer about the whole film. Unset sizes (live WebM, piped WAV) are
not checked. MP3 has no total size, so a truncated MP3 file is a shorter sound.
"""

from __future__ import annotations

from mm.errors import MediaError, invalid

_OPEN_ENDED = 0x7FFFF000  # from this value on, a RIFF size means "unknown": streaming writers use it
_CHUNKS = 64  # most chunks of a WAV file that are examined; most files have two to four
_SEGMENT = b"\x18\x53\x80\x67"


def check_whole(data: bytes, file_format: str) -> None:
    """Raise MediaError if `data` ends before its container does."""
    if file_format == "wav":
        _check_riff(data)
    elif file_format in ("mp4", "m4a", "mov"):
        _check_boxes(data)
    elif file_format in ("webm", "mkv"):
        _check_segment(data)
    elif file_format == "ogg":
        _check_pages(data)


def cut_short() -> MediaError:
    return invalid("the file is cut short: it ends before its container does")


def flac_seconds(data: bytes) -> float:
    """Length in seconds from a FLAC file's first block (20 bits of rate, 36 bits of samples); 0 if the block gives no
    rate.
    """
    fields = int.from_bytes(data[18:26], "big")
    rate, total = fields >> 44, fields & ((1 << 36) - 1)
    return total / rate if rate else 0.0


def wav_seconds(data: bytes) -> float | None:
    """Length in seconds from a WAV file's chunks, or from the bytes after its last header; None if it gives no byte
    rate.
    """
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        return None
    position, rate = 12, 0  # rate: bytes per second
    for _ in range(_CHUNKS):
        kind, size = data[position : position + 4], int.from_bytes(data[position + 4 : position + 8], "little")
        position += 8
        if kind == b"fmt ":
            rate = int.from_bytes(data[position + 8 : position + 12], "little")
        elif kind == b"data":
            rest = len(data) - position
            return (size if 0 < size < rest else rest) / rate if rate else None
        position += size + size % 2
    return None


def _check_riff(data: bytes) -> None:
    promised = int.from_bytes(data[4:8], "little")
    if data[:4] == b"RIFF" and 0 < promised < _OPEN_ENDED and promised + 8 > len(data) + 1:
        raise cut_short()


def _check_boxes(data: bytes) -> None:
    """Walk the top-level boxes: 32-bit size, type, and a 64-bit size when the first is 1; 0 means to the end."""
    position, end = 0, len(data)
    kinds = set()
    while position + 8 <= end:
        size = int.from_bytes(data[position : position + 4], "big")
        kinds.add(data[position + 4 : position + 8])
        if size == 1:
            size = int.from_bytes(data[position + 8 : position + 16], "big")
        if size == 0:
            break
        if size < 8 or position + size > end:
            raise cut_short()
        position += size
    if b"moov" not in kinds:
        raise cut_short()


def _check_segment(data: bytes) -> None:
    """Walk an EBML header and one segment. The segment's size field has one byte more than its leading zero bits."""
    at = data.find(_SEGMENT, 0, 4096)
    if at < 0 or at + 5 > len(data):
        raise cut_short()
    start = at + 4
    width = 9 - data[start].bit_length()
    if width > 8:
        raise cut_short()
    field = int.from_bytes(data[start : start + width], "big")
    mask = (1 << (7 * width)) - 1
    size = field & mask
    if size != mask and start + width + size > len(data):  # all ones: unknown size
        raise cut_short()


def _check_pages(data: bytes) -> None:
    """Walk Ogg pages; the last one must end where the file does (trailing bytes that are no page are ignored)."""
    position, end = 0, len(data)
    while data[position : position + 4] == b"OggS":
        count_at = position + 26
        if count_at >= end:
            raise cut_short()
        lacing = data[count_at + 1 : count_at + 1 + data[count_at]]
        position = count_at + 1 + data[count_at] + sum(lacing)
        if position > end:
            raise cut_short()
