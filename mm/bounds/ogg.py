"""Counts of an Ogg file: streams, names in their comments, packets of its first pages.

Pure functions, pool. In: the file's bytes. Out: what FFmpeg allocates to open it, at most. FFmpeg looks each comment up
among all others, and holds packets until it knows every stream. A comment's packet is found by the word it begins with:
the first 255 bytes of a packet stand together in one page.

    OggS .. lacing | OpusHead      OggS .. lacing | OpusTags vendor count name=value ..     OggS .. lacing | packets
"""

from __future__ import annotations

from mm.bounds.bounded import PACKET, allowed, promises, require, too_complex
from mm.errors import unsupported

MOST_COMMENTS = 1024
MOST_VENDOR = 239  # bytes of the name of the program that wrote the file: its end stands in the packet's first segment
MOST_STREAMS = 64
STREAM = 1 << 16  # bytes that FFmpeg takes for each, at most
HEADER = 27
_FIRST_PAGE = 2  # flag of a page that begins a stream
_BEGINNINGS = (b"OpusHead", b"\x01vorbis", b"\x7fFLAC", b"\x80theora", b"fishead\0")
_COMMENTS = (b"OpusTags", b"\x03vorbis", b"\x81theora")


def opening_bytes(data: bytes, probed: int) -> int:
    """What FFmpeg takes at most to open the file, holding `probed` bytes of packets. Raises MediaError."""
    streams = check_streams(data)
    for word in _COMMENTS:
        at = data.find(word)
        while at >= 0:
            check_comments(data, at + len(word))
            at = data.find(word, at + 1)
    packets = first_packets(data, probed)
    return require(streams * STREAM + packets * PACKET, len(data), "streams and smallest packets")


def check_streams(data: bytes) -> int:
    """How many streams begin, of kinds that Ogg files of sound and film hold."""
    streams, at = 0, data.find(b"OggS\0")
    while at >= 0:
        if at + HEADER < len(data) and data[at + 5] & _FIRST_PAGE:
            streams += 1
            start = at + HEADER + data[at + HEADER - 1]
            if streams > MOST_STREAMS:
                raise too_complex(f"the file has more than {MOST_STREAMS} streams")
            if not data.startswith(_BEGINNINGS, start):
                raise unsupported("the file holds a stream that is neither Opus, Vorbis nor FLAC; send one of these")
            if data.startswith(b"\x7fFLAC", start):
                check_flac(data, start)
        at = data.find(b"OggS\0", at + HEADER)
    return streams


def check_comments(data: bytes, at: int) -> None:
    """A vendor's name and a count, at a place."""
    vendor = int.from_bytes(data[at : at + 4], "little")
    if vendor > MOST_VENDOR:
        raise promises("bytes of the name of its writer", vendor, MOST_VENDOR)
    count = int.from_bytes(data[at + 4 + vendor : at + 8 + vendor], "little")
    if count > MOST_COMMENTS:
        raise too_complex(f"the file has {count} comments; at most {MOST_COMMENTS} are read, so send it without them")


def check_flac(data: bytes, start: int) -> None:
    """FLAC in Ogg: its comments are a packet without a word of its own, the first behind the stream's first page."""
    at = data.find(b"OggS\0", start)
    if at < 0 or at + HEADER >= len(data):
        return
    packet = at + HEADER + data[at + HEADER - 1]
    if data[packet : packet + 1] and data[packet] & 127 == 4:
        check_comments(data, packet + 4)


def first_packets(data: bytes, size: int) -> int:
    """Packets in the first so many bytes of them."""
    packets, at, most = 0, data.find(b"OggS\0"), allowed(len(data)) // PACKET
    while 0 <= at < len(data) - HEADER and size > 0 and packets <= most:
        lacing = data[at + HEADER : at + HEADER + data[at + HEADER - 1]]
        packets += len(lacing) - lacing.count(255)
        size -= sum(lacing)
        at = data.find(b"OggS\0", at + HEADER + len(lacing) + sum(lacing))
    return packets
