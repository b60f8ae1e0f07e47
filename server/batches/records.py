"""FileRecord: the facts about a stored file, as the folder holds them, and as clients get them.

Owner: none, values. Times are whole seconds since 1970.
"""

from __future__ import annotations

import secrets
from typing import Any, Literal

import msgspec

Purpose = Literal["batch", "batch_output"]
Record = msgspec.Struct


def new_id(prefix: str) -> str:
    """An id that no client can guess."""
    return prefix + secrets.token_hex(16)


class FileRecord(Record, kw_only=True):
    """A complete file. `key`: the name of the API key that owns it."""

    id: str
    key: str
    filename: str
    purpose: Purpose
    bytes: int
    created_at: int
    expires_at: int | None = None

    def public(self) -> dict[str, Any]:
        """The file object of OpenAI's API."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }
