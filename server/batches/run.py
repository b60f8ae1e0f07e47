"""Run: one batch from its lines to its files of answers.

Owner: loop; files are read and written in the pool. In: a checked file and a function that answers a line. Out: answers
in two files, in the order of their ends; a line that has an answer there never runs again. Lines run as the window of
all batches has room. Answers are on the disk within a second; if they cannot be written, no further line begins, and
the write is tried again.

    lines -> window -> answer -> pending -> (each second) -> outputs | errors
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

import msgspec

from server.batches.answers import Answers, usage_of
from server.batches.files import Files
from server.batches.inside import Reply
from server.batches.lines import Line, LineReader
from server.batches.records import BatchRecord, new_id
from server.errors import ApiError, invalid

log = logging.getLogger("omniloop")
Ask = Callable[[str, str, bytes], Awaitable[Reply]]  # key, url, body -> answer
FLUSH_S = 1.0
RETRY_S = 10.0  # after a failed write
READ_LINES = 32
BUSY = (429, 503)  # the server has no room for the line now
MOST_WAIT_S = 60.0
FAILED = {"code": "internal_error", "message": "the server failed to answer this line"}
NO_JSON = {"code": "invalid_body", "message": "the line asks for an answer that is no JSON; leave encoding_format out"}
MOST_TRIES = 100  # of a line for which there is no room


class RevokedError(Exception):
    """The batch's key no longer exists."""


class Run:
    """The running lines of a batch. `record`: its counts change here; `run` returns once all answers are stored."""

    def __init__(
        self,
        record: BatchRecord,
        files: Files,
        ask: Ask,
        window: asyncio.Semaphore,
        max_bytes: int,
        ended_lines: Counter[bool],
    ) -> None:
        """`max_bytes`: of a line; `ended_lines`: counts by whether a line has an answer."""
        self.record = record
        self._files = files
        self._ask = ask
        self._window = window
        self._max_bytes = max_bytes
        self._ended_lines = ended_lines
        self._answers = [Answers(files.place_of(name)) for name in (record.outputs, record.errors)]
        self._pending: tuple[list[bytes], list[bytes]] = [], []
        self._writable = asyncio.Event()
        self._writable.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._ending = False

    async def run(self, allowed: Callable[[], bool]) -> None:
        """Answer the lines without an answer, while `allowed`; otherwise raises RevokedError.

        Cancellation ends the lines that run; `store` then brings the answers so far to the disk.
        """
        files, reader = self._files, await self._unanswered()
        flusher = asyncio.ensure_future(self._flush_often())
        try:
            while lines := await files.on_disk(lambda: reader.next(READ_LINES)):
                for line in lines:
                    await self._writable.wait()
                    await self._window.acquire()
                    if not allowed():
                        self._window.release()
                        raise RevokedError
                    task = asyncio.ensure_future(self._answer(line))
                    self._tasks.add(task)
                    task.add_done_callback(self._ended)
            while self._tasks:
                await asyncio.wait(self._tasks)
        finally:
            self._ending = True
            await ended([flusher, *self._tasks])
            reader.close()
        await self.store()

    async def store(self) -> None:
        """Bring all answers so far to the disk, however long the disk is full."""
        stored = await self.store_once()
        while not stored:
            await asyncio.sleep(RETRY_S)
            stored = await self.store_once()

    async def expire(self) -> None:
        """Write the error of each line without an answer."""
        files, reader = self._files, await self._unanswered()
        error = {"code": "batch_expired", "message": "the batch's time ended before this line was answered"}
        try:
            while lines := await files.on_disk(lambda: reader.next(1000)):
                for line in lines:
                    self._add(line, None, error)
                await self.store()
        finally:
            reader.close()

    async def _unanswered(self) -> LineReader:
        """A reader of the lines without an answer."""
        files, path = self._files, self._files.place_of(self.record.input_file_id)
        done = await files.on_disk(self._recover)
        return await files.on_disk(lambda: LineReader(path, self._max_bytes, done))

    def _recover(self) -> set[str]:
        """The ids of the lines that have an answer; counts them."""
        record, found = self.record, set[str]()
        record.usage = msgspec.structs.replace(record.usage, input=0, cached=0, output=0, reasoning=0)
        counts = []
        for answers in self._answers:
            held = answers.size
            answers.size = 0
            names, usage = answers.recover()
            self._account(answers.size - held)
            record.usage.add(usage)
            counts.append(len(names))
            found |= names
        record.completed, record.failed = counts
        return found

    def _account(self, more: int) -> None:
        """Count bytes that are on the disk already, as far as there is room."""
        room = self._files.bytes.limit - self._files.bytes.used
        self._files.bytes.take_any(self.record.key, max(0, min(more, room)))

    async def _answer(self, line: Line) -> None:
        """Answer one line; while the server has no room, try again."""
        for number in range(MOST_TRIES):
            try:
                reply = await self._ask(self.record.key, line.url, bytes(line.body))
            except Exception as error:
                log.error("a line of %s failed", self.record.id, exc_info=error)
                self._add(line, None, FAILED)
                return
            if self._ending:
                return
            if reply.status not in BUSY or number == MOST_TRIES - 1:
                break
            await asyncio.sleep(min(reply.retry_after, MOST_WAIT_S))
        self._add(line, reply if reply.is_json else None, None if reply.is_json else NO_JSON)

    def _add(self, line: Line, reply: Reply | None, error: dict[str, str] | None) -> None:
        fine = reply is not None and reply.status < 400
        response = None
        if reply is not None:
            body = msgspec.Raw(reply.body)
            response = {"status_code": reply.status, "request_id": reply.request_id, "body": body}
            self.record.usage.add(usage_of(reply.body))
        out = {"id": new_id("batch_req_"), "custom_id": line.custom_id, "response": response, "error": error}
        self._ended_lines[fine] += 1
        self._pending[not fine].append(msgspec.json.encode(out) + b"\n")
        if fine:
            self.record.completed += 1
        else:
            self.record.failed += 1

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._window.release()

    async def _flush_often(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S if self._writable.is_set() else RETRY_S)
            await self.store_once()

    async def store_once(self) -> bool:
        """Write the answers so far; returns whether all are written."""
        fine = True
        for number, answers in enumerate(self._answers):
            lines = self._pending[number]
            count, size = len(lines), sum(map(len, lines))
            if not count:
                continue
            try:
                self._reserve(size)
            except ApiError as error:
                fine = self._hold(error.message)
                continue
            job = asyncio.ensure_future(self._files.on_disk(partial(answers.append, list(lines))))
            try:
                await asyncio.shield(job)
            except ApiError as error:
                self._files.release(self.record.key, size)
                fine = self._hold(error.message)
                continue
            except asyncio.CancelledError:
                if not await settled(job):
                    self._files.release(self.record.key, size)
                else:
                    del lines[:count]
                raise
            del lines[:count]
        if fine:
            self._writable.set()
        return fine

    def _reserve(self, size: int) -> None:
        try:
            self._files.reserve(self.record.key, size)
        except ApiError:
            raise invalid(None, "the stored files take all bytes of their share (--files-bytes)") from None

    def _hold(self, why: str) -> bool:
        """Begin no further line until a write succeeds."""
        if self._writable.is_set():
            log.error("%s: its answers cannot be written, so no further line begins: %s", self.record.id, why)
        self._writable.clear()
        return False


async def ended(tasks: Iterable[asyncio.Future[None]]) -> None:
    """Cancel tasks and wait for their ends."""
    for task in (waiting := list(tasks)):
        task.cancel()
    await asyncio.wait(waiting)


async def settled(job: asyncio.Future[None]) -> bool:
    """Wait for a write that was shielded from cancellation; whether it succeeded."""
    await asyncio.wait([job])
    return job.exception() is None
