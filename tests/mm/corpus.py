"""Odd files, generated here: files that clients send by mistake or by malice, each with its documented outcome.

A picture that is read has a size and a mean colour, a sound has samples, a film has frames; all others are refused with
a reason. The mean is that of the decoded picture, after orientation and colour conversion.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from engine.base.request import Modality
from tests.mm import made

INVALID, UNSUPPORTED, LARGE = "media_invalid", "media_unsupported", "media_too_large"
RED = (200, 30, 40)


@dataclass(frozen=True)
class Odd:
    """A file and its expected outcome: a shape, a number of samples, or the reasons with which the file is refused."""

    name: str
    modality: Modality
    data: bytes
    size: tuple[int, ...] = ()  # picture: height, width; sound: samples at 16 kHz; film: frames, height, width
    mean: tuple[int, int, int] | None = None
    refused: tuple[str, ...] = ()


def flat(mode: str, colour: Any, size: tuple[int, int] = (64, 48)) -> Image.Image:
    return Image.new(mode, size, colour)


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def exif(orientation: int) -> bytes:
    return b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0" + bytes([orientation]) + bytes(6)


def raw_png(width: int, height: int, depth: int, colour: int, body: bytes) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(body)) + chunk(b"IEND", b"")


def picture(name: str, data: bytes, mean: tuple[int, int, int] | None = RED, size: tuple[int, int] = (48, 64)) -> Odd:
    return Odd(name, "image", data, size, mean)


def refused(name: str, modality: Modality, data: bytes, *reasons: str) -> Odd:
    return Odd(name, modality, data, refused=reasons or (INVALID,))


def pictures_read() -> Iterator[Odd]:
    red = flat("RGB", RED)
    for kind in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF"):
        yield picture(f"plain {kind}", saved(red, kind))
    yield picture("progressive JPEG", saved(red, "JPEG", progressive=True))
    yield picture("grey JPEG", saved(flat("L", 90), "JPEG"), (90, 90, 90))
    yield picture("CMYK JPEG", saved(flat("CMYK", (0, 255, 255, 0)), "JPEG"), (255, 0, 0))
    yield picture("CMYK TIFF", saved(flat("CMYK", (0, 255, 255, 0)), "TIFF"), (255, 0, 0))
    yield picture("16-bit grey PNG", saved(flat("I;16", 0x8080), "PNG"), (128, 128, 128))
    yield picture("16-bit grey TIFF", saved(flat("I;16", 0x8080), "TIFF"), (128, 128, 128))
    yield picture("1-bit PNG", saved(flat("1", 1), "PNG"), (255, 255, 255))
    yield picture("1-bit TIFF of fax lines", saved(flat("1", 1), "TIFF", compression="group4"), (255, 255, 255))
    yield picture("16-bit colour PNG", raw_png(64, 48, 16, 2, (b"\0" + bytes([200, 9, 30, 9, 40, 9]) * 64) * 48))
    yield picture("palette PNG", saved(red.convert("P"), "PNG"), None)
    yield picture("palette GIF", saved(red.convert("P"), "GIF"), None)
    clear = flat("RGBA", (0, 0, 0, 0))
    for kind in ("PNG", "WEBP", "TIFF", "AVIF", "GIF"):
        yield picture(f"transparent {kind}", saved(clear, kind), (255, 255, 255))
    yield picture("half transparent PNG", saved(flat("RGBA", (0, 0, 0, 128)), "PNG"), (127, 127, 127))
    yield picture("grey with alpha PNG", saved(flat("LA", (0, 0)), "PNG"), (255, 255, 255))
    for orientation in (3, 6, 8):
        size = (48, 64) if orientation == 3 else (64, 48)
        yield picture(f"JPEG held turned by {orientation}", saved(red, "JPEG", exif=exif(orientation)), size=size)
    yield picture("PNG held turned", saved(red, "PNG", exif=exif(6)[6:]), size=(64, 48))
    yield picture("JPEG with damaged metadata", saved(red, "JPEG", exif=b"Exif\0\0nothing of use"))
    frames = [flat("RGB", (10, 20, 250)) for _ in range(3)]
    for kind in ("GIF", "WEBP", "PNG", "TIFF"):
        data = saved(red, kind, save_all=True, append_images=frames)
        yield picture(f"animated {kind}", data)
    for compression in ("tiff_lzw", "tiff_adobe_deflate", "jpeg", "packbits"):
        yield picture(f"TIFF of {compression}", saved(red, "TIFF", compression=compression))
    yield picture("big TIFF", saved(red, "TIFF", big_tiff=True))
    yield picture("BMP of 8 bits", saved(flat("L", 90), "BMP"), (90, 90, 90))
    yield picture("JPEG and text behind it", saved(red, "JPEG") + b"a note" * 50)
    yield picture("two pixels wide", saved(flat("RGB", RED, (2, 60)), "PNG"), size=(60, 2))


def pictures_refused() -> Iterator[Odd]:
    red = made.noise(48, 64)
    for kind in ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "AVIF", "GIF"):
        data = made.picture(red, kind)
        yield refused(f"cut {kind}", "image", data[: len(data) // 2])
        yield refused(f"header of {kind} only", "image", data[:24], INVALID, UNSUPPORTED)
    yield refused("nothing", "image", b"")
    yield refused("no picture at all", "image", b"hello, this is text", UNSUPPORTED)
    yield refused("zeros", "image", bytes(4096), UNSUPPORTED)
    yield refused("a vector drawing", "image", b"<svg xmlns='http://www.w3.org/2000/svg'/>", UNSUPPORTED)
    yield refused("HEIC", "image", b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(64), UNSUPPORTED)
    yield refused("PostScript", "image", b"%!PS-Adobe-3.0 EPSF-3.0\n", UNSUPPORTED)
    yield refused("sound as picture", "image", made.sound(made.tone(0.1)), UNSUPPORTED)
    yield refused("a page of 60000 x 60000", "image", raw_png(60000, 60000, 8, 2, b""), LARGE)
    yield refused("a page of 12000 x 12000", "image", raw_png(12000, 12000, 8, 2, b""), LARGE)
    yield refused("one pixel", "image", saved(flat("RGB", RED, (1, 1)), "PNG"))
    yield refused("a line", "image", saved(flat("RGB", RED, (900, 3)), "PNG"), LARGE)
    yield refused("no width", "image", raw_png(0, 48, 8, 2, b""))
    yield refused("float TIFF", "image", saved(flat("F", 0.5), "TIFF"), UNSUPPORTED)
    yield refused("TIFF without a directory", "image", b"II*\0\xff\xff\xff\x7f" + bytes(32))
    yield refused("TIFF with tiles of a terabyte", "image", tiled(1 << 20, 1 << 20), LARGE, INVALID)
    yield refused(
        "JPEG of endless scans", "image", saved(flat("RGB", RED), "JPEG") + b"\xff\xda" * 200, "media_too_complex"
    )


def tiled(width: int, height: int) -> bytes:
    """A TIFF of 64 x 48 with one tile of `width` x `height`."""
    tags = {256: 64, 257: 48, 258: 8, 259: 8, 262: 1, 277: 1, 322: width, 323: height, 324: 8, 325: 64}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return b"II*\0\x08\0\0\0" + struct.pack("<H", len(tags)) + entries + bytes(100)


def received(name: str, data: bytes, seconds: float) -> Odd:
    return Odd(name, "audio", data, (round(seconds * 16000),))


def sounds() -> Iterator[Odd]:
    tone = made.tone
    yield received("8 kHz", made.sound(tone(0.5, 8000), 8000), 0.5)
    yield received("96 kHz with 6 channels", made.sound(tone(0.3, 96000, 6), 96000), 0.3)
    yield received("192 kHz", made.sound(tone(0.1, 192000), 192000), 0.1)
    yield received("silence", made.sound(np.zeros((1, 8000), np.float32)), 0.5)
    yield received("full scale", made.sound(np.ones((1, 8000), np.float32)), 0.5)
    yield received("eight bits", made.sound(tone(0.5), codec="pcm_u8"), 0.5)
    yield received("float samples", made.sound(tone(0.5), codec="pcm_f32le"), 0.5)
    yield received("double samples", made.sound(tone(0.5), codec="pcm_f64le"), 0.5)
    yield received("phone companding", made.sound(tone(0.5, 8000), 8000, codec="pcm_mulaw"), 0.5)
    yield received("FLAC of 24 bits", made.sound(tone(0.5, 48000, 2), 48000, "flac", "flac"), 0.5)
    yield received("a film's sound", made.film(made.ramp(10), track=tone(1.0)), 1.0)
    open_ended = bytearray(made.sound(tone(0.5)))
    open_ended[4:8] = b"\xff\xff\xff\xff"
    yield received("WAV written to a pipe", bytes(open_ended), 0.5)
    wav, broken = made.sound(tone(0.5)), made.sound(np.full((1, 8000), np.nan, np.float32), codec="pcm_f32le")
    yield refused("samples that are no numbers", "audio", broken)
    yield refused("infinite samples", "audio", made.sound(np.full((1, 800), np.inf, np.float32), codec="pcm_f32le"))
    loud = np.tile(np.float32([[3e38, -3e38]]), 4000)
    yield refused("samples as loud as floats go", "audio", made.sound(loud, 8000, codec="pcm_f32le"))
    yield refused("channels whose sum is no number", "audio", made.sound(np.stack([loud[0]] * 2), codec="pcm_f32le"))
    yield received("integers held as floats", made.sound(tone(0.5, 8000) * 32768, 8000, codec="pcm_f32le"), 0.5)
    yield refused("cut WAV", "audio", wav[: len(wav) // 2])
    yield refused("WAV header only", "audio", wav[:44])
    yield refused("no samples", "audio", made.sound(np.zeros((1, 0), np.float32)))
    yield refused("ten milliseconds", "audio", made.sound(tone(0.01)))
    for container, codec in (("flac", "flac"), ("ogg", "libopus"), ("webm", "libopus"), ("mp4", "aac")):
        data = made.sound(tone(1.0), 16000 if codec != "libopus" else 48000, container, codec)
        yield refused(f"cut {container}", "audio", data[: len(data) // 2])
    yield refused("a playlist", "audio", b"#EXTM3U\nhttp://10.0.0.1/a.mp3\n", UNSUPPORTED)
    yield refused("MIDI", "audio", b"MThd\0\0\0\x06\0\0\0\x01\0\x60MTrk", UNSUPPORTED)
    yield refused("a picture as sound", "audio", saved(flat("RGB", RED), "PNG"), UNSUPPORTED)
    yield refused("a film without sound", "audio", made.film(made.ramp(5)))
    yield refused("4 kHz", "audio", made.sound(tone(0.5, 4000), 4000), UNSUPPORTED)
    yield refused("longer than is heard", "audio", made.sound(tone(7.0, 8000), 8000), LARGE)


def seen(name: str, data: bytes, frames: int, size: tuple[int, int] = (64, 96)) -> Odd:
    return Odd(name, "video", data, (frames, *size))


def films() -> Iterator[Odd]:
    ramp = made.ramp(12)
    yield seen("one frame", made.film(made.ramp(1)), 1)
    yield seen("no sound", made.film(ramp), 12)
    yield seen(
        "variable rate", made.film(ramp, times=[0, 40, 80, 500, 520, 900, 910, 2000, 2100, 2500, 2600, 2900]), 12
    )
    yield seen("held turned", made.film(ramp, rotation=90), 12, (96, 64))
    yield seen("WebM", made.film(ramp, container="webm", codec="libvpx"), 12)
    yield seen("Matroska", made.film(ramp, container="matroska"), 12)
    yield seen("QuickTime", made.film(ramp, container="mov"), 12)
    yield seen("ten bits", made.film(ramp, pix_fmt="yuv420p10le"), 12)
    yield seen("colour at full size", made.film(ramp, pix_fmt="yuv444p"), 12)
    yield seen("a key frame each", made.film(ramp, options={"g": "1"}), 12)
    yield seen("GIF", gif(ramp), 12)
    yield seen("GIF of uneven delays", gif(ramp, [20, 500] * 6), 12)
    yield seen("damaged in the middle", damaged(made.ramp(12), 4, 8), 12)
    whole = made.film(ramp)
    yield refused("cut film", "video", whole[: len(whole) // 2])
    yield refused("film without an index", "video", whole[: whole.rindex(b"moov") - 4])
    yield refused("film header only", "video", whole[:40])
    matroska = made.film(ramp, container="matroska")
    yield refused("cut Matroska", "video", matroska[: len(matroska) // 2])
    yield refused("half a GIF's header", "video", gif(ramp)[:9])
    yield refused("sound as film", "video", made.sound(made.tone(0.3), container="mp4", codec="aac"))
    yield refused("MPEG-4 of old", "video", made.film(ramp, codec="mpeg4"), UNSUPPORTED)
    yield refused("a picture as film", "video", saved(flat("RGB", RED), "PNG"), UNSUPPORTED)
    yield refused("subtitles", "video", b"1\n00:00:01,000 --> 00:00:02,000\nhello\n", UNSUPPORTED)
    yield refused("a list of files", "video", b"ffconcat version 1.0\nfile '/etc/passwd'\n", UNSUPPORTED)
    yield refused("longer than is seen", "video", made.film(made.ramp(20), fps=2), LARGE)


def gif(frames: np.ndarray, delays: int | list[int] = 100) -> bytes:
    first, *others = (Image.fromarray(frame) for frame in frames)
    return saved(first, "GIF", save_all=True, append_images=others, duration=delays)


def damaged(frames: np.ndarray, first: int, end: int, group: int = 6) -> bytes:
    """An MP4 whose packets `first` to `end` are damaged after their headers."""
    import av

    grain = np.random.default_rng(0).integers(0, 40, frames.shape)  # without noise a packet has only a few bytes
    film = bytearray(made.film((frames + grain).clip(0, 255).astype(np.uint8), options={"g": str(group), "bf": "0"}))
    with av.open(io.BytesIO(bytes(film))) as container:
        packets = [(packet.pos, packet.size) for packet in container.demux(video=0) if packet.size]
    for at, size in packets[first:end]:
        for k in range(at + 40, at + size - 2, 7):
            film[k] ^= 0xFF
    return bytes(film)


MAKERS: tuple[Callable[[], Iterator[Odd]], ...] = (pictures_read, pictures_refused, sounds, films)


def odd_files() -> list[Odd]:
    return [odd for make in MAKERS for odd in make()]
