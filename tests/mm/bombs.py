"""Small files that promise much: containers whose counts, tags and directories ask a decoder for memory or time.

Each function returns bytes below 1 MiB. A decoder that believes them takes hundreds of MiB, or does not come back; what
is refused, and with which reason, is in test_bounds.py and, over sockets, in end_to_end/test_hostile_media.py.
"""

from __future__ import annotations

import functools
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
    """A track of so many samples of one byte each."""
    entry = entry or (film_entry() if kind == b"vide" else sound_entry(b"mp4a"))
    return movie(track(kind, entry, times((count, 2)) + sizes(1, count) + chunks(1, count, 48)), brand=brand)


def edits_of(edits: int, samples: int) -> bytes:
    """Each edit shows all samples anew."""
    listed = box(b"edts", full(b"elst", u32(edits), (u32(1000, 0) + struct.pack(">HH", 1, 0)) * edits))
    table = times((samples, 2)) + sizes(1, samples) + full(b"stss", u32(1, 1)) + chunks(1, samples, 48)
    return movie(track(b"vide", film_entry(), table, listed), data=bytes(samples))


def compressed_header(size: int = 400 * MIB) -> bytes:
    """A moov in a moov, deflated: a thousandth of what it holds."""
    packer = zlib.compressobj(9)
    inner = b"".join(packer.compress(bytes(MIB)) for _ in range(size // MIB)) + packer.flush()
    packed = box(b"cmov", box(b"dcom", b"zlib"), box(b"cmvd", u32(size), inner))
    return box(b"ftyp", b"qt  ", bytes(4), b"qt  ") + box(b"moov", packed) + box(b"mdat", bytes(64))


def runs_of_fragments(runs: int, samples: int) -> bytes:
    """Fragments whose samples take no byte in their table."""
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
    """Samples that all lie in the same place, each as long as the file."""
    table = times((count, 512)) + full(b"stsz", u32(0, count), u32(size) * count)
    table += full(b"stsc", u32(1, 1, 1, 1)) + full(b"stco", u32(count), u32(40) * count)
    return movie(track(b"vide", film_entry(b"vp09"), table), data=bytes(size))


def shared_chapters(count: int, size: int) -> bytes:
    """A film whose chapters' titles are all the same 64 KiB."""
    table = times((count, 512)) + full(b"stsz", u32(0, count), u32(size) * count)
    table += full(b"stsc", u32(1, 1, 1, 1)) + full(b"stco", u32(count), u32(40) * count)
    film = times((1, 512)) + sizes(8, 1) + chunks(1, 1, 40)
    named = box(b"tref", box(b"chap", u32(2)))
    titles = track(b"text", box(b"text", bytes(8)), table, number=2)
    start = box(b"ftyp", b"isom", bytes(4), b"isom")
    title = struct.pack(">H", size - 2) + b"a" * (size - 2)
    # The titles come first, so that their place is known: 28 bytes behind the beginning.
    return (
        start
        + box(b"free", bytes(4))
        + box(b"mdat", title)
        + movie(track(b"vide", film_entry(), film, named), titles)[len(start) :]
    )


def items(count: int, kind: bytes = b"iinf") -> bytes:
    """Picture items in a film."""
    meta = full(b"meta", full(b"hdlr", u32(0), b"pict", bytes(13)), full(kind, u32(count), version=1))
    table = times((1, 512)) + sizes(8, 1) + chunks(1, 1, 40)
    return movie(track(b"vide", film_entry(), table)) + meta


def keys_without_end(count: int) -> bytes:
    """Tags with names of their own: a dictionary that is searched from its beginning for each."""
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


# -- ID3, WAV, FLAC


def size7(value: int) -> bytes:
    return bytes(value >> shift & 127 for shift in (21, 14, 7, 0))


@functools.cache
def picture_frame(size: int) -> bytes:
    """An ID3v2.4 picture, deflated."""
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
    """An Opus stream of packets of so many bytes, 255 in each page."""
    head = b"OpusHead\1\1" + struct.pack("<HIhB", 0, 48000, 0, 0)
    tags = b"OpusTags" + struct.pack("<II", 0, 0)
    found = [page(bytes([len(head)]), head, 0, 0, 2), page(bytes([len(tags)]), tags, 1)]
    found += [page(bytes([length]) * 255, b"\xf8" * (length * 255), 2 + at) for at in range(pages)]
    return b"".join(map(signed, found))


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
    """A master of so many empty children: cues, tags, chapters, attachments."""
    return matroska(vp9_track(), element(name, inner * count), cluster(element(b"\xa3", b"\x81\0\0\x80", bytes(16))))


def deflated_blocks(count: int, size: int) -> bytes:
    """A track whose blocks are deflated."""
    packed = zlib.compress(bytes(size), 9)
    method = element(b"\x50\x34", element(b"\x42\x54", b"\0"))
    coding = element(b"\x6d\x80", element(b"\x62\x40", element(b"\x50\x33", b"\0"), method))
    blocks = [element(b"\xa3", b"\x81" + struct.pack(">h", at) + b"\x80", packed) for at in range(count)]
    return matroska(vp9_track(1, coding), cluster(*blocks), doctype=b"matroska")


def stripped_headers(count: int, size: int) -> bytes:
    """Each block has so many bytes put in front."""
    method = element(b"\x50\x34", element(b"\x42\x54", b"\3"), element(b"\x42\x55", bytes(size)))
    coding = element(b"\x6d\x80", element(b"\x62\x40", element(b"\x50\x33", b"\0"), method))
    blocks = [element(b"\xa3", b"\x81" + struct.pack(">h", at % 30000) + b"\x80", b"\0") for at in range(count)]
    return matroska(vp9_track(1, coding), cluster(*blocks), doctype=b"matroska")


def laced_blocks(blocks: int, laces: int = 255) -> bytes:
    """Blocks of many frames without bytes (EBML lacing 6, fixed 4, Xiph 2)."""
    block = element(b"\xa3", b"\x81\0\0\x82", bytes([laces]), bytes(laces), b"\xf8")
    return matroska(opus_track(), cluster(*([block] * blocks)))


def comments(count: int) -> bytes:
    """A Vorbis comment with so many names."""
    entries = [b"%05x=" % at for at in range(count)]
    body = b"".join(struct.pack("<I", len(entry)) + entry for entry in entries)
    return struct.pack("<I", 0) + struct.pack("<I", count) + body


def commented_flac(count: int) -> bytes:
    info = struct.pack(">HH", 4096, 4096) + bytes(6) + (16000 << 44 | 15 << 36 | 4096).to_bytes(8, "big") + bytes(16)
    content = comments(count)
    return b"fLaC" + b"\0" + (34).to_bytes(3, "big") + info + b"\x84" + len(content).to_bytes(3, "big") + content


def crc(data: bytes) -> int:
    """Ogg's: not reflected, from 0."""
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
    """A page with its checksum."""
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


def tagged_matroska(count: int) -> bytes:
    tags = b"".join(
        element(b"\x67\xc8", element(b"\x45\xa3", b"%05x" % at), element(b"\x44\x87", b"v")) for at in range(count)
    )
    return matroska(
        vp9_track(),
        element(b"\x12\x54\xc3\x67", element(b"\x73\x73", tags)),
        cluster(element(b"\xa3", b"\x81\0\0\x80", bytes(16))),
    )


def ape_tagged_mp3(size: int) -> bytes:
    item = struct.pack("<II", size, 2) + b"Cover\0" + b"name\0"
    footer = b"APETAGEX" + struct.pack("<IIII", 2000, len(item) + 32, 1, 0) + bytes(8)
    return mpeg_frames() + item + footer


def real_samples_of_a_byte(count: int, kind: bytes = b"soun", brand: bytes = b"M4A ") -> bytes:
    """The same, with a byte for each."""
    entry = film_entry() if kind == b"vide" else sound_entry(b"Opus")
    table = times((count, 2)) + sizes(1, count) + chunks(1, count, 48)
    head = movie(track(kind, entry, table), brand=brand, data=b"\xf8" * count)
    at = head.index(b"mdat") + 4
    table = times((count, 2)) + sizes(1, count) + chunks(1, count, at)
    return movie(track(kind, entry, table), brand=brand, data=b"\xf8" * count)


def laces_of_a_byte(blocks: int, laces: int = 255) -> bytes:
    block = element(b"\xa3", b"\x81\0\0\x84", bytes([laces]), b"\xf8" * (laces + 1))  # fixed sizes
    return matroska(opus_track(), cluster(*([block] * blocks)))


def blocks_of_a_byte(count: int, coded: bytes | None = None) -> bytes:
    return matroska(coded or opus_track(), cluster(*([b"\xa3\x85\x81\0\0\x80\xf8"] * count)))


def gif_frames(count: int) -> bytes:
    head = b"GIF89a" + struct.pack("<HHBBB", 16, 16, 0x80, 0, 0) + bytes(6)
    frame = b"," + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\2\2\x44\1\0"
    return head + frame * count + b";"


# -- Pictures


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *before: bytes, pieces: int = 1) -> bytes:
    """A black RGB picture with chunks in front of its pixels, which may be cut in pieces."""
    packer = zlib.compressobj(9)
    row = bytes(1 + 3 * width)
    packed = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    size = max(1, -(-len(packed) // pieces))
    parts = [png_chunk(b"IDAT", packed[at : at + size]) for at in range(0, len(packed), size)]
    head = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(before) + b"".join(parts) + png_chunk(b"IEND", b"")


def texts(count: int, size: int = 1_000_000) -> bytes:
    """A PNG whose texts are deflated."""
    packed = zlib.compress(b"a" * size, 9)
    return png(16, 16, *(png_chunk(b"zTXt", b"k%d\0\0" % at + packed) for at in range(count)))


def directory(entries: int, size: int, room: int, kind: int = 7) -> bytes:
    """A TIFF directory of which each entry points at the same bytes."""
    values = size // {7: 1, 3: 2, 5: 8}[kind]
    listed = b"".join(struct.pack("<HHII", 1000 + at, kind, values, 8) for at in range(entries))
    return b"II*\0" + struct.pack("<I", 8 + room) + bytes(room) + struct.pack("<H", entries) + listed + bytes(4)


def jpeg(*segments: bytes) -> bytes:
    """A small JPEG with segments behind its first marker."""
    import io

    from PIL import Image

    out = io.BytesIO()
    Image.new("RGB", (16, 16)).save(out, "JPEG")
    return out.getvalue()[:2] + b"".join(segments) + out.getvalue()[2:]


def segment(mark: int, data: bytes) -> bytes:
    return bytes([255, mark]) + struct.pack(">H", len(data) + 2) + data


def exif_jpeg(entries: int, size: int) -> bytes:
    """EXIF in several segments, which a reader joins."""
    block = directory(entries, size, size)
    pieces = [block[at : at + 65000] for at in range(0, len(block), 65000)]
    data = jpeg(*(segment(0xE1, b"Exif\0\0" + piece) for piece in pieces))
    return data.replace(b"\xff\xe0\0\x10JFIF", b"\xff\xe4\0\x10JFIF", 1)  # so that its density is looked for in EXIF


def tiny_exif(count: int) -> bytes:
    return jpeg(*([segment(0xE1, b"Exif\0\0a")] * count))


def exif_png(entries: int, size: int) -> bytes:
    return png(16, 16, png_chunk(b"eXIf", directory(entries, size, size)))


def avif_items(count: int, extents: int = 1) -> bytes:
    """An AVIF of so many items, each with so many parts in the same place."""
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
