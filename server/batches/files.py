"""Files: all stored files by key and id, bounded in number, bytes and time (SECURITY S7).

Owner: loop; the disk is read and written in the pool. In: uploads, and the outputs of batches. Out: records, and places
of contents. Keys share the bytes and the number: a key may take more while it holds less than a multiple of the rest.
A file is found by its whole id and its key.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import time
from collections.abc import Callable, Collection
from concurrent.futures import Executor
from pathlib import Path
from typing import TypeVar

from server.batches.folder import Folder
from server.batches.records import FileRecord
from server.errors import ApiError, unavailable
from server.ops.limits import Shares

log = logging.getLogger("omniloop")
T = TypeVar("T")
MOST_FILES = 20_000  # files of all keys
MOST_UPLOADS = 16  # uploads at one time; each buffers about a MiB


class Files:
    """All stored files. Owner: loop."""

    def __init__(self, folder: Folder, most_bytes: int, part: float, pool: Executor) -> None:
        """`part`: the shares of keys, as in `Shares`."""
        self.folder = folder
        self.bytes = Shares(most_bytes, part)
        self.count = Shares(MOST_FILES, part)
        self.uploads = Shares(MOST_UPLOADS, part)
        self.pool = pool
        self._entries: dict[str, FileRecord] = {}  # by id, the oldest first
        self._ends: list[tuple[int, str]] = []  # (expiry, id), a heap

    def open(self, also: Collection[str] = ()) -> None:
        """Read what the folder holds, before the loop uses this object. Contents without a record are removed, except
        `also`: outputs of batches that have not ended.
        """
        found = sorted(self.folder.load("files", FileRecord), key=lambda record: record.created_at)
        names = {record.id for record in found} | set(also)
        for path in (self.folder.root / "files").iterdir():
            if path.suffix != ".json" and path.name not in names:
                path.unlink()
        for record in found:
            if self.folder.content(record.id).exists():
                self.bytes.take_any(record.key, min(record.bytes, self.bytes.limit - self.bytes.used))
                self._index(record)

    def get(self, key: str, name: str) -> FileRecord | None:
        self._purge()
        record = self._entries.get(name)
        return record if record is not None and record.key == key else None

    def listed(self, key: str) -> list[FileRecord]:
        """The files of a key, the oldest first."""
        self._purge()
        return [record for record in self._entries.values() if record.key == key]

    def reserve(self, key: str, size: int) -> None:
        """Take bytes for a file. Raises the 413."""
        self._purge()
        if not self.bytes.take(key, size):
            held, total = self.bytes.used, self.bytes.limit
            text = f"file: stored files take {held} of {total} bytes (--files-bytes), {self.bytes.held(key)} of them "
            raise ApiError(413, "storage_full", text + "this key's; delete files that you need no more", "file")

    def release(self, key: str, size: int) -> None:
        self.bytes.give(key, size)

    async def add(self, record: FileRecord) -> None:
        """Store the record of a file whose content is complete and whose bytes are reserved. Raises ApiError."""
        if record.purpose == "batch" and not self.count.has_room(record.key, 1):
            text = f"file: {self.count.used} files are stored, {self.count.held(record.key)} of them this key's; "
            raise ApiError(413, "storage_full", text + "delete files that you need no more", "file")
        await self.on_disk(lambda: self.folder.save("files", record.id, record))
        self._index(record)

    async def remove(self, record: FileRecord) -> None:
        self._forget(record)
        await self.on_disk(lambda: self.folder.remove("files", record.id))

    async def size_of(self, name: str) -> int:
        """Bytes of a content on the disk; 0: there is none."""
        path = self.folder.content(name)
        return await self.on_disk(lambda: path.stat().st_size if path.exists() else 0)

    async def on_disk(self, work: Callable[[], T]) -> T:
        """Work in the pool. Raises ApiError if the disk fails. A cancelled caller waits for the end of work that has
        begun, because a thread goes on: what the caller does next would change the same files.
        """
        future = self.pool.submit(self._ready, work)
        job = asyncio.wrap_future(future)
        try:
            return await asyncio.shield(job)
        except asyncio.CancelledError:
            if not future.cancel():
                await asyncio.wait([job])
                job.exception()  # has no reader
            raise
        except OSError as error:
            log.error("--files-dir: the disk failed: %s", error.strerror)
            raise unavailable("storage_failed", "the server cannot write to the disk of its files", 30) from None

    def place_of(self, name: str) -> Path:
        return self.folder.content(name)

    def _ready(self, work: Callable[[], T]) -> T:
        if not self.folder.is_open:  # a private folder is made at its first use
            self.folder.open()
        return work()

    def _index(self, record: FileRecord) -> None:
        if record.id not in self._entries:
            self.count.take_any(record.key, 1)
        self._entries[record.id] = record
        if record.expires_at is not None:
            heapq.heappush(self._ends, (record.expires_at, record.id))

    def _forget(self, record: FileRecord) -> None:
        if self._entries.pop(record.id, None) is not None:
            self.count.give(record.key, 1)
            self.bytes.give(record.key, min(record.bytes, self.bytes.held(record.key)))

    def _purge(self) -> None:
        """Remove expired files."""
        now = time.time()
        while self._ends and self._ends[0][0] <= now:
            record = self._entries.get(heapq.heappop(self._ends)[1])
            if record is not None:
                self._forget(record)
                self.pool.submit(self.folder.remove, "files", record.id)
