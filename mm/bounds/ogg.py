"""Counts of an Ogg file: streams, names in their comments, packets of its first pages.

Pure functions, pool. In: the file's bytes. Out: the most memory that FFmpeg allocates to open the file. FFmpeg searches
all comments for each comment, and buffers packets until it has identified every stream. This module finds the packet of
comments by its first word: the first 255 bytes of a packet are contiguous in one page.

    OggS .. lacing | OpusHead      OggS .. lacing | OpusTags vendor count name=value ..     OggS .. lacing | packets
"""

from __future__ import annotations

from mm.bounds.bounded import PACKET, allowed, promises, require, too_complex
from mm.errors import unsupported

MOST_COMMENTS = 1024
MOST_VENDOR = 239  # bytes of the vendor's name; the packet's first segment must hold all of it
MOST_STREAMS = 64
STREAM = 1 << 16  # bytes of memory that FFmpeg takes for each, at most
HEADER = 27
_FIRST_PAGE = 2  # flag of a page that begins a stream
_BEGINNINGS = (b"OpusHead", b"\x01vorbis", b"\x7fFLAC", b"\x80theora", b"fishead\0")
_COMMENTS = (b"OpusTags", b"\x03vorbis", b"\x81theora")


def opening_bytes(data: bytes, probed: int) -> int:
    """The most bytes that FFmpeg takes to open the file if it buffers `probed` bytes of packets. Raises MediaError."""
    streams = check_streams(data)
    for word in _COMMENTS:
        at = data.find(word)
        while at >= 0:
            check_comments(data, at + len(word))
            at = data.find(word, at + 1)
    packets = first_packets(data, probed)
    return require(streams * STREAM + packets * PACKET, len(data), "streams and smallest packets")


def check_streams(data: bytes) -> int:
    """Number of streams; raises MediaError for a stream of a kind that Ogg files of sound and film do not have."""
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
    """Check the vendor's name and the count of comments that begin at a place."""
    vendor = int.from_bytes(data[at : at + 4], "little")
    if vendor > MOST_VENDOR:
        raise promises("bytes of the name of its writer", vendor, MOST_VENDOR)
    count = int.from_bytes(data[at + 4 + vendor : at + 8 + vendor], "little")
    if count > MOST_COMMENTS:
        raise too_complex(f"the file has {count} comments; at most {MOST_COMMENTS} are read, so send it without them")


def check_flac(data: bytes, start: int) -> None:
    """FLAC in Ogg: the packet of comments has no word of its own; it is the first packet after the stream's
    first page.
    """
    at = data.find(b"OggS\0", start)
    if at < 0 or at + HEADER >= len(data):
        return
    packet = at + HEADER + data[at + HEADER - 1]
    if data[packet : packet + 1] and data[packet] & 127 == 4:
        check_comments(data, packet + 4)


def first_packets(data: bytes, size: int) -> int:
    """Number of packets in the first `size` bytes of packets."""
    packets, at, most = 0, data.find(b"OggS\0"), allowed(len(data)) // PACKET
    while 0 <= at < len(data) - HEADER and size > 0 and packets <= most:
        lacing = data[at + HEADER : at + HEADER + data[at + HEADER - 1]]
        packets += len(lacing) - lacing.count(255)
        size -= sum(lacing)
        at = data.find(b"OggS\0", at + HEADER + len(lacing) + sum(lacing))
    return packets
