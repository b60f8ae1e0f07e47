"""Files whose headers promise more than they hold are refused before a library opens them; honest files are decoded."""

from __future__ import annotations

import io
import struct
import time
import zlib
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from PIL import Image

from mm.bounds.bounded import LEAST_ALLOWED, PROBED_FILM, PROBED_SOUND
from mm.bounds.check import bound_media, bound_picture
from mm.bounds.iso import opening_bytes
from mm.decode.alarm import Alarm
from mm.decode.audio import SoundFile
from mm.decode.image import ImageFile
from mm.decode.magic import as_audio, sniff
from mm.errors import MediaError
from mm.limits import MediaLimits
from tests.mm import bombs, made, picture_bombs, sound_bombs
from tests.mm.bombs import MIB

LIMITS = MediaLimits()
INVALID, COMPLEX, UNSUPPORTED = "media_invalid", "media_too_complex", "media_unsupported"

FILMS: dict[str, tuple[Callable[[], bytes], str]] = {
    "samples of a byte": (lambda: bombs.samples_of_a_byte(20_000_000), INVALID),
    "small samples that are there": (lambda: bombs.real_samples_of_a_byte(900_000, b"vide", b"isom"), COMPLEX),
    "edits of all samples": (lambda: bombs.edits_of(2000, 20_000), COMPLEX),
    "a compressed header": (lambda: bombs.compressed_header(MIB), UNSUPPORTED),
    "a run of a fragment": (lambda: bombs.runs_of_fragments(1, 20_000_000), INVALID),
    "runs of a fragment": (lambda: bombs.runs_of_fragments(2000, 10_000), INVALID),
    "fragments of 60 tracks": (lambda: bombs.many_fragments(20_000, 60), COMPLEX),
    "an index of fragments": (lambda: bombs.segment_index(60_000, 60), COMPLEX),
    "samples in one place": (lambda: bombs.shared_samples(2000, 900_000), INVALID),
    "chapters in one place": (lambda: bombs.shared_chapters(20_000, 60_000), INVALID),
    "picture items": (lambda: bombs.items(100_000_000), INVALID),
    "places of items": (lambda: bombs.items(100_000_000, b"iloc"), INVALID),
    "names of tags": (lambda: bombs.keys_without_end(60_000), COMPLEX),
    "encrypted samples": (lambda: bombs.encrypted_samples(10_000_000), UNSUPPORTED),
    "tracks of two bytes": (lambda: bombs.many_tracks(500_000), COMPLEX),
    "cues": (lambda: bombs.many_elements(b"\x1c\x53\xbb\x6b", b"\xbb\x80", 500_000), COMPLEX),
    "tags": (lambda: bombs.many_elements(b"\x12\x54\xc3\x67", b"\x73\x73\x80", 340_000), COMPLEX),
    "named tags": (lambda: bombs.tagged_matroska(40_000), COMPLEX),
    "attachments": (lambda: bombs.many_elements(b"\x19\x41\xa4\x69", b"\x61\xa7\x80", 340_000), COMPLEX),
    "deflated blocks": (lambda: bombs.deflated_blocks(30, MIB), UNSUPPORTED),
    "bytes in front of frames": (lambda: bombs.stripped_headers(1000, 900_000), INVALID),
    "frames of a byte": (lambda: bombs.blocks_of_a_byte(140_000, bombs.vp9_track()), COMPLEX),
}
SOUNDS: dict[str, tuple[Callable[[], bytes], str]] = {
    "samples of a byte": (lambda: bombs.samples_of_a_byte(20_000_000, b"soun", brand=b"M4A "), INVALID),
    "small samples that are there": (lambda: bombs.real_samples_of_a_byte(900_000), COMPLEX),
    "packets of a byte": (lambda: sound_bombs.ogg_packets(1900, 1), COMPLEX),
    "comments": (lambda: sound_bombs.commented_opus(90_000), COMPLEX),
    "laces": (lambda: bombs.laces_of_a_byte(3500), COMPLEX),
    "a name of 2 GiB": (lambda: sound_bombs.long_info(0x7F000000), INVALID),
    "chunks": (lambda: b"RIFF\xff\xff\xff\xffWAVE" + sound_bombs.chunk(b"LIST", b"") * 100_000, COMPLEX),
    "blocks": (lambda: b"fLaC" + b"\4\0\0\0" * 200_000, COMPLEX),
    "tags behind tags": (lambda: sound_bombs.tag() * 1000, COMPLEX),
}
PICTURES: dict[str, tuple[Callable[[], bytes], str]] = {
    "EXIF in one place": (lambda: picture_bombs.exif_jpeg(4000, 700_000), COMPLEX),
    "tiny segments of EXIF": (lambda: picture_bombs.tiny_exif(90_000), COMPLEX),
    "EXIF of a PNG": (lambda: picture_bombs.exif_png(4000, 700_000), COMPLEX),
    "a directory": (lambda: picture_bombs.directory(4000, 900_000, 900_000), COMPLEX),
    "numbers of a directory": (lambda: picture_bombs.directory(2, 900_000, 900_000, 3), COMPLEX),
    "items": (lambda: picture_bombs.avif_items(60_000), COMPLEX),
    "samples of a picture": (lambda: picture_bombs.avif_samples(2_500_000), COMPLEX),
    "chunks of a PNG": (lambda: picture_bombs.png(4, 4, *[picture_bombs.png_chunk(b"tIME", b"")] * 40_000), COMPLEX),
}


def refused(data: bytes, bound: Callable[[bytes], object]) -> MediaError:
    """The error with which `bound` refuses the file, within two seconds."""
    begun = time.perf_counter()
    with pytest.raises(MediaError) as caught:
        bound(data)
    assert time.perf_counter() - begun < 2
    assert len(data) < MIB
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize("name", FILMS)
def test_s21_a_film_holds_what_it_promises(name):
    make, reason = FILMS[name]
    error = refused(make(), lambda data: bound_media(data, sniff(data), True))
    assert error.reason == reason, error.message


@pytest.mark.parametrize("name", SOUNDS)
def test_s20_a_sound_holds_what_it_promises(name):
    make, reason = SOUNDS[name]
    error = refused(make(), lambda data: bound_media(data, as_audio(sniff(data)), False))
    assert error.reason == reason, error.message


@pytest.mark.parametrize("name", PICTURES)
def test_s18_a_picture_holds_what_it_promises(name):
    make, reason = PICTURES[name]
    error = refused(make(), lambda data: bound_picture(data, sniff(data)))
    assert error.reason == reason, error.message


@pytest.mark.parametrize("place", [b"udta", b"meta", b"ilst", b"stsd", b"free in moov", b"mvex"])
def test_s21_tables_are_found_wherever_a_reader_may_look(place):
    """A compressed header is found in every box whose children a reader follows."""
    inner = bombs.box(b"cmov", bytes(8))
    if place == b"stsd":
        data = bombs.movie(bombs.track(b"vide", bombs.film_entry(b"avc1", inner), bombs.sizes(8, 1)))
    elif place == b"meta":
        data = bombs.movie(more=bombs.full(b"meta", bombs.full(b"hdlr", bytes(24)), inner))
    elif place == b"free in moov":
        data = bombs.movie(more=bombs.box(b"hoov", bytes(8), b"mvhd"))
    else:
        data = bombs.movie(more=bombs.box(place, inner))
    assert refused(data, lambda given: opening_bytes(given, PROBED_FILM)).reason == UNSUPPORTED


def test_s21_places_that_a_seek_head_names_are_read():
    """The seek head points at tracks inside a Void element."""
    hidden = bombs.element(b"\x16\x54\xae\x6b", b"\xae\x80" * 100)
    info = bombs.element(b"\x15\x49\xa9\x66", b"")
    head = bombs.element(b"\x11\x4d\x9b\x74", bombs.element(b"\x4d\xbb", bombs.element(b"\x53\xac", b"\0\0\0\x00")))
    place = len(info) + len(head) + 5
    head = head.replace(
        b"\x53\xac\x10\x00\x00\x04" + b"\0\0\0\x00", b"\x53\xac\x10\x00\x00\x04" + struct.pack(">I", place)
    )
    void = b"\xec" + (0x10000000 | len(hidden)).to_bytes(4, "big") + hidden
    segment = bombs.element(b"\x18\x53\x80\x67", info, head, void)
    data = bombs.element(b"\x1a\x45\xdf\xa3", bombs.element(b"\x42\x82", b"webm")) + segment
    assert "64 tracks" in refused(data, lambda given: bound_media(given, "webm", True)).message


# -- files that are read as before


def decoded(data: bytes) -> np.ndarray:
    return SoundFile(data, sniff(data), LIMITS).decode(Alarm())


def test_s20_sound_without_its_tags_is_the_same_sound():
    """Tags are removed before decoding: ID3 at the start, APE and TAG at the end, chunks of WAV, blocks of FLAC."""
    tone = made.tone(1.0, 44100)
    mp3 = made.sound(tone, 44100, "mp3", "libmp3lame")
    plain = decoded(mp3)
    name = b"TIT2" + sound_bombs.size7(6) + b"\0\0" + b"\0hello"
    footer = b"APETAGEX" + struct.pack("<IIII", 2000, 32 + 40, 1, 0) + bytes(8)
    tagged = (
        sound_bombs.tag(name)
        + sound_bombs.tag(sound_bombs.picture_frame(2 * MIB))
        + mp3
        + bytes(40)
        + footer
        + b"TAG"
        + bytes(125)
    )
    assert np.array_equal(decoded(tagged), plain)
    for container, codec in (("wav", "pcm_s16le"), ("flac", "flac")):
        data = made.sound(made.tone(1.0), container=container, codec=codec)
        plain = decoded(data)
        if container == "wav":
            more = sound_bombs.chunk(b"LIST", b"INFO" + sound_bombs.chunk(b"INAM", b"hello")) + sound_bombs.chunk(
                b"id3 ", sound_bombs.tag(name)
            )
            data = b"RIFF" + struct.pack("<I", len(data) - 8 + len(more)) + data[8:36] + more + data[36:]
        else:
            picture = b"\6" + (40).to_bytes(3, "big") + bytes(40)
            data = data[:4] + data[4:42] + picture + data[42:]
            assert not data[4] & 128
        assert np.array_equal(decoded(data), plain)


def fragmented(seconds: float) -> bytes:
    import av

    out = io.BytesIO()
    options = {"movflags": "frag_keyframe+empty_moov+default_base_moof", "frag_duration": "200000"}
    with av.open(out, "w", format="mp4", options=options) as target:
        stream = target.add_stream("aac", rate=16000, layout="mono")
        samples = made.tone(seconds)
        for start in range(0, samples.shape[1], 1024):
            frame = av.AudioFrame.from_ndarray(samples[:, start : start + 1024], format="fltp", layout="mono")
            frame.sample_rate, frame.pts, frame.time_base = 16000, start, Fraction(1, 16000)
            target.mux(stream.encode(frame))
        target.mux(stream.encode(None))
    return out.getvalue()


HONEST: dict[str, Callable[[], bytes]] = {
    "mov of values": lambda: made.sound(made.tone(20.0, 48000, 2), 48000, "mov", "pcm_s16le"),
    "fragments": lambda: fragmented(60.0),
    "opus": lambda: made.sound(made.tone(120.0, 48000), 48000, "ogg", "libopus"),
    "opus in webm": lambda: made.sound(made.tone(120.0, 48000), 48000, "webm", "libopus"),
    "flac in ogg": lambda: made.sound(made.tone(5.0), container="ogg", codec="flac"),
}


@pytest.mark.parametrize("name", HONEST)
def test_honest_sounds_cost_little_to_open(name):
    data = HONEST[name]()
    bounded = bound_media(data, as_audio(sniff(data)), False)
    assert bounded.opening < LEAST_ALLOWED // 2, bounded.opening
    assert len(decoded(data)) > 16000


def test_an_hour_of_speech_costs_little_to_open():
    """The sizes of 170,000 AAC frames, as an M4A lists them, stay within the bytes allowed for opening."""
    sizes = np.random.default_rng(0).integers(60, 120, 170_000, dtype=np.int64)
    listed = bombs.full(b"stsz", bombs.u32(0, len(sizes)), sizes.astype(">u4").tobytes())
    table = bombs.times((len(sizes), 1024)) + listed + bombs.chunks(1, len(sizes), 40)
    data = bombs.movie(
        bombs.track(b"soun", bombs.sound_entry(b"mp4a"), table), brand=b"M4A ", data=bytes(int(sizes.sum()))
    )
    assert opening_bytes(data, PROBED_SOUND) < 12 * MIB
    stripped = bombs.element(b"\x62\x40", bombs.element(b"\x50\x34", bombs.element(b"\x42\x54", b"\3")))
    opus = bombs.matroska(bombs.opus_track(bombs.element(b"\x6d\x80", stripped)), bombs.cluster())
    assert bound_media(opus, "webm", False).opening < MIB, (
        "bytes that are put back in front of frames are no compression"
    )


# -- pictures without the chunks that no decoder reads


def pixels(data: bytes) -> np.ndarray:
    return ImageFile(data, sniff(data), LIMITS).decode()


def test_s18_a_png_in_pieces_with_texts_is_the_same_picture():
    image = made.noise(64, 48)
    plain = made.png(image)
    pieces = [plain[33:-12][8:-4]]
    packed = b"".join(pieces)
    cut = b"".join(picture_bombs.png_chunk(b"IDAT", packed[at : at + 7]) for at in range(0, len(packed), 7))
    more = picture_bombs.png_chunk(b"iCCP", b"p\0\0" + zlib.compress(bytes(MIB))) + picture_bombs.png_chunk(
        b"zTXt", b"k\0\0" + zlib.compress(b"a")
    )
    more += picture_bombs.png_chunk(b"acTL", struct.pack(">II", 1, 0)) + picture_bombs.png_chunk(b"tEXt", b"k\0v")
    other = plain[:33] + more + cut + plain[-12:]
    assert np.array_equal(pixels(other), image)
    bounded = bound_picture(other, "png")
    assert b"iCCP" not in bounded
    assert b"tEXt" in bounded, "a short text does no harm"
    assert bounded.count(b"IDAT") == 1
    assert np.array_equal(pixels(picture_bombs.texts(900)), np.zeros((16, 16, 3), np.uint8))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "AVIF", "TIFF"])
def test_s19_a_picture_lies_as_its_exif_says(kind):
    exif = Image.Exif()
    exif[0x0112] = 6
    out = io.BytesIO()
    Image.new("RGB", (40, 20)).save(out, kind, exif=exif)
    assert pixels(out.getvalue()).shape[:2] == (40, 20)


def test_s18_the_first_image_of_a_gif_is_all_that_is_opened():
    out = io.BytesIO()
    frames = [Image.fromarray(made.noise(40, 40, at)).quantize(16) for at in range(20)]
    frames[0].save(out, "GIF", save_all=True, append_images=frames[1:], comment=b"c" * 5000)
    data = out.getvalue()
    bounded = bound_picture(data, "gif")
    assert len(bounded) < len(data) // 10
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(data)).convert("RGB")), pixels(data))


def test_s23_opening_looks_at_the_alarm():
    """Opening a file stops when the request's time ends while a library still reads."""
    data = made.sound(made.tone(60.0), container="flac", codec="flac")
    alarm = Alarm(0.0)
    alarm.begin()
    with pytest.raises(MediaError) as caught:
        SoundFile(data, "flac", LIMITS).promised_seconds(alarm)
    assert caught.value.reason == COMPLEX


def test_an_empty_table_behind_the_end_of_a_file_is_no_error():
    data = bombs.box(b"ftyp", b"isom", bytes(4)) + bombs.box(b"abcd", b"\0\0\0\x08stsz")
    assert opening_bytes(data, PROBED_FILM) < MIB
