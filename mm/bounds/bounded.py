"""Bounded: a file that may be opened, and the most memory that opening it takes; the refusals that all containers
share.

Owner: none, values and pure functions. In: counts that a walker has read. Out: a MediaError that names the counts in
the file and what is allowed.
"""

from __future__ import annotations

from dataclasses import dataclass

from mm.errors import MediaError, invalid

LEAST_ALLOWED = 24 << 20  # bytes that opening any file may take, in addition to twice the file's size
# FFmpeg buffers packets until it has identified every stream; these are the most bytes of packets that it buffers. Each
# packet takes 460 bytes in addition to its data (measured).
PROBED_SOUND, PROBED_FILM = 1 << 19, 5_000_000
PACKET = 512


@dataclass(frozen=True, slots=True)
class Bounded:
    """A file's bytes without its tags, and the most memory in bytes that opening them takes."""

    data: bytes
    opening: int = 0


def allowed(size: int) -> int:
    """Bytes of memory that opening a file of `size` bytes may take."""
    return LEAST_ALLOWED + 2 * size


def require(opening: int, size: int, what: str) -> int:
    """Returns `opening` if a file of `size` bytes may take so much memory. `what`: the part that the file has too many
    of.
    """
    if opening > allowed(size):
        raise too_complex(
            f"reading the file's {what} takes about {(opening >> 20) + 1} MiB; for its {size} bytes "
            f"{allowed(size) >> 20} MiB are allowed; write the file again with fewer of them"
        )
    return opening


def too_complex(text: str) -> MediaError:
    return MediaError(400, "media_too_complex", text)


def promises(what: str, count: int, size: int) -> MediaError:
    """The refusal of a table whose count is larger than its bytes can hold."""
    return invalid(f"the file is damaged: it promises {count} {what} in {size} bytes, which cannot hold them")
