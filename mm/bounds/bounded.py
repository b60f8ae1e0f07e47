"""Bounded: a file that may be opened, and what opening it takes at most; the refusals that all containers share.

Owner: none, values and pure functions. In: counts that a walker has read. Out: a MediaError with what the file promises
and what is allowed.
"""

from __future__ import annotations

from dataclasses import dataclass

from mm.errors import MediaError, invalid

LEAST_ALLOWED = 24 << 20  # bytes that opening any file may take; larger files may take twice their size more
# FFmpeg reads packets until it knows every stream, and holds them; so many bytes of packets at most. Each packet takes
# 460 bytes on top of its data, measured.
PROBED_SOUND, PROBED_FILM = 1 << 19, 5_000_000
PACKET = 512


@dataclass(frozen=True, slots=True)
class Bounded:
    """A file's bytes without its tags, and the bytes that opening them takes at most."""

    data: bytes
    opening: int = 0


def allowed(size: int) -> int:
    """What opening a file of so many bytes may take."""
    return LEAST_ALLOWED + 2 * size


def require(opening: int, size: int, what: str) -> int:
    """`opening`, if a file of so many bytes may take it. `what` the file holds too many of."""
    if opening > allowed(size):
        raise too_complex(
            f"reading the file's {what} takes about {(opening >> 20) + 1} MiB; for its {size} bytes "
            f"{allowed(size) >> 20} MiB are allowed; write the file again with fewer of them"
        )
    return opening


def too_complex(text: str) -> MediaError:
    return MediaError(400, "media_too_complex", text)


def promises(what: str, count: int, size: int) -> MediaError:
    """A table that is longer than the bytes it stands in."""
    return invalid(f"the file is damaged: it promises {count} {what} in {size} bytes, which cannot hold them")
