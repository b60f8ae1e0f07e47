"""Cuts tags off before a library sees them: ID3 and APE around MPEG sound, chunks of WAV, blocks of FLAC.

Pure functions, pool. In: a file's bytes. Out: the same sound without names, pictures and cue points. Nothing in this
project reads them, but FFmpeg would inflate the pictures of an ID3 tag, search all names for each name, and allocate as
many bytes as a name promises. Tags before, after and between the sound's own bytes are cut; these bytes do not change.

    ID3 | ID3 | frames | APE | TAG          RIFF: fmt LIST id3 data          fLaC: STREAMINFO comments pictures | frames
"""

from __future__ import annotations

import struct

from mm.bounds.bounded import too_complex
from mm.errors import MediaError, invalid

MOST_TAGS = 16
MOST_CHUNKS = 1024  # chunks of a WAV file
MOST_BLOCKS = 1024  # blocks of a FLAC file
_WAV_CHUNKS = frozenset((b"fmt ", b"data", b"ds64", b"fact"))
_LAST = 128  # flag of FLAC's last block


def damaged() -> MediaError:
    return invalid("the file is damaged or cut short: its header cannot be read")


def without_id3(data: bytes) -> bytes:
    """The MPEG sound without its tags."""
    at = 0
    for _ in range(MOST_TAGS):
        if data[at : at + 3] != b"ID3":
            break
        size = 0
        for byte in data[at + 6 : at + 10]:
            size = size << 7 | byte & 127
        at += 10 + size + (10 if at + 5 < len(data) and data[at + 5] & 16 else 0)  # with a footer
    else:
        raise too_complex(f"the file begins with more than {MOST_TAGS} ID3 tags; send it without them")
    end = len(data)
    for _ in range(MOST_TAGS):
        if data[max(at, end - 128) : end].startswith(b"TAG") and end - 128 >= at:
            end -= 128
        elif end - 32 >= at and data[end - 32 : end - 24] == b"APETAGEX":
            size, flags = struct.unpack("<I4xI", data[end - 20 : end - 8])
            end = max(at, end - max(32, size) - (32 if flags >> 31 else 0))
        else:
            break
    if at >= end:
        raise damaged()
    return data if end - at == len(data) else data[at:end]


def without_chunks(data: bytes) -> bytes:
    """A WAV file in which chunks other than format and samples are renamed, so that no reader knows them."""
    names, at, has_samples = [], 12, False
    for _ in range(MOST_CHUNKS):
        if at + 8 > len(data):
            break
        kind, size = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "little")
        if kind not in _WAV_CHUNKS:
            names.append(at)
        rest = len(data) - at - 8
        if kind == b"data" and not 0 < size < rest:  # streaming writers leave the size unset
            break
        if size > rest + 1:
            if has_samples:
                break
            raise damaged()
        has_samples = has_samples or kind == b"data"
        at += 8 + min(size, rest) + size % 2
    else:
        raise too_complex(f"the file has more than {MOST_CHUNKS} chunks")
    if not names:
        return data
    copy = bytearray(data)
    for at in names:
        copy[at : at + 4] = b"JUNK"
    return bytes(copy)


def without_blocks(data: bytes) -> bytes:
    """A FLAC file whose only metadata block is STREAMINFO."""
    at = 4
    for number in range(MOST_BLOCKS):
        if at + 4 > len(data):
            raise damaged()
        kind, size = data[at], int.from_bytes(data[at + 1 : at + 4], "big")
        at += 4 + size
        if kind & _LAST:
            if number == 0:
                return data
            first = 8 + int.from_bytes(data[5:8], "big")
            return data[:4] + bytes([data[4] | _LAST]) + data[5:first] + data[at:]
    raise too_complex(f"the file has more than {MOST_BLOCKS} blocks of metadata")
