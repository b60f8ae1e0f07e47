"""Detects a file's format from its first bytes; names, headers and media types from clients are ignored.

Pure functions, any thread. In: bytes. Out: a file format that the `*_formats` limits name, or None. The format also
chooses the one demuxer or parser that reads the bytes, so no parser of playlists or subtitles ever reads them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.base.request import Modality


# Brands of ISO files that are pictures, not films.
_HEIC_BRANDS = {b"heic", b"heix", b"hevc", b"heim", b"heis", b"mif1", b"msf1"}
_TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")  # little-endian and big-endian; 32-bit and 64-bit offsets
_OLD_QUICKTIME = {b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot"}
MEDIA_KINDS = ("image", "audio", "video")  # the first parts of media types that name a modality


def sniff(data: bytes | memoryview) -> str | None:
    """The format of `data`, or None if no modality reads it."""
    head = bytes(data[:64])
    if head[:3] == b"\xff\xd8\xff":
        return "jpeg"
    if head[:8] == b"\x89PNG\r\n\x1a\n":
        return "png"
    if head[:6] in (b"GIF87a", b"GIF89a"):
        return "gif"
    if head[:2] == b"BM":
        return "bmp"
    if head[:4] in _TIFF:
        return "tiff"
    if head[:4] in (b"RIFF", b"RF64"):
        return {b"WAVE": "wav", b"WEBP": "webp"}.get(head[8:12])
    if head[:4] == b"fLaC":
        return "flac"
    if head[:4] == b"OggS":
        return "ogg"
    if head[:4] == b"\x1aE\xdf\xa3":
        return "webm" if b"webm" in head else "mkv"
    if head[4:8] == b"ftyp":
        return _iso_brand(head[8:12])
    if head[4:8] in _OLD_QUICKTIME:
        return "mov"
    if head[:3] == b"ID3" or _is_mpeg_audio(head):
        return "mp3"
    return None


def as_audio(file_format: str | None) -> str | None:
    """The audio format under which a file's sound track is read: films hold sound too."""
    return {"mp4": "m4a", "mov": "m4a", "mkv": "webm"}.get(file_format or "", file_format)


def agrees(mime: str, modality: Modality) -> bool:
    """Whether a data: URL's media type allows this modality.

    Only a type of another modality disagrees: clients write one type before every picture, and the first bytes decide
    the format anyway. Films hold sound, sound comes in film containers, and a GIF is a film or a picture.
    """
    kind = mime.partition("/")[0]
    allowed = {"image": ("image",), "audio": ("audio", "video"), "video": ("video", "audio")}[modality]
    return kind in allowed or kind not in MEDIA_KINDS or (modality == "video" and mime == "image/gif")


def _iso_brand(brand: bytes) -> str | None:
    if brand in (b"avif", b"avis"):
        return "avif"
    if brand in _HEIC_BRANDS:
        return "heic"  # no modality reads HEIC, and the refusal names it
    if brand in (b"M4A ", b"M4B ", b"M4P "):
        return "m4a"
    return "mov" if brand == b"qt  " else "mp4"


def _is_mpeg_audio(head: bytes) -> bool:
    """Whether the bytes begin an MPEG audio frame: 11 sync bits, a layer (00 is AAC), a valid bitrate and
    sample rate.
    """
    if len(head) < 4 or head[0] != 0xFF or head[1] & 0xE0 != 0xE0:
        return False
    return head[1] & 0x06 != 0 and head[1] & 0x18 != 0x08 and head[2] & 0xF0 != 0xF0 and head[2] & 0x0C != 0x0C
