"""Small hostile files: containers whose counts, tags and directories make a decoder take much memory or time.

Each function returns bytes below 1 MiB. A decoder that believes the counts takes hundreds of MiB, or does not return.
test_bounds.py and, over sockets, end_to_end/test_hostile_media.py say which files are refused and with which reason.
Sounds and pictures have files of their own.
"""

from __future__ import annotations

import struct
import zlib

MIB = 1 << 20


# -- ISO media (MP4, MOV, M4A)


def box(kind: bytes, *parts: bytes) -> bytes:
    data = b"".join(parts)
    return struct.pack(">I", 8 + len(data)) + kind + data


def full(kind: bytes, *parts: bytes, version: int = 0, flags: int = 0) -> bytes:
    return box(kind, struct.pack(">I", version << 24 | flags), *parts)


def u32(*values: int) -> bytes:
    return struct.pack(f">{len(values)}I", *values)


def sound_entry(kind: bytes = b"sowt", *more: bytes) -> bytes:
    return box(kind, bytes(6), u32(1)[2:], bytes(8), struct.pack(">HHHHI", 1, 16, 0, 0, 16000 << 16), *more)


def film_entry(kind: bytes = b"avc1", *more: bytes) -> bytes:
    return box(
        kind,
        bytes(6),
        u32(1)[2:],
        bytes(16),
        struct.pack(">HH", 64, 64),
        u32(72 << 16, 72 << 16, 0),
        struct.pack(">H", 1),
        bytes(32),
        struct.pack(">Hh", 24, -1),
        *more,
    )


def sizes(size: int, count: int) -> bytes:
    return full(b"stsz", u32(size, count))


def times(*runs: tuple[int, int]) -> bytes:
    return full(b"stts", u32(len(runs), *(value for run in runs for value in run)))


def chunks(count: int, samples: int, at: int) -> bytes:
    return full(b"stsc", u32(1, 1, samples, 1)) + full(b"stco", u32(count), u32(at) * count)


def track(kind: bytes, entry: bytes, table: bytes, edits: bytes = b"", number: int = 1) -> bytes:
    header = full(b"tkhd", u32(0, 0, number, 0, 1000), bytes(60), flags=3)
    medium = full(b"mdhd", u32(0, 0, 16000, 16000, 0))
    handler = full(b"hdlr", u32(0), kind, bytes(12), b"\0")
    inner = box(b"minf", box(b"stbl", full(b"stsd", u32(1), entry), table))
    return box(b"trak", header, edits, box(b"mdia", medium, handler, inner))


def movie(*tracks: bytes, more: bytes = b"", brand: bytes = b"isom", data: bytes = b"") -> bytes:
    head = box(b"ftyp", brand, bytes(4), brand)
    content = box(b"moov", full(b"mvhd", u32(0, 0, 1000, 1000), bytes(80)), *tracks, more)
    return head + content + box(b"mdat", data or b"\0" * 64)


def samples_of_a_byte(count: int, kind: bytes = b"vide", entry: bytes | None = None, brand: bytes = b"isom") -> bytes:
    """A track of `count` samples of one byte each."""
    entry = entry or (film_entry() if kind == b"vide" else sound_entry(b"mp4a"))
    return movie(track(kind, entry, times((count, 2)) + sizes(1, count) + chunks(1, count, 48)), brand=brand)


def edits_of(edits: int, samples: int) -> bytes:
    """A film with a list of edits, each of which plays all samples again."""
    listed = box(b"edts", full(b"elst", u32(edits), (u32(1000, 0) + struct.pack(">HH", 1, 0)) * edits))
    table = times((samples, 2)) + sizes(1, samples) + full(b"stss", u32(1, 1)) + chunks(1, samples, 48)
    return movie(track(b"vide", film_entry(), table, listed), data=bytes(samples))


def compressed_header(size: int = 400 * MIB) -> bytes:
    """A deflated moov inside a moov: the file is a thousandth of the inflated size."""
    packer = zlib.compressobj(9)
    inner = b"".join(packer.compress(bytes(MIB)) for _ in range(size // MIB)) + packer.flush()
    packed = box(b"cmov", box(b"dcom", b"zlib"), box(b"cmvd", u32(size), inner))
    return box(b"ftyp", b"qt  ", bytes(4), b"qt  ") + box(b"moov", packed) + box(b"mdat", bytes(64))


def runs_of_fragments(runs: int, samples: int) -> bytes:
    """Fragments whose sample tables have a count of samples and no bytes for them."""
    defaults = box(b"mvex", full(b"trex", u32(1, 1, 1, 1, 0)))
    table = times() + sizes(0, 0) + full(b"stsc", u32(0)) + full(b"stco", u32(0))
    run = full(b"trun", u32(samples))
    part = box(b"moof", full(b"mfhd", u32(1)), box(b"traf", full(b"tfhd", u32(1), flags=0x20000), run * runs))
    return movie(track(b"vide", film_entry(), table), more=defaults) + part + box(b"mdat", bytes(64))


def many_fragments(count: int, tracks: int) -> bytes:
    table = times() + sizes(0, 0) + full(b"stsc", u32(0)) + full(b"stco", u32(0))
    made = [track(b"vide", film_entry(), table, number=at + 1) for at in range(tracks)]
    defaults = box(b"mvex", *(full(b"trex", u32(at + 1, 1, 1, 1, 0)) for at in range(tracks)))
    part = box(b"moof", box(b"traf", full(b"tfhd", u32(1), flags=0x20000)))
    return movie(*made, more=defaults) + part * count


def segment_index(count: int, tracks: int) -> bytes:
    table = times() + sizes(0, 0) + full(b"stsc", u32(0)) + full(b"stco", u32(0))
    made = [track(b"vide", film_entry(), table, number=at + 1) for at in range(tracks)]
    index = full(b"sidx", u32(1, 1000, 0, 0, count), u32(1, 1, 0) * count)
    return movie(*made, more=box(b"mvex", full(b"trex", u32(1, 1, 1, 1, 0)))) + index


def shared_samples(count: int, size: int) -> bytes:
    """`count` samples at the same offset, each as long as the file."""
    table = times((count, 512)) + full(b"stsz", u32(0, count), u32(size) * count)
    table += full(b"stsc", u32(1, 1, 1, 1)) + full(b"stco", u32(count), u32(40) * count)
    return movie(track(b"vide", film_entry(b"vp09"), table), data=bytes(size))


def shared_chapters(count: int, size: int) -> bytes:
    """A film whose chapters all have the same title of `size` bytes."""
    table = times((count, 512)) + full(b"stsz", u32(0, count), u32(size) * count)
    table += full(b"stsc", u32(1, 1, 1, 1)) + full(b"stco", u32(count), u32(40) * count)
    film = times((1, 512)) + sizes(8, 1) + chunks(1, 1, 40)
    named = box(b"tref", box(b"chap", u32(2)))
    titles = track(b"text", box(b"text", bytes(8)), table, number=2)
    start = box(b"ftyp", b"isom", bytes(4), b"isom")
    title = struct.pack(">H", size - 2) + b"a" * (size - 2)
    # The titles come first, so that their offset is known: 28 bytes after the start of the file.
    return (
        start
        + box(b"free", bytes(4))
        + box(b"mdat", title)
        + movie(track(b"vide", film_entry(), film, named), titles)[len(start) :]
    )


def items(count: int, kind: bytes = b"iinf") -> bytes:
    """A film whose meta box lists `count` picture items."""
    meta = full(b"meta", full(b"hdlr", u32(0), b"pict", bytes(13)), full(kind, u32(count), version=1))
    table = times((1, 512)) + sizes(8, 1) + chunks(1, 1, 40)
    return movie(track(b"vide", film_entry(), table)) + meta


def keys_without_end(count: int) -> bytes:
    """Tags with distinct names; a reader searches its dictionary from the beginning for each tag."""
    names = b"".join(
        box(b"\xa9" + b"%03x" % (at % 4096), struct.pack(">HH", 1, at % 32768), b"v") for at in range(count)
    )
    table = times((1, 512)) + sizes(8, 1) + chunks(1, 1, 40)
    return movie(track(b"vide", film_entry(), table), more=box(b"udta", names))


def encrypted_samples(count: int) -> bytes:
    scheme = box(
        b"sinf",
        box(b"frma", b"avc1"),
        full(b"schm", b"cenc", u32(65536)),
        box(b"schi", full(b"tenc", bytes(2), b"\1\0", bytes(16))),
    )
    table = times((1, 512)) + sizes(8, 1) + chunks(1, 1, 40) + full(b"senc", u32(count))
    return movie(track(b"vide", film_entry(b"encv", scheme), table))


# -- Matroska


def element(name: bytes, *parts: bytes) -> bytes:
    data = b"".join(parts)
    return name + (0x10000000 | len(data)).to_bytes(4, "big") + data


def matroska(tracks: bytes, *more: bytes, doctype: bytes = b"webm") -> bytes:
    head = element(b"\x1a\x45\xdf\xa3", element(b"\x42\x82", doctype))
    info = element(b"\x15\x49\xa9\x66", element(b"\x2a\xd7\xb1", (10**6).to_bytes(3, "big")))
    return head + element(b"\x18\x53\x80\x67", info, element(b"\x16\x54\xae\x6b", tracks), *more)


def vp9_track(number: int = 1, *more: bytes) -> bytes:
    video = element(b"\xe0", element(b"\xb0", b"\x40"), element(b"\xba", b"\x40"))
    return element(
        b"\xae",
        element(b"\xd7", bytes([number])),
        element(b"\x73\xc5", bytes([number])),
        element(b"\x83", b"\1"),
        element(b"\x86", b"V_VP9"),
        video,
        *more,
    )


def opus_track(*more: bytes) -> bytes:
    head = b"OpusHead\1\1" + struct.pack("<HIhB", 0, 48000, 0, 0)
    audio = element(b"\xe1", element(b"\xb5", struct.pack(">d", 48000.0)), element(b"\x9f", b"\1"))
    return element(
        b"\xae",
        element(b"\xd7", b"\1"),
        element(b"\x73\xc5", b"\1"),
        element(b"\x83", b"\2"),
        element(b"\x86", b"A_OPUS"),
        element(b"\x63\xa2", head),
        audio,
        *more,
    )


def cluster(*blocks: bytes) -> bytes:
    return element(b"\x1f\x43\xb6\x75", element(b"\xe7", b"\0"), *blocks)


def many_tracks(count: int) -> bytes:
    return matroska(vp9_track() + b"\xae\x80" * count)


def many_elements(name: bytes, inner: bytes, count: int) -> bytes:
    """A master element with `count` empty children, for example cues, tags, chapters or attachments."""
    return matroska(vp9_track(), element(name, inner * count), cluster(element(b"\xa3", b"\x81\0\0\x80", bytes(16))))


def deflated_blocks(count: int, size: int) -> bytes:
    """A track whose blocks are deflated."""
    packed = zlib.compress(bytes(size), 9)
    method = element(b"\x50\x34", element(b"\x42\x54", b"\0"))
    coding = element(b"\x6d\x80", element(b"\x62\x40", element(b"\x50\x33", b"\0"), method))
    blocks = [element(b"\xa3", b"\x81" + struct.pack(">h", at) + b"\x80", packed) for at in range(count)]
    return matroska(vp9_track(1, coding), cluster(*blocks), doctype=b"matroska")


def stripped_headers(count: int, size: int) -> bytes:
    """Blocks with header stripping: a reader puts `size` bytes in front of each block."""
    method = element(b"\x50\x34", element(b"\x42\x54", b"\3"), element(b"\x42\x55", bytes(size)))
    coding = element(b"\x6d\x80", element(b"\x62\x40", element(b"\x50\x33", b"\0"), method))
    blocks = [element(b"\xa3", b"\x81" + struct.pack(">h", at % 30000) + b"\x80", b"\0") for at in range(count)]
    return matroska(vp9_track(1, coding), cluster(*blocks), doctype=b"matroska")


def laced_blocks(blocks: int, laces: int = 255) -> bytes:
    """Blocks of many empty frames (EBML lacing is 6, fixed lacing 4, Xiph lacing 2)."""
    block = element(b"\xa3", b"\x81\0\0\x82", bytes([laces]), bytes(laces), b"\xf8")
    return matroska(opus_track(), cluster(*([block] * blocks)))


def tagged_matroska(count: int) -> bytes:
    tags = b"".join(
        element(b"\x67\xc8", element(b"\x45\xa3", b"%05x" % at), element(b"\x44\x87", b"v")) for at in range(count)
    )
    return matroska(
        vp9_track(),
        element(b"\x12\x54\xc3\x67", element(b"\x73\x73", tags)),
        cluster(element(b"\xa3", b"\x81\0\0\x80", bytes(16))),
    )


def real_samples_of_a_byte(count: int, kind: bytes = b"soun", brand: bytes = b"M4A ") -> bytes:
    """A track of `count` samples of one byte, like samples_of_a_byte, whose bytes are really in the file."""
    entry = film_entry() if kind == b"vide" else sound_entry(b"Opus")
    table = times((count, 2)) + sizes(1, count) + chunks(1, count, 48)
    head = movie(track(kind, entry, table), brand=brand, data=b"\xf8" * count)
    at = head.index(b"mdat") + 4
    table = times((count, 2)) + sizes(1, count) + chunks(1, count, at)
    return movie(track(kind, entry, table), brand=brand, data=b"\xf8" * count)


def laces_of_a_byte(blocks: int, laces: int = 255) -> bytes:
    block = element(b"\xa3", b"\x81\0\0\x84", bytes([laces]), b"\xf8" * (laces + 1))  # fixed-size lacing
    return matroska(opus_track(), cluster(*([block] * blocks)))


def blocks_of_a_byte(count: int, coded: bytes | None = None) -> bytes:
    return matroska(coded or opus_track(), cluster(*([b"\xa3\x85\x81\0\0\x80\xf8"] * count)))
