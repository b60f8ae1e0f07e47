"""Bytes that come with the request: data: URLs and bare base64 (SECURITY S17).

Pure functions. `parse_data_url` and `base64_size` read only lengths and run on the loop. `decode_base64` reads every
byte and runs in the pool, a piece at a time, so that the GIL is free in between. msgspec decodes each piece as a JSON
string: this takes a third of the time of `binascii`, and the first token waits for it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec

from mm.errors import MediaError

_MAX_HEADER = 256
# data:<type>;base64, where the type may carry parameters (audio/webm;codecs=opus), or a star (image/*).
_HEADER = re.compile(r"data:([a-z]+/(?:\*|[a-z0-9.+-]+))((?:;[a-z0-9-]+=[a-z0-9.,_\"-]+)*);base64,", re.IGNORECASE)
_FOREIGN = re.compile(r"[^A-Za-z0-9+/=]")  # any character that is not base64
_PICTURES = ("jpeg", "jpg", "png", "webp", "bmp")  # video/<one of these> is a list of pictures
_PIECE = 1 << 18  # characters; a multiple of 4
_decoder = msgspec.json.Decoder(bytes)


@dataclass(frozen=True, slots=True)
class Embedded:
    """Base64 text inside a string: where it starts and ends, how many bytes it holds, its declared media type."""

    text: str
    start: int
    end: int
    size: int
    mime: str


@dataclass(frozen=True, slots=True)
class EmbeddedPictures:
    """The pictures of a film, in their order, inside one string."""

    pictures: tuple[Embedded, ...]

    @property
    def size(self) -> int:
        """Bytes of all pictures."""
        return sum(picture.size for picture in self.pictures)


def parse_data_url(url: str) -> Embedded:
    """Parse the header of a data: URL and compute the size of its data, without decoding."""
    start, mime = _header(url)
    return _embedded(url, start, len(url), mime)


def parse_film_url(url: str, most_pictures: int) -> Embedded | EmbeddedPictures:
    """As parse_data_url, for a film, which may be a list of pictures: `data:video/jpeg;base64,A,B,C`.

    `most_pictures` is checked before anything is computed for each picture.
    """
    start, mime = _header(url)
    kind, _, form = mime.partition("/")
    count = url.count(",", start) + 1
    if count == 1 and (kind != "video" or form not in _PICTURES):
        return _embedded(url, start, len(url), mime)
    if count > most_pictures:
        raise MediaError(
            400, "media_too_large", f"the video has {count} pictures; at most {most_pictures} frames are allowed"
        )
    pictures = []
    for _ in range(count):
        end = url.find(",", start)
        end = len(url) if end < 0 else end
        pictures.append(_embedded(url, start, end, mime))
        start = end + 1
    return EmbeddedPictures(tuple(pictures))


def parse_base64(text: str) -> Embedded:
    """Bare base64, as in `input_audio`."""
    return _embedded(text, 0, len(text), "")


def _header(url: str) -> tuple[int, str]:
    """(where the data starts, the media type)."""
    match = _HEADER.match(url[:_MAX_HEADER])
    if match is None:
        raise invalid_data_url("a data: URL must read data:<type>;base64,<data>")
    return match.end(), match.group(1).lower()


def _embedded(text: str, start: int, end: int, mime: str) -> Embedded:
    return Embedded(text, start, end, base64_size(text, start, end), mime)


def base64_size(text: str, start: int, end: int) -> int:
    """Number of bytes that text[start:end] decodes to; raises MediaError if its length does not fit the padding."""
    length = end - start
    if length % 4 and any(text.find(space, start, end) >= 0 for space in "\n\r "):
        raise invalid_data_url("base64 must stand on one line, without spaces (base64 -w0 writes it so)")
    if length == 0 or length % 4:
        raise invalid_data_url(f"base64 comes in groups of four characters; got {length}")
    return length // 4 * 3 - (2 if text.endswith("==", start, end) else 1 if text.endswith("=", start, end) else 0)


def decode_base64(source: Embedded) -> bytes:
    """Decode strictly: the standard alphabet, no spaces, padding only at the end."""
    starts = range(source.start, source.end, _PIECE)
    pieces = [_decoded(source.text[start : min(start + _PIECE, source.end)]) for start in starts]
    data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
    if len(data) != source.size:  # padding before the last piece
        raise invalid_data_url("the base64 padding does not fit the length")
    return data


def _decoded(text: str) -> bytes:
    try:
        if "\\" not in text:  # an escape in the JSON string could encode other characters
            return _decoder.decode(f'"{text}"')
    except ValueError:
        pass
    foreign = _FOREIGN.search(text)
    got = ascii(foreign[0]) if foreign else "padding before the end"
    allowed = "A-Z a-z 0-9 + / and padding, no spaces or line breaks"
    raise invalid_data_url(f"the data is not strict base64: got {got}; allowed are {allowed}")


def invalid_data_url(message: str) -> MediaError:
    return MediaError(400, "data_url_invalid", message)
