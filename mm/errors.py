"""MediaError: the only exception that leaves mm.

Owner: none, a value; raised on the loop and in the pool. In: a cause found by our own checks. Out: an HTTP status, a
stable reason, a text for clients, and the path of the field at fault. The modules that raise errors write their texts;
a library's error text is never passed on, because it may hold paths, addresses and versions.
"""

from __future__ import annotations

NOT_ALLOWED = (
    "this media URL is not allowed by the server; its operator decides with --media-schemes, --allowed-media-domains "
    "and --allowed-local-media-path"
)


class MediaError(Exception):
    """A media item, or a request's set of items, cannot be served. The loader sets `param` when it knows the field."""

    def __init__(
        self, status: int, reason: str, message: str, param: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.message = message
        self.param = param
        self.retry_after = retry_after  # seconds, with 429


def invalid(message: str) -> MediaError:
    """Corrupt, truncated or empty media."""
    return MediaError(400, "media_invalid", message)


def unsupported(message: str) -> MediaError:
    """A format, codec, mode or modality that is not on our list."""
    return MediaError(400, "media_unsupported", message)


def too_large(message: str, status: int = 400) -> MediaError:
    """Above a limit; 422 when a remote server sent it, 400 otherwise."""
    return MediaError(status, "media_too_large", message)


def not_allowed() -> MediaError:
    """One text for everything that S13 and S16 refuse, so that errors reveal neither the allow list nor the disk."""
    return MediaError(403, "media_url_not_allowed", NOT_ALLOWED)


def fetch_failed() -> MediaError:
    """One text for blocked, unresolved, refused, late and non-200, so that errors do not reveal the network."""
    return MediaError(422, "media_fetch_failed", "the media could not be fetched from its URL")


def busy(message: str, retry_after: float = 1.0) -> MediaError:
    """No room for more media now."""
    return MediaError(429, "media_busy", message, retry_after=retry_after)
