"""Batches: all batches by key and id, the order in which they run, and their ends.

Owner: loop. In: new batches, cancellations, the records of an earlier process. Out: records, which the folder holds at
each change of status. A key runs one batch at a time; lines of several keys alternate in the window. A batch that the
end of the process interrupts goes on in the next one.

    validating -> in_progress -> finalizing -> completed        failed: the file is wrong, or the key was removed
                       |-> cancelling -> cancelled   |-> expired
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from starlette.types import ASGIApp

from server.batches.files import Files
from server.batches.folder import Folder
from server.batches.lines import Checked, Rules, check_lines
from server.batches.records import BatchRecord, FileRecord, Problem, Status
from server.batches.run import RETRY_S, Ask, RevokedError, Run
from server.errors import ApiError, queue_full
from server.ops.batch_metrics import BatchCounts, batch_families
from server.ops.places import Places

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from server.flags.batch_flags import BatchFlags

log = logging.getLogger("omniloop")
MOST_BATCHES = 10_000  # records of all keys
MOST_OPEN = 100  # batches of a key that have not ended
REMEMBERED_S = 30 * 24 * 3600  # records of ended batches


@dataclass(slots=True)
class Server:
    """The server around the batches, as they use it."""

    ask: Ask
    unknown_model: Callable[[str | None], str]  # why a model is not served; "": it is
    knows: Callable[[str], bool]  # whether a key still exists
    window: int  # lines that run at one time
    max_line_bytes: int


@dataclass(slots=True)
class Working:
    """The task of a key's batch."""

    record: BatchRecord
    task: asyncio.Task[None]
    end: Status | None = None  # the end that the batch comes to; None: its lines run


def batches_of(flags: BatchFlags, part: float, pool: Executor) -> Batches:
    """Batches and files of a server; `part`: the shares of keys, as in `Shares`."""
    return Batches(Files(Folder(flags.files_dir), flags.files_bytes, part, pool))


class Batches:
    """All batches. Owner: loop."""

    def __init__(self, files: Files) -> None:
        self.files = files
        self.places = Places(0, idle=True)  # of the lines that run, which take none of the clients' places
        self.app: ASGIApp  # answers lines; server/app.py sets it
        self._entries: dict[str, BatchRecord] = {}  # by id, the oldest first
        self._working: dict[str, Working] = {}  # by key
        self._server: Server | None = None
        self._window = asyncio.Semaphore(1)
        self._ended_lines = Counter[bool]()  # by whether they have an answer

    def open(self) -> None:
        """Lock the folder and read its records, before the loop uses this object. Raises ConfigError."""
        self.files.folder.open()
        found = self.files.folder.load("batches", BatchRecord)
        for record in sorted(found, key=lambda record: record.created_at):
            self._entries[record.id] = record
        unended = [record for record in self._entries.values() if not record.ended]
        self.files.open([name for record in unended for name in (record.outputs, record.errors)])

    def start(self, server: Server) -> None:
        """Begin to answer lines."""
        self._server = server
        self._window = asyncio.Semaphore(server.window)
        for record in list(self._entries.values()):
            self._next(record.key)

    async def stop(self) -> None:
        """End all lines that run; what is answered is on the disk, and the next process goes on from there."""
        self._server = None
        tasks = [working.task for working in self._working.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def get(self, key: str, name: str) -> BatchRecord | None:
        record = self._entries.get(name)
        return record if record is not None and record.key == key else None

    def listed(self, key: str) -> list[BatchRecord]:
        """The batches of a key, the oldest first."""
        return [record for record in self._entries.values() if record.key == key]

    def reader_of(self, file: str) -> BatchRecord | None:
        """A batch that still reads a file."""
        return next((each for each in self._entries.values() if each.input_file_id == file and not each.ended), None)

    def families(self) -> Iterator[Metric]:
        """Series for /metrics."""
        unended = sum(not record.ended for record in self._entries.values())
        done, failed = self._ended_lines[True], self._ended_lines[False]
        return batch_families(BatchCounts(unended, self.places.requests, done, failed, self.files.bytes.used))

    async def add(self, record: BatchRecord) -> None:
        """Store a new batch and queue it. Raises ApiError."""
        self._purge()
        if len(self._entries) >= MOST_BATCHES:
            raise queue_full(60, f"this server holds {MOST_BATCHES} batches, which are forgotten after 30 days")
        if sum(each.key == record.key and not each.ended for each in self._entries.values()) >= MOST_OPEN:
            raise queue_full(60, f"this key has {MOST_OPEN} batches that have not ended; wait for one, or cancel it")
        self._entries[record.id] = record
        try:
            await self._save(record)
        except BaseException:
            del self._entries[record.id]
            raise
        self._next(record.key)

    async def cancel(self, record: BatchRecord) -> None:
        """End a batch; answers so far become its files."""
        working = self._working.get(record.key)
        if working is None or working.record is not record:
            if not record.ended:
                record.status = "cancelled"  # at once, so that it cannot start while its record is written
                await self._conclude(record, "cancelled")
        elif working.end is None:
            working.end, record.status = "cancelled", "cancelling"  # its task writes the record
            record.times["cancelling_at"] = int(time.time())
            working.task.cancel()

    def _next(self, key: str) -> None:
        """Start the key's oldest open batch, if none runs."""
        if self._server is None or key in self._working:
            return
        record = next((each for each in self._entries.values() if each.key == key and not each.ended), None)
        if record is not None:
            working = self._working[key] = Working(record, asyncio.ensure_future(self._work(record, self._server)))
            working.task.add_done_callback(lambda task: self._left(record, task))

    def _left(self, record: BatchRecord, task: asyncio.Task[None]) -> None:
        key = record.key
        del self._working[key]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s failed", record.id, exc_info=error)
            record.status, record.times["failed_at"] = "failed", int(time.time())
            record.problems = [Problem(code="internal_error", message="the server failed to run this batch")]
            self.files.pool.submit(self.files.folder.save, "batches", record.id, record)
        self._next(key)

    async def _work(self, record: BatchRecord, server: Server) -> None:
        """One batch to its end."""
        run = Run(record, self.files, server.ask, self._window, server.max_line_bytes, self._ended_lines)
        end: Status = "cancelled" if record.status == "cancelling" else "completed"
        try:
            async with asyncio.timeout(max(0.0, record.expires_at - time.time())):
                if record.status == "validating":
                    if not await self._check(record, server):
                        return
                    await self._note(record, "in_progress")
                if record.status == "in_progress":
                    await run.run(lambda: server.knows(record.key))
        except TimeoutError:
            end = "expired"
        except RevokedError:
            end = "failed"
            record.problems = [Problem(code="key_removed", message="the API key of this batch was removed")]
        except asyncio.CancelledError:
            working, task = self._working[record.key], asyncio.current_task()
            if working.end is None or task is None:
                await run.store_once()
                raise
            task.uncancel()
            end = working.end
            await self._note(record, "cancelling")
        self._working[record.key].end = end
        await run.store()
        if end == "expired":
            await run.expire()
        if end == "completed":
            await self._note(record, "finalizing")
        await self._conclude(record, end)

    async def _check(self, record: BatchRecord, server: Server) -> bool:
        """Check the lines of a batch; False: it failed."""
        file = self.files.get(record.key, record.input_file_id)
        found = Checked()
        if file is None:
            found.add("input_file_missing", "the input file was deleted", param="input_file_id")
        else:
            rules = Rules(record.endpoint, server.unknown_model, server.max_line_bytes)
            path = self.files.place_of(file.id)
            found = await self.files.on_disk(lambda: check_lines(path, rules))
        record.total, record.model, record.problems = found.total, found.model, found.problems
        if not found.problems:
            return True
        record.total = 0
        await self._note(record, "failed")
        return False

    async def _conclude(self, record: BatchRecord, end: Status) -> None:
        """Make files of the answers, then end the batch."""
        now = int(time.time())
        for name, kind in ((record.outputs, "output"), (record.errors, "error")):
            size = await self.files.size_of(name)
            if not size:
                continue
            file = FileRecord(
                id=name,
                key=record.key,
                filename=f"{record.id}_{kind}.jsonl",
                purpose="batch_output",
                bytes=size,
                created_at=now,
                expires_at=None if record.output_seconds is None else now + record.output_seconds,
            )
            await self._stored(partial(self.files.add, file))
            if kind == "output":
                record.has_outputs = True
            else:
                record.has_errors = True
        await self._note(record, end)

    async def _note(self, record: BatchRecord, status: Status) -> None:
        """Change a batch's status, with its time, on the disk."""
        record.status = status
        record.times[f"{status}_at"] = int(time.time())
        await self._stored(lambda: self._save(record))

    async def _stored(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do what a full disk may make fail, again until it succeeds."""
        while True:
            try:
                return await work()
            except ApiError as error:
                log.error("a batch waits for its disk: %s", error.message)
                await asyncio.sleep(RETRY_S)

    async def _save(self, record: BatchRecord) -> None:
        await self.files.on_disk(lambda: self.files.folder.save("batches", record.id, record))

    def _purge(self) -> None:
        """Forget batches that ended long ago."""
        before = time.time() - REMEMBERED_S
        for record in list(self._entries.values()):
            if record.ended and record.created_at < before:
                del self._entries[record.id]
                self.files.pool.submit(self.files.folder.remove, "batches", record.id)
