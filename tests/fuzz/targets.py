"""Targets of fuzzing: the functions that receive untrusted bytes first, and valid inputs as their seeds.

A target takes bytes and at most MOST_S seconds. It may raise a refusal (MediaError, ApiError) and nothing else.
"""

from __future__ import annotations

import base64
import functools
import io
from collections.abc import Callable
from dataclasses import dataclass

from PIL import Image

from engine.base.errors import GrammarError
from mm.bounds.check import bound_media, bound_picture
from mm.decode.magic import as_audio, sniff
from mm.decode.whole import check_whole
from mm.errors import MediaError
from mm.sources import decode_base64, parse_base64, parse_data_url
from server.errors import ApiError
from server.flags.limits_flags import LimitsConfig
from server.render.errors import RenderError
from server.structure.patterns import check_pattern, json_pattern, searched
from tests.fuzz import text_targets as texts
from tests.fuzz import wire_targets as wires
from tests.mm import bombs, made, picture_bombs, sound_bombs

MOST_S = 5.0  # seconds per input, on two loaded cores
REFUSALS = (MediaError, ApiError, RenderError, GrammarError)


@dataclass(frozen=True)
class Target:
    """Fuzzing passes each of `seeds`, damaged, to `call`."""

    call: Callable[[bytes], object]
    seeds: Callable[[], list[bytes]]


def open_film(data: bytes) -> None:
    name = sniff(data)
    if name in ("mp4", "mov", "m4a", "mkv", "webm"):
        check_whole(data, name)
        bound_media(data, name, is_film=True)


def open_sound(data: bytes) -> None:
    name = sniff(data)
    if name in ("ogg", "mp3", "wav", "flac", "m4a", "webm"):
        check_whole(data, as_audio(name))
        bound_media(data, name, is_film=False)


def open_picture(data: bytes) -> None:
    name = sniff(data)
    if name in ("png", "gif", "jpeg", "tiff", "webp", "avif", "bmp"):
        bound_picture(data, name)


def read_url(data: bytes) -> None:
    text = data.decode("latin1")
    for parse in (parse_data_url, parse_base64):
        try:
            source = parse(text)
            assert len(decode_base64(source)) == source.size
        except MediaError:
            continue


def read_pattern(data: bytes) -> None:
    """A client's regular expression: a pattern that passes the check is translated without an error."""
    text = data.decode("utf-8", "ignore")
    if not check_pattern(text, LimitsConfig()):
        json_pattern(text)
        searched(text)


def films() -> list[bytes]:
    return [
        made.film(made.ramp(4)),
        made.film(made.ramp(3), container="webm", codec="libvpx-vp9"),
        bombs.edits_of(20, 50),
        bombs.runs_of_fragments(4, 10),
        bombs.many_fragments(4, 3),
        bombs.segment_index(8, 3),
        bombs.laced_blocks(3, 4),
        bombs.tagged_matroska(4),
        bombs.stripped_headers(3, 64),
    ]


def sounds() -> list[bytes]:
    tone = made.tone(0.1)
    return [
        made.sound(tone, 16000, "wav"),
        made.sound(tone, 16000, "mp3", "libmp3lame"),
        made.sound(tone, 16000, "flac", "flac"),
        sound_bombs.tagged_wav(2, 64),
        sound_bombs.tagged_riff(4),
        sound_bombs.commented_opus(3),
        sound_bombs.commented_flac(3),
        sound_bombs.ogg_packets(3, 1),
    ]


def pictures() -> list[bytes]:
    pixels = made.noise(6, 9)
    kinds = ("PNG", "JPEG", "GIF", "TIFF", "WEBP", "BMP")
    exif = Image.Exif()
    exif[274] = 6
    held = io.BytesIO()
    Image.fromarray(pixels).save(held, "JPEG", exif=exif)
    return [
        *(made.picture(pixels, kind) for kind in kinds),
        held.getvalue(),
        picture_bombs.texts(3, 64),
        picture_bombs.gif_frames(3),
    ]


def urls() -> list[bytes]:
    encoded = base64.b64encode(bytes(range(64)))
    return [b"data:image/png;base64," + encoded, b"data:audio/wav;codecs=1;base64," + encoded[:-4] + b"AA==", encoded]


def patterns() -> list[bytes]:
    written = ("^[a-z]{2,5}(-\\d+)*$", "(?i:yes|no)\\b.\\s?", '[^\\x00-\\x1f"]+\\u00e9|\\p{L}{1,3}', "a(b(c(d)?)*)+$")
    return [each.encode() for each in written]


TARGETS = {
    "films": Target(open_film, functools.cache(films)),
    "sounds": Target(open_sound, functools.cache(sounds)),
    "pictures": Target(open_picture, functools.cache(pictures)),
    "data URLs": Target(read_url, functools.cache(urls)),
    "patterns": Target(read_pattern, functools.cache(patterns)),
    "bodies": Target(texts.read_body, functools.cache(texts.bodies)),
    "values of bodies": Target(texts.read_values, lambda: texts.numbers_of(texts.BODIES)),
    "templates": Target(texts.render_template, functools.cache(texts.templates)),
    "events": Target(texts.read_events, functools.cache(texts.events)),
    "answers": Target(texts.read_answer, functools.cache(texts.answers)),
    "grammars": Target(texts.compile_grammar, functools.cache(texts.grammars)),
    "schemas": Target(texts.compile_schema, lambda: texts.numbers_of(texts.VALUES)),
    "requests": Target(wires.read_requests, lambda: [*wires.http_seeds(), *wires.offers()]),
    "frames": Target(wires.read_frames, lambda: [*wires.socket_seeds(), *wires.fragments()]),
}
