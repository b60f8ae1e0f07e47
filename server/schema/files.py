"""The form of /v1/files, without its `file`."""

from __future__ import annotations

from typing import Annotated

import msgspec

from server.schema.fields import said


class FileForm(msgspec.Struct, kw_only=True):
    """The texts of an upload."""

    purpose: Annotated[str, said("What the file is for; batch is the only purpose.", "batch")]
    anchor: Annotated[str | None, said("The moment from which the file's seconds count: created_at.", "created_at")] = (
        msgspec.field(default=None, name="expires_after[anchor]")
    )
    seconds: Annotated[int | None, said("Seconds until the file is deleted, from 3600 to 2592000.", 86400)] = (
        msgspec.field(default=None, name="expires_after[seconds]")
    )
