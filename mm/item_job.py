"""ItemJob: the stages of one media item of a request: check, fetch, unpack, open, reserve, decode, process.

Owner: loop; unpacking, decoding and processing run in the pool. In: a MediaRef. Out: its Processed item, or a
MediaError that names the item. MediaLoader makes the jobs of a request and runs them together.

    loop   URL text | fetch |              | cache? slot |        | reserve |
    pool                    | unpack, hash |             | header |         | decode, process

Most items are JPEGs in data: URLs. Such an item gets a slot and enough memory before its header is read, if both are
free at once, and then takes a single turn in the pool.

    loop   URL text | slot, reserve |                                              | cache
    pool                            | unpack, hash, header; new? decode, process |
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from engine.base.request import Modality
from mm.bounds.bounded import Bounded
from mm.bounds.check import bound_media
from mm.cache import ProcessorCache
from mm.client_rows import read_grid, read_rows
from mm.decode.alarm import Alarm, too_complex
from mm.decode.magic import agrees, as_audio, sniff
from mm.decode.picture_film import PICTURES, pack, whole
from mm.decode.whole import check_whole
from mm.errors import MediaError, busy, invalid, not_allowed, too_large, unsupported
from mm.fetch import Fetcher
from mm.isolation.helpers import Helpers
from mm.item import GivenRows, MediaRef, Processed
from mm.limits import MediaLimits
from mm.open import OPENERS, Encoded, Opened, Opener
from mm.permits import DecodePermit, DecodePermits, MediaRequest
from mm.processors.base import Processor
from mm.sources import (
    Embedded,
    EmbeddedPictures,
    decode_base64,
    invalid_data_url,
    parse_base64,
    parse_data_url,
    parse_film_url,
)

T = TypeVar("T")
Source = Embedded | EmbeddedPictures | bytes
DIGEST_BYTES = 16
AT_ONCE = 48 << 20  # bytes reserved before a JPEG's header is read: enough to decode a picture of 1080p


@dataclass(frozen=True, slots=True)
class Shared:
    """Objects and settings that all jobs of a server share."""

    limits: MediaLimits
    processor: Processor
    pool: concurrent.futures.Executor
    fetcher: Fetcher
    cache: ProcessorCache
    permits: DecodePermits
    key: bytes  # key of the content digests
    helpers: Helpers
    row_widths: Mapping[Modality, int]  # numbers per row of each encoder, for rows from clients
    most_rows: int  # most rows of one item from a client
    planted: Callable[[], None] | None = None  # see MediaLoader


@dataclass(frozen=True, slots=True)
class Unpacked:
    """Encoded bytes, their format and digest; for a JPEG also its header, which costs neither time nor memory."""

    data: bytes
    container: str
    digest: bytes
    opened: Opened | None = None
    bounded: Bounded | None = None  # sounds and films: the bytes for a decoder, and the memory to open them


class ItemJob:
    """One item in its stages from reference to Processed."""

    def __init__(self, shared: Shared, request: MediaRequest, ref: MediaRef) -> None:
        self._shared = shared
        self._request = request
        self._ref = ref
        self._modality: Modality = ref.modality
        self._source: Source | GivenRows | str | None = None
        self._processor = shared.processor
        self._settings = self._processor.settings(self._modality, request.options)
        self._settings += request.options.reading(self._modality)
        self._timeout = shared.limits.decode_timeout(self._modality)
        self._isolated = shared.limits.isolates(self._modality)
        self._decode_s = self._prepare_s = 0.0
        self._held = 0  # fetched bytes that count against the budget until this item is done

    def check_source(self) -> None:
        """Raise for every error in the reference's text, before any I/O."""
        try:
            self._source = self._parsed()
        except MediaError as error:
            error.param = error.param or self._ref.param
            raise

    async def run(self) -> Processed:
        try:
            return await self._load()
        except MediaError as error:
            error.param = error.param or self._ref.param
            error.__context__ = None  # its frames hold undecoded pixels, and futures hold its frames
            raise error.with_traceback(None) from None
        finally:
            self._shared.permits.budget.release(self._held)

    def _receive(self, size: int, status: int) -> None:
        """Count bytes as they are fetched: for the request, and for the memory of the whole server."""
        self._request.receive(size, status)
        if not self._shared.permits.budget.take(size):
            raise busy("too much media is in memory; try again shortly")
        self._held += size

    def _parsed(self) -> Source | GivenRows | str | None:
        source, limits = self._ref.source, self._shared.limits
        if source is None:
            return None
        if isinstance(source, GivenRows):
            self._request.receive(len(source.rows))
            return source
        if isinstance(source, bytes):
            self._check_size(len(source))
            return source
        embedded: Embedded | EmbeddedPictures
        if source[:5].lower() == "data:":
            if "data" not in limits.media_schemes:
                raise not_allowed()
            if self._modality == "video":
                embedded = parse_film_url(source, limits.video_max_decoded_frames)
            else:
                embedded = parse_data_url(source)
        elif self._ref.format is not None:
            embedded = parse_base64(source)
        else:
            self._shared.fetcher.check(source)
            return source
        self._check_size(embedded.size)
        return embedded

    def _check_size(self, size: int) -> None:
        most = self._shared.limits.max_bytes(self._modality)
        if size > most:
            raise too_large(f"the {self._modality} has {size} bytes; at most {most} are allowed")
        if size == 0:
            raise invalid(f"the {self._modality} is empty")
        self._request.receive(size)

    async def _load(self) -> Processed:
        cache, scope, report = self._shared.cache, self._request.scope, self._request.report
        report.items += 1
        name = self._name()
        if self._source is None:
            known = cache.named(scope, name) if name else None
            if known is None:
                text = "no media was uploaded under this uuid; send the data with it"
                if not scope:
                    text = (
                        "a uuid is remembered for callers with an API key or a cache_salt only; send the data with it"
                    )
                raise MediaError(400, "media_unknown", text)
            report.cached += 1
            return known
        if isinstance(self._source, GivenRows):
            return await self._given(self._source)
        source: Any = self._source
        if isinstance(source, str):
            begun = time.perf_counter()
            source = await self._shared.fetcher.fetch(source, self._modality, self._receive)
            report.fetch_s += time.perf_counter() - begun
        unpacked, fresh = await self._unpacked(source)
        key = (scope, unpacked.digest)
        report.encoded_bytes += len(unpacked.data)
        processed = cache.get(key)
        if processed is None:
            processed = fresh or await self._decode(unpacked)
            cache.put(key, processed)
            report.decode_s += self._decode_s
            report.prepare_s += self._prepare_s
        else:
            report.cached += 1
        if name:
            cache.name(name, key)
        return processed

    async def _unpacked(self, source: Source) -> tuple[Unpacked, Processed | None]:
        """The unpacked bytes, and the processed item if the same turn in the pool decoded it."""
        alarm, permit = Alarm(self._timeout), None
        if isinstance(source, Embedded) and source.mime in ("image/jpeg", "image/jpg") and not self._isolated:
            permit = await self._shared.permits.take_now(self._request, AT_ONCE)
        if permit is None:
            self._request.report_decoding()
            return await self._in_pool(alarm, self._unpack, source, alarm), None
        try:
            loop = asyncio.get_running_loop()
            unpacked, processed = await self._in_pool(alarm, self._at_once, source, alarm, loop, permit=permit)
            if processed is not None:
                permit.keep(processed.nbytes)
            return unpacked, processed
        finally:
            permit.leave()

    def _at_once(
        self, source: Embedded, alarm: Alarm, loop: asyncio.AbstractEventLoop
    ) -> tuple[Unpacked, Processed | None]:
        """Unpack; also decode an item that is not cached and fits the permit taken (pool)."""
        unpacked = self._unpack(source, alarm)
        opened = unpacked.opened
        loop.call_soon_threadsafe(self._request.report_decoding)
        if (
            opened is None
            or self._cost(opened) > AT_ONCE
            or self._shared.cache.holds((self._request.scope, unpacked.digest))
        ):
            return unpacked, None
        alarm.begin()  # decoding has its own time limit
        return unpacked, self._finish(opened, unpacked.digest, alarm)

    def _cost(self, opened: Opened) -> int:
        return opened.cost + self._processor.cost(self._modality, opened.size)

    def _name(self) -> bytes:
        """The uuid within this caller's own uploads; empty without a scope, where callers cannot be distinguished."""
        if self._ref.uuid is None or not self._request.scope:
            return b""
        return b"\0".join((self._modality.encode(), self._settings, self._ref.uuid.encode()))

    def _unpack(self, source: Source, alarm: Alarm) -> Unpacked:
        """Decode base64, detect the format, compute the digest (pool)."""
        if isinstance(source, EmbeddedPictures):
            data = pack([decode_base64(picture) for picture in source.pictures], self._request.options)
            return Unpacked(data, PICTURES, self._digest(data))
        data = decode_base64(source) if isinstance(source, Embedded) else source
        container = sniff(data)
        if self._modality == "audio":
            container = as_audio(container)
        formats = self._shared.limits.formats(self._modality)
        if container not in formats:
            raise unsupported(
                f"the {self._modality} is {container or 'in an unknown format'}; send {', '.join(formats)}"
            )
        if isinstance(source, Embedded) and not agrees(source.mime, self._modality):
            raise invalid_data_url(
                f"the data: URL says {source.mime[:64]}; its content is {container}, read as {self._modality}"
            )
        unpacked = Unpacked(data, container, self._digest(data))
        if self._modality != "image":
            check_whole(data, container)
            return replace(unpacked, bounded=bound_media(data, container, self._modality == "video"))
        if container != "jpeg" or self._isolated:
            return unpacked
        return replace(unpacked, opened=self._open(unpacked, alarm, OPENERS["image"]))

    def _digest(self, data: bytes) -> bytes:
        digest = hashlib.sha256(self._shared.key)  # processors have instructions for SHA-256: half the time of blake2b
        for piece in (self._request.scope, self._modality.encode(), self._settings, data):
            digest.update(len(piece).to_bytes(8, "little"))
            digest.update(piece)
        return digest.digest()[:DIGEST_BYTES]

    async def _given(self, source: GivenRows) -> Processed:
        """The rows that a client sent, processed; they are not cached."""
        permit = await self._shared.permits.take(self._request)
        try:
            await permit.reserve(len(source.rows) * 4, self._timeout)  # bytes, and 4 bytes of float32 for each 2
            processed = await self._in_pool(Alarm(self._timeout), self._read_rows, source, permit=permit)
            permit.keep(processed.nbytes)
            return processed
        finally:
            permit.leave()

    def _read_rows(self, source: GivenRows) -> Processed:
        """Decode the rows of a client (pool)."""
        from mm.processors.given import given

        shared, param = self._shared, self._ref.param or ""
        rows = read_rows(source.rows, shared.row_widths[self._modality], shared.most_rows, param)
        grid = None if source.grid is None else read_grid(source.grid, param)
        return given(shared.processor, self._modality, rows, grid, source.seconds_per_grid)

    async def _decode(self, unpacked: Unpacked) -> Processed:
        if not self._isolated:
            return await self._decode_by(OPENERS[self._modality], unpacked)
        async with self._shared.helpers.lease(self._shared.processor) as helper:
            return await self._decode_by(partial(helper.open, self._modality), unpacked)

    async def _decode_by(self, opener: Opener, unpacked: Unpacked) -> Processed:
        permit = await self._shared.permits.take(self._request)
        try:
            alarm, opened = Alarm(self._timeout), unpacked.opened
            if opened is None:
                if unpacked.bounded is not None and unpacked.bounded.opening:
                    await permit.reserve(unpacked.bounded.opening, self._timeout)
                opened = await self._in_pool(alarm, self._open, unpacked, alarm, opener, permit=permit)
                permit.give_back()  # the item's whole cost includes the cost of opening
            opened = await self._reserve(permit, opened)
            alarm = Alarm(self._timeout)
            processed = await self._in_pool(alarm, self._finish, opened, unpacked.digest, alarm, permit=permit)
            permit.keep(processed.nbytes)
            return processed
        finally:
            permit.leave()

    async def _reserve(self, permit: DecodePermit, opened: Opened) -> Opened:
        """Reserve the memory that an item needs. If half of the budget stays free for others, reserve for its faster
        decoding.
        """
        cost, faster = self._cost(opened), opened.faster
        leaving = self._shared.limits.decoded_budget_bytes // 2
        if faster is not None and permit.reserve_now(max(cost, faster.cost), leaving):
            return faster
        await permit.reserve(cost, self._timeout)
        return opened

    def _open(self, unpacked: Unpacked, alarm: Alarm, opener: Opener) -> Opened:
        """Read only the header (pool)."""
        limits, options = self._shared.limits, self._request.options
        if unpacked.container == PICTURES:
            options = whole(unpacked.data, options)
        encoded = Encoded(unpacked.data, unpacked.container, limits, self._processor, options, unpacked.bounded)
        begun = time.perf_counter()
        opened = opener(encoded, alarm)
        self._decode_s += time.perf_counter() - begun
        return opened

    def _finish(self, opened: Opened, digest: bytes, alarm: Alarm) -> Processed:
        """Decode and process (pool)."""
        begun = time.perf_counter()
        if self._shared.planted is not None:
            self._shared.planted()
        item = opened.decode(alarm)
        alarm.check()
        decoded = time.perf_counter()
        processed = self._processor.process(item, digest, self._request.options)
        self._decode_s += decoded - begun
        self._prepare_s = time.perf_counter() - decoded
        return replace(processed, replaced=item.replaced) if item.replaced else processed

    async def _in_pool(self, alarm: Alarm, work: Callable[..., T], *args: Any, permit: DecodePermit | None = None) -> T:
        return await in_pool(self._shared.pool, alarm, work, *args, permit=permit)


async def in_pool(
    pool: concurrent.futures.Executor,
    alarm: Alarm,
    work: Callable[..., T],
    *args: Any,
    permit: DecodePermit | None = None,
) -> T:
    """Run work in the pool. If its time is over or the caller is cancelled, trip its alarm and return without
    waiting.
    """

    def begun() -> T:
        alarm.begin()
        return work(*args)

    running = pool.submit(begun)
    if permit is not None:
        permit.running = running
    result = asyncio.wrap_future(running)
    try:
        while not result.done():
            if (remaining := alarm.remaining()) <= 0:
                raise too_complex()
            await asyncio.wait((result,), timeout=remaining)
        return result.result()
    finally:
        alarm.trip()
        result.cancel()  # no effect on work that has begun; that work holds its permit until it ends
