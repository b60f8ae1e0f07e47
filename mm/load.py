"""MediaLoader: what the client named, fetched, decoded and processed; concurrent, bounded, cancellable.

Owner: loop; decoding and transforms run in the pool. In: MediaRefs in prompt order. Out: Processed items in the same
order, or the first MediaError. Everything that can be refused cheaply is refused before anything is fetched, and
memory is reserved before anything is decoded.

    loop   count, URL text | fetch |              | cache? slot |        | reserve |
    pool                           | unpack, hash |             | header |         | decode, process

A JPEG in a data: URL, most of what comes, finds a slot and enough memory taken before its header is read, where nobody
has to wait for either, and goes through the pool in one turn.

    loop   count, URL text | slot, reserve |                                              | cache
    pool                                   | unpack, hash, header; new? decode, process |
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import hashlib
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from engine.request import Modality
from mm.cache import ProcessorCache
from mm.decode import import_codecs
from mm.decode.alarm import Alarm, too_complex
from mm.decode.frames import FilmPlan
from mm.decode.magic import agrees, as_audio, sniff
from mm.decode.spare import Lend, SparePages, give_back, none_lent
from mm.decode.words import WORD
from mm.errors import MediaError, busy, invalid, not_allowed, too_large, unsupported
from mm.fetch import Fetcher
from mm.item import MediaItem, MediaOptions, MediaRef, Processed
from mm.limits import MediaLimits
from mm.place import MediaRequest, Place, Places
from mm.processors.base import Processor
from mm.sources import Embedded, decode_base64, invalid_data_url, parse_base64, parse_data_url
from mm.transform.image import Scale

T = TypeVar("T")
SOON_S = 0.005  # by when a picture that has been decoded is with the engine
DIGEST_BYTES = 16
AT_ONCE = 48 << 20  # bytes taken ahead of a JPEG's header: a picture of 1080p, and what it takes to decode it
_WORDS: dict[Modality, str] = {"image": "pictures", "audio": "sound", "video": "films"}


@dataclass(frozen=True, slots=True)
class _Unpacked:
    """Encoded bytes, what they are, and their name; of a JPEG the header too, which costs neither time nor memory."""

    data: bytes
    word: str
    digest: bytes
    opened: _Opened | None = None


class MediaLoader:
    """One per server. `load` may be called concurrently; each call is one request's media."""

    def __init__(
        self,
        limits: MediaLimits,
        processor: Processor | None,
        pool: concurrent.futures.Executor,
        *,
        options: MediaOptions = MediaOptions(),  # noqa: B008 (a frozen value)
        fetcher: Fetcher | None = None,
        max_decodes: int | None = None,
        lend: Lend = none_lent,
    ) -> None:
        self.limits = limits
        self.options = options  # the operator's, where a request brings none
        self.processor = processor
        self.cache = ProcessorCache(int(limits.mm_processor_cache_gb * 2**30))
        self._pool = pool
        self._fetcher = fetcher or Fetcher(limits, pool)
        self._key = os.urandom(16)  # digests cannot be prepared offline
        self.num_slots = max_decodes or max(2, os.cpu_count() or 1)
        self._places = Places(limits, self.num_slots)
        self._spare = SparePages()
        self._lend = lend  # memory that the device copies from directly, for a short time
        self._requests = 0
        pool.submit(import_codecs)  # while nobody waits for them

    def ledger(self) -> dict[str, int]:
        """Counts that are zero when no request is open; the bytes of the cache and the spare are bounded instead."""
        return {
            "media_requests": self._requests,
            "media_reserved_bytes": self._places.budget.used,
            "media_fetches": self._fetcher.open,
            "media_stuck": len(self._places.stuck),
            "media_cache_bytes": self.cache.used,
            "media_spare_bytes": self._spare.nbytes,
        }

    def stuck_for(self, seconds: float) -> int:
        """Threads of the pool that work on for nobody, and have for longer than that."""
        now = time.monotonic()
        return sum(now - since > seconds for since in self._places.stuck.values())

    async def close(self) -> None:
        await self._fetcher.close()

    async def load(
        self,
        refs: Sequence[MediaRef],
        *,
        options: MediaOptions | None = None,
        scope: bytes = b"",
        read: asyncio.Future[Processed | None] | None = None,
    ) -> list[Processed]:
        """Load all items of one request; `scope` names the caller (key and salt) for cache and uuids.

        `read` is done when a first item has been unpacked and its decoder begins; at once where others load, too, or
        nobody knows when that will be. Its result is what the only item will be, if that can be told: all is there but
        the pixels.
        """
        if not refs:
            return []
        self._check_counts(refs)
        if self._requests >= self.limits.max_media_waiting:
            raise busy(f"{self._requests} requests are loading media; try again shortly")
        request = MediaRequest(self.limits, options or self.options, scope, read, len(refs))
        jobs = [_Job(self, request, ref) for ref in refs]
        for job in jobs:
            job.check_source()
        self._requests += 1
        if self._requests > 1:  # whoever waits would get its next turn in the pool behind all others' media
            request.tell(None)
        try:
            if len(jobs) == 1:
                return [await jobs[0].run()]
            return await _all(jobs)
        finally:
            self._requests -= 1
            self._places.budget.release(request.kept)

    def _soon(self, work: Callable[..., None], *args: Any) -> None:
        """Work for the pool that nobody waits for: not while the request that brings it is on its way to the engine."""

        def submit() -> None:
            with contextlib.suppress(RuntimeError):  # the pool has been shut down
                self._pool.submit(work, *args)

        asyncio.get_running_loop().call_later(SOON_S, submit)

    def _check_counts(self, refs: Sequence[MediaRef]) -> None:
        if len(refs) > self.limits.media_max_items:
            raise _too_many(
                f"{len(refs)} media items; at most {self.limits.media_max_items} are allowed in one request"
            )
        for modality, count in Counter(ref.modality for ref in refs).items():
            param = next(ref.param for ref in refs if ref.modality == modality)
            if self.processor is None or modality not in self.processor.modalities:
                raise MediaError(400, "media_unsupported", f"this model does not read {_WORDS[modality]}", param)
            if count > (most := self.limits.max_items(modality)):
                raise _too_many(f"{count} items of kind {modality}; at most {most} are allowed in one request", param)


async def _all(jobs: list[_Job]) -> list[Processed]:
    """Run jobs together; the first failure ends the others and is raised alone."""
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
        del failure, tasks  # by which the error would hold itself, and what was cancelled


class _Job:
    """One item on its way through the stages."""

    def __init__(self, loader: MediaLoader, request: MediaRequest, ref: MediaRef) -> None:
        self._loader = loader
        self._request = request
        self._ref = ref
        self._modality: Modality = ref.modality
        self._source: Embedded | bytes | str | None = None
        assert loader.processor is not None
        self._processor = loader.processor
        self._settings = self._processor.settings(self._modality, request.options)
        self._timeout = loader.limits.decode_timeout(self._modality)
        self._held = 0  # fetched bytes that count against the budget while this item is in work
        self._lent = False  # its pixels lie in borrowed memory

    def check_source(self) -> None:
        """All that the reference's text can tell, before any I/O."""
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
            error.__context__ = None  # frames hold the pixels that could not be decoded, and futures the frames
            raise error.with_traceback(None) from None
        finally:
            self._loader._places.budget.release(self._held)

    def _receive(self, size: int, status: int) -> None:
        """Count bytes as they are fetched: for the request, and for the memory of the whole server."""
        self._request.receive(size, status)
        if not self._loader._places.budget.take(size):
            raise busy("too much media is in memory; try again shortly")
        self._held += size

    def _parsed(self) -> Embedded | bytes | str | None:
        source, limits = self._ref.source, self._loader.limits
        if source is None:
            return None
        if isinstance(source, bytes):
            self._check_size(len(source))
            return source
        if source[:5].lower() == "data:":
            if "data" not in limits.media_schemes:
                raise not_allowed()
            embedded = parse_data_url(source)
        elif self._ref.format is not None:
            embedded = parse_base64(source)
        else:
            self._loader._fetcher.check(source)
            return source
        self._check_size(embedded.size)
        return embedded

    def _check_size(self, size: int) -> None:
        most = self._loader.limits.max_bytes(self._modality)
        if size > most:
            raise too_large(f"the {self._modality} has {size} bytes; at most {most} are allowed")
        if size == 0:
            raise invalid(f"the {self._modality} is empty")
        self._request.receive(size)

    async def _load(self) -> Processed:
        cache, scope = self._loader.cache, self._request.scope
        name = self._name()
        if self._source is None:
            known = cache.named(scope, name) if name else None
            if known is None:
                raise MediaError(400, "media_unknown", "no media was uploaded under this uuid; send the data with it")
            return known
        source: Any = self._source
        if isinstance(source, str):
            source = await self._loader._fetcher.fetch(source, self._modality, self._receive)
        unpacked, fresh = await self._unpacked(source)
        key = (scope, unpacked.digest)
        processed = cache.get(key)
        if processed is None:
            processed = fresh or await self._decode(unpacked)
            cache.put(key, processed)
        if name:
            cache.name(name, key)
        return processed

    async def _unpacked(self, source: Embedded | bytes) -> tuple[_Unpacked, Processed | None]:
        """What came, and what it is decoded if that took no second turn in the pool."""
        alarm, place = Alarm(self._timeout), None
        if isinstance(source, Embedded) and source.mime in ("image/jpeg", "image/jpg"):
            place = await self._loader._places.take_now(self._request, AT_ONCE)
        if place is None:
            self._request.tell(None)
            return await self._in_pool(alarm, self._unpack, source, alarm), None
        try:
            loop = asyncio.get_running_loop()
            unpacked, processed = await self._in_pool(alarm, self._at_once, source, alarm, loop, place=place)
            if processed is not None and unpacked.opened is not None:
                self._note(processed, unpacked.opened, place)
            return unpacked, processed
        finally:
            place.leave()

    def _at_once(
        self, source: Embedded, alarm: Alarm, loop: asyncio.AbstractEventLoop
    ) -> tuple[_Unpacked, Processed | None]:
        """Unpacks, and decodes what is new and not too large for the place taken (pool)."""
        unpacked = self._unpack(source, alarm)
        opened = unpacked.opened
        if (
            opened is None
            or self._cost(opened) > AT_ONCE
            or self._loader.cache.holds((self._request.scope, unpacked.digest))
        ):
            loop.call_soon_threadsafe(self._request.tell, None)
            return unpacked, None
        item = opened.item_to_be()
        foretold = None if item is None else self._processor.process(item, unpacked.digest, self._request.options)
        loop.call_soon_threadsafe(self._request.tell, foretold)
        alarm.begin()  # decoding has its own time
        if foretold is None:
            return unpacked, self._finish(opened, unpacked.digest, alarm)
        opened.decode(alarm)
        alarm.check()
        return unpacked, foretold

    def _cost(self, opened: _Opened) -> int:
        return opened.cost + self._processor.cost(self._modality, opened.size)

    def _note(self, processed: Processed, opened: _Opened, place: Place) -> None:
        """A decoded item's bytes are the request's now; the next picture gets the memory that this one had, or more."""
        place.keep(processed.nbytes)
        loader = self._loader
        # A device that scales gets pixels, and caches keep them: the next ones need new memory.
        pixels_stay = self._modality == "image" and self._processor.picture_bytes
        if self._lent:
            loader._soon(give_back, processed)
        elif pixels_stay and loader._spare.wants(opened.size):
            loader._soon(loader._spare.fill, opened.size)

    def _name(self) -> bytes:
        """The uuid within this caller's own uploads; without a scope there is no caller to tell apart."""
        if self._ref.uuid is None or not self._request.scope:
            return b""
        return b"\0".join((self._modality.encode(), self._settings, self._ref.uuid.encode()))

    def _unpack(self, source: Embedded | bytes, alarm: Alarm) -> _Unpacked:
        """Decode base64, recognise the format, hash (pool)."""
        data = decode_base64(source) if isinstance(source, Embedded) else source
        word = sniff(data)
        if self._modality == "audio":
            word = as_audio(word)
        formats = self._loader.limits.formats(self._modality)
        if word not in formats:
            raise unsupported(f"the {self._modality} is {word or 'of no known format'}; send {', '.join(formats)}")
        if isinstance(source, Embedded) and source.mime and not agrees(source.mime, word, self._modality):
            raise invalid_data_url(f"the data: URL says {source.mime[:64]}; its content is {word}")
        digest = hashlib.sha256(self._loader._key)  # which processors have instructions for: half of blake2b's time
        for piece in (self._request.scope, self._modality.encode(), self._settings, data):
            digest.update(len(piece).to_bytes(8, "little"))
            digest.update(piece)
        unpacked = _Unpacked(data, word, digest.digest()[:DIGEST_BYTES])
        return replace(unpacked, opened=self._open(unpacked, alarm)) if word == "jpeg" else unpacked

    async def _decode(self, unpacked: _Unpacked) -> Processed:
        place = await self._loader._places.take(self._request)
        try:
            alarm, opened = Alarm(self._timeout), unpacked.opened
            if opened is None:
                opened = await self._in_pool(alarm, self._open, unpacked, alarm, place=place)
            await place.reserve(self._cost(opened), self._timeout)
            alarm = Alarm(self._timeout)
            processed = await self._in_pool(alarm, self._finish, opened, unpacked.digest, alarm, place=place)
            self._note(processed, opened, place)
            return processed
        finally:
            place.leave()

    def _open(self, unpacked: _Unpacked, alarm: Alarm) -> _Opened:
        """Read the header only (pool)."""
        limits = self._loader.limits
        if self._modality == "image":
            from mm.decode.image import ImageFile

            picture = ImageFile(unpacked.data, unpacked.word, limits)

            def scale(height: int, width: int) -> Scale:
                return self._processor.plan_image(height, width, self._request.options)

            def unscaled(pixels: np.ndarray) -> MediaItem:
                return MediaItem("image", pixels, scale=scale(*pixels.shape[:2]))

            def to_be() -> MediaItem | None:
                pixels = picture.whole_to_be(self._borrow)
                return None if pixels is None else unscaled(pixels)

            size = picture.height * picture.width * WORD
            if size <= self._processor.picture_bytes:
                cost = picture.cost + size
                return _Opened(cost, size, lambda _: unscaled(picture.decode_whole(self._borrow)), to_be)
            size = scale(picture.height, picture.width).pixels * 3
            return _Opened(picture.cost + size, size, lambda _: MediaItem("image", picture.decode(scale, self._borrow)))
        if self._modality == "audio":
            from mm.decode.audio import SoundFile

            track = SoundFile(unpacked.data, unpacked.word, limits)
            return _Opened(track.cost, track.cost // 2, lambda alarm: MediaItem("audio", track.decode(alarm)))
        return self._open_film(unpacked, alarm)

    def _borrow(self, size: int) -> np.ndarray:
        """uint8 [size] for the pixels, where this item needs them once at most (pool)."""
        room = self._loader._lend(size) if self._processor.picture_bytes else None
        self._lent = room is not None
        return self._loader._spare.take(size) if room is None else room

    def _open_film(self, unpacked: _Unpacked, alarm: Alarm) -> _Opened:
        from mm.decode.video import FilmFile

        limits, options = self._loader.limits, self._request.options

        def planner(num_frames: int, fps: float, height: int, width: int) -> FilmPlan:
            return self._processor.plan_film(num_frames, fps, height, width, options, limits)

        film = FilmFile(unpacked.data, unpacked.word, limits, planner, alarm)
        heard = options.use_audio_in_video and "audio" in self._processor.modalities

        def decode(alarm: Alarm) -> MediaItem:
            sound = film.sound(alarm) if heard else None
            return MediaItem("video", film.decode(alarm), film.plan.seconds_per_frame, sound)

        cost = film.cost + (film.sound_cost if heard else 0)
        return _Opened(cost, film.plan.pixels * 3, decode)

    def _finish(self, opened: _Opened, digest: bytes, alarm: Alarm) -> Processed:
        """Decode and process (pool)."""
        item = opened.decode(alarm)
        alarm.check()
        return self._processor.process(item, digest, self._request.options)

    async def _in_pool(self, alarm: Alarm, work: Callable[..., T], *args: Any, place: Place | None = None) -> T:
        """Run work in the pool; when its time is over or nobody waits, it is told to stop and not waited for."""

        def begun() -> T:
            alarm.begin()
            return work(*args)

        running = self._loader._pool.submit(begun)
        if place is not None:
            place.running = running
        result = asyncio.wrap_future(running)
        try:
            while not result.done():
                if (remaining := alarm.remaining()) <= 0:
                    raise too_complex()
                await asyncio.wait((result,), timeout=remaining)
            return result.result()
        finally:
            alarm.trip()
            result.cancel()  # without effect on work that has begun; its place is held until it ends


def _untold() -> None:
    """Of most files only decoding tells."""


@dataclass(frozen=True, slots=True)
class _Opened:
    """A file whose header was read: bytes it needs at most, bytes of its decoded form, and how to decode it.

    `item_to_be` tells what `decode` will return where that is known, its pixels not filled yet.
    """

    cost: int
    size: int
    decode: Callable[[Alarm], MediaItem]
    item_to_be: Callable[[], MediaItem | None] = _untold


def _too_many(message: str, param: str | None = None) -> MediaError:
    return MediaError(400, "too_many_media", message, param)
