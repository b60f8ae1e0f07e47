"""The body of /v1/batches."""

from __future__ import annotations

from typing import Annotated

import msgspec

from server.schema.fields import said


class OutputExpiry(msgspec.Struct, kw_only=True):
    """When the files of the answers are deleted."""

    anchor: Annotated[str, said("The moment from which the seconds count: created_at of the file.", "created_at")]
    seconds: Annotated[int, said("Seconds until the file is deleted, from 3600 to 2592000.", 86400)]


class BatchBody(msgspec.Struct, kw_only=True):
    """A new batch."""

    input_file_id: Annotated[str, said("The id of the file with the requests.", "file-5f0c")]
    endpoint: Annotated[str, said("The path of all requests.", "/v1/chat/completions")]
    completion_window: Annotated[str, said("The time for the whole batch: 1h to 168h.", "24h")]
    metadata: Annotated[dict[str, str] | None, said("At most 16 texts that the batch object repeats.")] = None
    output_expires_after: Annotated[
        OutputExpiry | None, said("When the files of the answers are deleted; without it, a client deletes them.")
    ] = None
