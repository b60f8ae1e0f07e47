"""MediaLoader: fetches, decodes and processes the media of requests; concurrent, bounded, cancellable.

Owner: loop; decoding and transforms run in the pool. In: MediaRefs in prompt order. Out: Processed items in the same
order, or the first MediaError. Everything that can be refused cheaply is refused before anything is fetched, and memory
is reserved before anything is decoded: `mm/item_job.py` draws the stages of an item.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace

from engine.base.request import Modality
from mm.cache import ProcessorCache
from mm.decode import import_codecs
from mm.errors import MediaError, busy
from mm.fetch import Fetcher
from mm.heap import TRIM_AFTER, trim_heap
from mm.isolation.helpers import Helpers
from mm.item import MediaOptions, MediaRef, Processed
from mm.item_job import ItemJob, Shared
from mm.limits import MediaLimits
from mm.permits import DecodePermits, MediaRequest
from mm.processors.base import Processor
from mm.recording import Recording, record
from mm.report import MediaReport
from mm.transform.quiet import Cutting

_PLURALS: dict[Modality, str] = {"image": "images", "audio": "audio", "video": "video"}


class MediaLoader:
    """One per server. `load` may run concurrently; each call loads one request's media."""

    def __init__(
        self,
        limits: MediaLimits,
        processor: Processor | None,
        pool: concurrent.futures.Executor,
        *,
        options: MediaOptions = MediaOptions(),  # noqa: B008 (a frozen value)
        fetcher: Fetcher | None = None,
        max_decodes: int | None = None,
        row_widths: Mapping[Modality, int] | None = None,
        most_rows: int = 0,
    ) -> None:
        """`row_widths`, `most_rows`: limits of the rows that clients send in place of an encoder's output."""
        self.limits = limits
        self.options = options  # the operator's options, for requests without their own
        self.processor = processor
        self.cache = ProcessorCache(int(limits.mm_processor_cache_gb * 2**30))
        self._pool = pool
        self._fetcher = fetcher or Fetcher(limits, pool)
        self._key = os.urandom(16)  # random, so that clients cannot compute digests
        self.num_slots = max_decodes or max(2, os.cpu_count() or 1)
        self.permits = DecodePermits(limits, self.num_slots)
        self.helpers = Helpers(limits, pool)
        self.planted: Callable[[], None] | None = None  # tests of failures: called where an item's decoder begins
        self.shedding = False  # the server is short of memory and takes no media
        self._requests = 0
        self.trim_at = TRIM_AFTER  # the heap is trimmed when so many bytes have been released in total
        self._client_rows = (row_widths or {}, most_rows)
        if limits.media_isolation != "all":
            pool.submit(import_codecs)  # before a request waits for the import

    def ledger(self) -> dict[str, int]:
        """Counts that are zero when no request is open, and the bytes of the cache, which are only bounded."""
        return {
            "media_requests": self._requests,
            "media_reserved_bytes": self.permits.budget.used,
            "media_fetches": self._fetcher.open,
            "media_stuck": len(self.permits.stuck),
            "media_helpers": len(self.helpers.leased),
            "media_cache_bytes": self.cache.used,
        }

    def stuck_for(self, seconds: float) -> int:
        """Number of pool threads that have worked for longer than this on results for which no request waits."""
        now = time.monotonic()
        return sum(now - since > seconds for since in self.permits.stuck.values())

    async def close(self) -> None:
        self.helpers.close()
        await self._fetcher.close()

    async def load(
        self,
        refs: Sequence[MediaRef],
        *,
        options: MediaOptions | None = None,
        scope: bytes = b"",
        decoding: asyncio.Future[None] | None = None,
        report: MediaReport | None = None,
    ) -> list[Processed]:
        """Load all items of one request; `scope` names the caller (key and salt) for cache and uuids.

        The future `decoding` is set when a first item has been unpacked and its decoder begins. It is set at once if
        other requests load media too, or if the loader cannot know that moment. `report` is filled with counts and
        times of the load.
        """
        if not refs:
            return []
        self._check_counts(refs)
        self._check_room()
        counted = replace(options or self.options, num_pictures=sum(ref.modality == "image" for ref in refs))
        request = MediaRequest(self.limits, counted, scope, decoding, report)
        shared = self._shared()
        jobs = [ItemJob(shared, request, ref) for ref in refs]
        for job in jobs:
            job.check_source()
        self._requests += 1
        if self._requests > 1:  # else a text that waits for `decoding` would queue behind all media
            request.report_decoding()
        try:
            loaded = [await jobs[0].run()] if len(jobs) == 1 else await _all(jobs)
            request.report.note_replaced(loaded)
            return loaded
        finally:
            self._end(request)

    @contextlib.asynccontextmanager
    async def recording(self, data: bytes, cutting: Cutting, scope: bytes) -> AsyncIterator[Recording]:
        """A long sound, decoded and cut into windows; its samples are held until the context is left."""
        self._check_room()
        request = MediaRequest(self.limits, self.options, scope)
        self._requests += 1
        try:
            try:
                recording = await record(self._shared(), request, data, cutting)
            except MediaError as error:
                error.param = "file"
                raise
            yield recording
        finally:
            self._end(request)

    def _check_room(self) -> None:
        """Raise MediaError if no further request may load media now."""
        if self.shedding:
            raise busy("this server is short of memory and takes no media at this moment; try again shortly")
        if self._requests >= self.limits.max_media_waiting:
            raise busy(f"{self._requests} requests are loading media; try again shortly")

    def _end(self, request: MediaRequest) -> None:
        """Release what a request holds; after the last open request, trim the heap if enough bytes were released."""
        self._requests -= 1
        budget = self.permits.budget
        budget.release(request.finished)
        if not self._requests and budget.released >= self.trim_at:
            self.trim_at = budget.released + TRIM_AFTER
            with contextlib.suppress(RuntimeError):  # the pool is closed: the process ends
                self._pool.submit(trim_heap)

    def _shared(self) -> Shared:
        assert self.processor is not None, "a model without a processor has no items: counts were checked"
        return Shared(
            self.limits,
            self.processor,
            self._pool,
            self._fetcher,
            self.cache,
            self.permits,
            self._key,
            self.helpers,
            *self._client_rows,
            self.planted,
        )

    def _check_counts(self, refs: Sequence[MediaRef]) -> None:
        if len(refs) > self.limits.media_max_items:
            raise _too_many(
                f"{len(refs)} media items; at most {self.limits.media_max_items} are allowed in one request"
            )
        for modality, count in Counter(ref.modality for ref in refs).items():
            param = next(ref.param for ref in refs if ref.modality == modality)
            if self.processor is None or modality not in self.processor.modalities:
                raise MediaError(400, "media_unsupported", f"this model does not read {_PLURALS[modality]}", param)
            if count > (most := self.limits.max_items(modality)):
                raise _too_many(f"{count} items of kind {modality}; at most {most} are allowed in one request", param)


async def _all(jobs: list[ItemJob]) -> list[Processed]:
    """Run jobs concurrently; the first failure cancels the others and is raised alone."""
    failure: MediaError | None = None
    tasks: list[asyncio.Task[Processed]] = []
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(job.run()) for job in jobs]
    except* MediaError as errors:
        failure = next(error for error in errors.exceptions if isinstance(error, MediaError))
    try:
        if failure is not None:
            raise failure
        return [task.result() for task in tasks]
    finally:
        del failure, tasks  # breaks the reference cycle of the error with its own frame


def _too_many(message: str, param: str | None = None) -> MediaError:
    return MediaError(400, "too_many_media", message, param)
