"""Small hostile pictures: texts, directories and frames that make a decoder take much memory or time; see bombs.py."""

from __future__ import annotations

import struct
import zlib

from tests.mm.bombs import box, chunks, film_entry, full, movie, sizes, times, track, u32


def gif_frames(count: int) -> bytes:
    head = b"GIF89a" + struct.pack("<HHBBB", 16, 16, 0x80, 0, 0) + bytes(6)
    frame = b"," + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\2\2\x44\1\0"
    return head + frame * count + b";"


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *before: bytes, pieces: int = 1) -> bytes:
    """A black RGB picture: the chunks `before`, then its pixels, split into `pieces` IDAT chunks."""
    packer = zlib.compressobj(9)
    row = bytes(1 + 3 * width)
    packed = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    size = max(1, -(-len(packed) // pieces))
    parts = [png_chunk(b"IDAT", packed[at : at + size]) for at in range(0, len(packed), size)]
    head = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(before) + b"".join(parts) + png_chunk(b"IEND", b"")


def texts(count: int, size: int = 1_000_000) -> bytes:
    """A PNG with deflated text chunks."""
    packed = zlib.compress(b"a" * size, 9)
    return png(16, 16, *(png_chunk(b"zTXt", b"k%d\0\0" % at + packed) for at in range(count)))


def directory(entries: int, size: int, room: int, kind: int = 7) -> bytes:
    """A TIFF directory whose entries all point at the same bytes."""
    values = size // {7: 1, 3: 2, 5: 8}[kind]
    listed = b"".join(struct.pack("<HHII", 1000 + at, kind, values, 8) for at in range(entries))
    return b"II*\0" + struct.pack("<I", 8 + room) + bytes(room) + struct.pack("<H", entries) + listed + bytes(4)


def jpeg(*segments: bytes) -> bytes:
    """A small JPEG with the given segments right after its first marker."""
    import io

    from PIL import Image

    out = io.BytesIO()
    Image.new("RGB", (16, 16)).save(out, "JPEG")
    return out.getvalue()[:2] + b"".join(segments) + out.getvalue()[2:]


def segment(mark: int, data: bytes) -> bytes:
    return bytes([255, mark]) + struct.pack(">H", len(data) + 2) + data


def exif_jpeg(entries: int, size: int) -> bytes:
    """A JPEG whose EXIF block is split over several segments, which a reader joins."""
    block = directory(entries, size, size)
    pieces = [block[at : at + 65000] for at in range(0, len(block), 65000)]
    data = jpeg(*(segment(0xE1, b"Exif\0\0" + piece) for piece in pieces))
    return data.replace(b"\xff\xe0\0\x10JFIF", b"\xff\xe4\0\x10JFIF", 1)  # a reader looks for the density in EXIF


def tiny_exif(count: int) -> bytes:
    return jpeg(*([segment(0xE1, b"Exif\0\0a")] * count))


def exif_png(entries: int, size: int) -> bytes:
    return png(16, 16, png_chunk(b"eXIf", directory(entries, size, size)))


def avif_items(count: int, extents: int = 1) -> bytes:
    """An AVIF with `count` items, each with `extents` extents at the same offset."""
    part = struct.pack(">II", 0, 64) * extents
    listed = b"".join(struct.pack(">HHH", at % 65536, 0, extents) + part for at in range(count))
    locations = full(b"iloc", b"\x44\x00", struct.pack(">H", count % 65536), listed)
    meta = full(b"meta", full(b"hdlr", u32(0), b"pict", bytes(13)), full(b"pitm", b"\0\1"), locations)
    return box(b"ftyp", b"avif", bytes(4), b"avifmif1miaf") + meta + box(b"mdat", bytes(64))


def avif_samples(count: int) -> bytes:
    table = times((count, 2)) + sizes(1, count) + chunks(1, count, 48)
    return movie(track(b"pict", film_entry(b"av01"), table), brand=b"avis")


def animated_gif(frames: int, side: int = 64) -> bytes:
    import io

    from PIL import Image

    out = io.BytesIO()
    images = [Image.new("P", (side, side), at) for at in range(frames)]
    images[0].save(out, "GIF", save_all=True, append_images=images[1:], comment=b"c" * 200)
    return out.getvalue()
