"""Small hostile sounds: tags, comments and pages that make a decoder take much memory or time; see bombs.py."""

from __future__ import annotations

import functools
import struct
import zlib

from tests.mm.bombs import MIB

# -- ID3, WAV, FLAC


def size7(value: int) -> bytes:
    return bytes(value >> shift & 127 for shift in (21, 14, 7, 0))


@functools.cache
def picture_frame(size: int) -> bytes:
    """An ID3v2.4 frame with a deflated picture."""
    packer = zlib.compressobj(9)
    picture = b"\0image/png\0\3\0"
    packed = packer.compress(picture)
    packed += b"".join(packer.compress(bytes(MIB)) for _ in range(size // MIB)) + packer.flush()
    return b"APIC" + size7(len(packed) + 4) + b"\0\x09" + size7(min(size + len(picture), (1 << 28) - 1)) + packed


def tag(*frames: bytes) -> bytes:
    content = b"".join(frames)
    return b"ID3\4\0\0" + size7(len(content)) + content


def mpeg_frames(count: int = 40) -> bytes:
    """Silence: MPEG-1 layer III, 128 kbit/s, 44,100 Hz."""
    return (b"\xff\xfb\x90\xc0" + bytes(413)) * count


def tagged_mp3(pictures: int, size: int) -> bytes:
    return tag(picture_frame(size) * pictures) + mpeg_frames()


def chunk(kind: bytes, data: bytes) -> bytes:
    return kind + struct.pack("<I", len(data)) + data + b"\0" * (len(data) & 1)


def tagged_wav(pictures: int, size: int) -> bytes:
    form = struct.pack("<HHIIHH", 1, 1, 16000, 32000, 2, 16)
    content = b"WAVE" + chunk(b"fmt ", form) + chunk(b"id3 ", tag(picture_frame(size) * pictures))
    content += chunk(b"data", bytes(3200))
    return b"RIFF" + struct.pack("<I", len(content)) + content


# -- Ogg


def page(segments: bytes, data: bytes, number: int, granule: int = 0, kind: int = 0) -> bytes:
    head = b"OggS\0" + bytes([kind]) + struct.pack("<qII", granule, 1, number) + bytes(4)
    return head + bytes([len(segments)]) + segments + data


def ogg_packets(pages: int, length: int = 0) -> bytes:
    """An Opus stream whose packets have `length` bytes each, 255 packets a page."""
    head = b"OpusHead\1\1" + struct.pack("<HIhB", 0, 48000, 0, 0)
    tags = b"OpusTags" + struct.pack("<II", 0, 0)
    found = [page(bytes([len(head)]), head, 0, 0, 2), page(bytes([len(tags)]), tags, 1)]
    found += [page(bytes([length]) * 255, b"\xf8" * (length * 255), 2 + at) for at in range(pages)]
    return b"".join(map(signed, found))


def comments(count: int) -> bytes:
    """A Vorbis comment block with `count` names."""
    entries = [b"%05x=" % at for at in range(count)]
    body = b"".join(struct.pack("<I", len(entry)) + entry for entry in entries)
    return struct.pack("<I", 0) + struct.pack("<I", count) + body


def commented_flac(count: int) -> bytes:
    info = struct.pack(">HH", 4096, 4096) + bytes(6) + (16000 << 44 | 15 << 36 | 4096).to_bytes(8, "big") + bytes(16)
    content = comments(count)
    return b"fLaC" + b"\0" + (34).to_bytes(3, "big") + info + b"\x84" + len(content).to_bytes(3, "big") + content


def crc(data: bytes) -> int:
    """The CRC of Ogg: not reflected, initial value 0."""
    value = 0
    for byte in data:
        value = (value << 8 & 0xFFFFFFFF) ^ CRC[value >> 24 ^ byte]
    return value


def _crc_entry(value: int) -> int:
    value <<= 24
    for _ in range(8):
        value = (value << 1 ^ (0x04C11DB7 if value >> 31 else 0)) & 0xFFFFFFFF
    return value


CRC = [_crc_entry(at) for at in range(256)]


def signed(data: bytes) -> bytes:
    """The page with its checksum filled in."""
    return data[:22] + struct.pack("<I", crc(data)) + data[26:]


def commented_opus(count: int) -> bytes:
    head = b"OpusHead\1\1" + struct.pack("<HIhB", 0, 48000, 0, 0)
    tags = b"OpusTags" + comments(count)
    found = [signed(page(bytes([len(head)]), head, 0, 0, 2))]
    number = 1
    while tags:
        piece, tags = tags[: 255 * 255], tags[255 * 255 :]
        segments = bytes([255]) * (len(piece) // 255)
        if len(segments) < 255:
            segments += bytes([len(piece) % 255])
        found.append(signed(page(segments, piece, number, 0, 1 if number > 1 else 0)))
        number += 1
    found.append(signed(page(bytes([1] * 50), b"\xf8" * 50, number, 48000, 4)))
    return b"".join(found)


def tagged_riff(count: int) -> bytes:
    form = struct.pack("<HHIIHH", 1, 1, 16000, 32000, 2, 16)
    names = b"".join(chunk(b"%04x" % at, b"v\0") for at in range(count))
    content = b"WAVE" + chunk(b"fmt ", form) + chunk(b"LIST", b"INFO" + names) + chunk(b"data", bytes(3200))
    return b"RIFF" + struct.pack("<I", len(content)) + content


def long_info(size: int) -> bytes:
    form = struct.pack("<HHIIHH", 1, 1, 16000, 32000, 2, 16)
    content = (
        b"WAVE" + chunk(b"fmt ", form) + b"LIST" + struct.pack("<I", size) + b"INFOINAM" + struct.pack("<I", size - 20)
    )
    content += bytes(1000)
    return b"RIFF" + struct.pack("<I", len(content)) + content


def ape_tagged_mp3(size: int) -> bytes:
    item = struct.pack("<II", size, 2) + b"Cover\0" + b"name\0"
    footer = b"APETAGEX" + struct.pack("<IIII", 2000, len(item) + 32, 1, 0) + bytes(8)
    return mpeg_frames() + item + footer
