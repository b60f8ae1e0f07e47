"""Upload: a file on its way from a form to the disk, never whole in memory.

Owner: the handler's task. In: pieces, as the form's parser finds them. Out: a stored file, or no trace. Bytes are
reserved before they are buffered; a buffer of a MiB is written in the pool.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from types import TracebackType
from typing import Self

from server.batches.files import Files
from server.batches.records import FileRecord, new_id
from server.errors import queue_full

BUFFER = 1 << 20


class Upload:
    """One upload; a context manager that removes what `store` has not stored."""

    advice = "split it into several files"  # for a file that is too large

    def __init__(self, files: Files, key: str, client: str) -> None:
        """Raises the 429 if too many uploads run."""
        if not files.uploads.take(client, 1):
            raise queue_full(1, "too many files are being uploaded at this moment; try again later")
        self.id = new_id("file-")
        self.size = 0
        self._files, self._key, self._client = files, key, client
        self._buffer = bytearray()
        self._file: io.FileIO | None = None
        self._stored = False

    def write(self, data: memoryview) -> None:
        """Take a piece; `flush` brings it to the disk."""
        self._files.reserve(self._key, len(data))
        self.size += len(data)
        self._buffer += data

    async def flush(self, least: int = BUFFER) -> None:
        """Write the buffer if it has at least `least` bytes."""
        if len(self._buffer) >= least:
            data, self._buffer = self._buffer, bytearray()
            await self._files.on_disk(lambda: self._append(data))

    async def store(self, record: FileRecord) -> None:
        """End the upload: content and record are on the disk."""
        await self.flush(0)
        await self._files.on_disk(self._finish)
        await self._files.add(record)
        self._stored = True

    def _append(self, data: bytearray) -> None:
        if self._file is None:
            self._file = self._place.open("xb", buffering=0)
            os.fchmod(self._file.fileno(), 0o600)
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]

    def _finish(self) -> None:
        assert self._file is not None, "flush(0) makes the file"
        os.fsync(self._file.fileno())
        self._file.close()

    def _remove(self) -> None:
        if self._file is not None:
            self._file.close()
            self._place.unlink(missing_ok=True)

    @property
    def _place(self) -> Path:
        return self._files.place_of(self.id)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._files.uploads.give(self._client, 1)
        if not self._stored:
            self._files.release(self._key, self.size)
            await self._files.on_disk(self._remove)
