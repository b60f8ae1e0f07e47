"""The entry point of this package: checks a file of any format before a library opens it.

Pure functions, pool. In: encoded bytes, the format that `magic` has named, and whether the file is read as a film. Out:
Bounded, or the MediaError that refuses the file.
"""

from __future__ import annotations

from mm.bounds import iso, matroska, ogg, tags
from mm.bounds.bounded import PROBED_FILM, PROBED_SOUND, Bounded
from mm.bounds.pictures import PICTURES


def bound_picture(data: bytes, file_format: str) -> bytes:
    """The bytes that Pillow opens."""
    bound = PICTURES.get(file_format)
    return data if bound is None else bound(data)


def bound_media(data: bytes, file_format: str, is_film: bool) -> Bounded:
    """The bytes that FFmpeg opens, and the most memory that opening them takes."""
    probed = PROBED_FILM if is_film else PROBED_SOUND
    if file_format in ("mp4", "mov", "m4a"):
        return Bounded(data, iso.opening_bytes(data, probed))
    if file_format in ("mkv", "webm"):
        return Bounded(data, matroska.opening_bytes(data, probed))
    if file_format == "ogg":
        return Bounded(data, ogg.opening_bytes(data, probed))
    cut = {"mp3": tags.without_id3, "wav": tags.without_chunks, "flac": tags.without_blocks}.get(file_format)
    return Bounded(data if cut is None else cut(data))
