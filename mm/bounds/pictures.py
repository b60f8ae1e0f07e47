"""Bounds, for each format, of the work that a picture's header causes in Pillow before the picture's size is known.

Pure functions, pool. In: a file's bytes. Out: the bytes to open, or MediaError. The bytes to open have no animation,
profiles and texts: nothing in this project reads them, and Pillow would inflate, store and search them. The pixels' own
bytes are unchanged.

    PNG   IHDR iCCP zTXt acTL IDAT IDAT ..     texts, profiles and animation are dropped, thousands of IDAT become one
    GIF   comments image image ..              only the first image remains
    JPEG  APP0 APP1 .. SOS                     segments and EXIF are counted
    TIFF, WebP, AVIF                           directories, canvas, items and samples are counted
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator

from mm.bounds import iso
from mm.bounds.bounded import require, too_complex
from mm.bounds.directory import EXIF, check_directory, check_exif

MOST_SEGMENTS = 1024  # segments of a JPEG before its first scan
MOST_EXIF = 64  # segments of EXIF; Pillow joins each to the segments before it
MOST_CHUNKS = 1 << 15  # chunks of a PNG
MOST_PIECES = 256  # chunks of a PNG's pixels; more than these are joined
MOST_TEXT = 1 << 16  # bytes of a PNG's texts that are not compressed
AVIF_SAMPLE, AVIF_ITEM = 256, 1024  # bytes of memory that libavif takes for each, at most
_XMP = b"XML:com.adobe.xmp\0\0"  # uncompressed XMP, which may give the picture's orientation
_DROPPED = (b"iCCP", b"zTXt", b"acTL", b"fcTL", b"fdAT")


def bound_png(data: bytes) -> bytes:
    chunks: list[tuple[int, int]] = []  # (start, stop) of each chunk, with its size field and checksum
    pixels: list[tuple[int, int]] = []
    dropped, texts = False, 0
    for kind, start, stop in png_chunks(data):
        if kind == b"IDAT":
            if not pixels:
                chunks.append((start, -1))
            pixels.append((start, stop))
            continue
        if kind in (b"tEXt", b"iTXt"):
            texts += stop - start
            keeps = kind == b"tEXt" or data.startswith(_XMP, start)
            if texts > MOST_TEXT or not keeps:
                dropped = True
                continue
        elif kind in _DROPPED:
            dropped = True
            continue
        elif kind == b"eXIf":
            check_exif(data[start:stop])
        chunks.append((start, stop))
    if not dropped and len(pixels) <= MOST_PIECES:
        return data
    view = memoryview(data)
    joined = b"".join(view[start:stop] for start, stop in pixels)
    checksum = struct.pack(">I", zlib.crc32(joined, zlib.crc32(b"IDAT")))
    parts = [view[:8]]
    for start, stop in chunks:
        if stop < 0:
            parts += [memoryview(part) for part in (struct.pack(">I", len(joined)), b"IDAT", joined, checksum)]
        else:
            parts.append(view[start - 8 : stop + 4])
    return b"".join(parts)


def png_chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """(kind, where its content begins, where it ends) of each chunk. A truncated chunk is the last one."""
    at = 8
    for _ in range(MOST_CHUNKS):
        size, kind = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        if len(kind) < 4:
            return
        stop = min(at + 8 + size, len(data))
        yield kind, at + 8, stop
        at = stop + 4
    raise too_complex(f"the picture has more than {MOST_CHUNKS} chunks")


def bound_gif(data: bytes) -> bytes:
    """The file with only its first image and the graphic control extension of this image."""
    at = 13 + (3 << (data[10] & 7) + 1 if len(data) > 10 and data[10] & 128 else 0)
    head, control = data[:at], b""
    while at < len(data):
        start, mark = at, data[at]
        if mark == 0x2C and at + 10 < len(data):
            flags = data[at + 9]
            end = _blocks_end(data, at + 11 + (3 << (flags & 7) + 1 if flags & 128 else 0))
            return data if end >= len(data) - 1 and not control else head + control + data[start:end] + b";"
        if mark != 0x21:
            return data  # damaged; Pillow reports the damage
        at = _blocks_end(data, at + 2)
        if data[start + 1 : start + 2] == b"\xf9":
            control = data[start:at]
    return data


def _blocks_end(data: bytes, at: int) -> int:
    """The place after the empty block that ends a sequence of blocks."""
    size = len(data)
    while at < size and data[at]:
        at += data[at] + 1
    return min(at + 1, size)


def bound_jpeg(data: bytes) -> bytes:
    at, exif = 2, []
    for _ in range(MOST_SEGMENTS):
        at = data.find(b"\xff", at)  # like Pillow, skip bytes between segments
        if at < 0 or at + 4 > len(data) or data[at + 1] == 0xDA:
            break
        mark, size = data[at + 1], int.from_bytes(data[at + 2 : at + 4], "big")
        if mark in (0, 0xFF):
            at += 1
            continue
        if 0xD0 <= mark <= 0xD9 or mark == 1:
            at += 2
            continue
        if mark == 0xE1 and data.startswith(EXIF, at + 4):
            exif.append(data[at + 4 + len(EXIF) : at + 2 + size])
        elif mark == 0xE2 and data.startswith(b"MPF\0", at + 4):
            check_exif(data[at + 8 : at + 2 + size])
        at += 2 + size
    else:
        raise too_complex(f"the picture has more than {MOST_SEGMENTS} segments in front of its pixels")
    if len(exif) > MOST_EXIF:
        raise too_complex(f"the picture has more than {MOST_EXIF} segments of EXIF")
    if exif:
        check_exif(exif[0] if len(exif) == 1 else b"".join(exif))
    return data


def bound_tiff(data: bytes) -> bytes:
    check_directory(data)
    return data


def bound_webp(data: bytes) -> bytes:
    at = data.find(b"EXIF", 12)
    while at >= 0:
        check_exif(data[at + 8 : at + 8 + int.from_bytes(data[at + 4 : at + 8], "little")])
        at = data.find(b"EXIF", at + 4)
    return data


def bound_avif(data: bytes) -> bytes:
    counts = iso.Counts(data)
    samples = sum(track.samples for track in counts.tracks)
    require(samples * AVIF_SAMPLE + counts.items * AVIF_ITEM, len(data), f"{samples} samples and {counts.items} items")
    return data


PICTURES: dict[str, Callable[[bytes], bytes]] = {
    "png": bound_png, "gif": bound_gif, "jpeg": bound_jpeg, "tiff": bound_tiff, "webp": bound_webp, "avif": bound_avif
}  # fmt: skip
