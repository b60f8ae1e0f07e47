"""DecodePermits: how many items may be decoded at a time, and the bytes that decoded media take.

Owner: loop. A permit is a decode slot with the bytes reserved for it. An item with a permit may work in the pool; the
permit is held until the working thread has ended, even if no request waits for the result. A finished item's bytes
count for the item's request until the request has been submitted.

    slot | header | reserve | decode .. | keep: the result's bytes | leave: slot and the other bytes
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from typing import Any

from mm.budget import Budget
from mm.errors import busy, too_large
from mm.item import MediaOptions
from mm.limits import MediaLimits
from mm.report import MediaReport


class MediaRequest:
    """State shared by the items of one request: bytes received, and bytes of items in progress and finished."""

    def __init__(
        self,
        limits: MediaLimits,
        options: MediaOptions,
        scope: bytes,
        decoding: asyncio.Future[None] | None = None,
        report: MediaReport | None = None,
    ) -> None:
        self.report = MediaReport() if report is None else report
        self.options = options
        self.scope = scope
        self._decoding = decoding
        self.finished = 0  # bytes reserved for finished items, until the request has been submitted
        self._limits = limits
        self._encoded = 0
        self._working = 0
        self._finished = asyncio.Event()

    def report_decoding(self) -> None:
        """Report that a first item has been unpacked and its decoder begins, or that this moment is unknown (loop)."""
        if self._decoding is not None and not self._decoding.done():
            self._decoding.set_result(None)

    def receive(self, size: int, status: int = 400) -> None:
        """Count encoded bytes when their size is announced or when they arrive."""
        self._encoded += size
        if self._encoded > self._limits.request_media_bytes:
            raise too_large(
                f"the media of one request may have {self._limits.request_media_bytes} bytes together", status
            )

    def admit_now(self, cost: int) -> bool:
        """Take `cost` bytes of the request's limit if they are free; False otherwise."""
        if self.finished + self._working + cost > self._limits.request_decoded_bytes:
            return False
        self._working += cost
        return True

    async def admit(self, cost: int) -> None:
        """Wait while other items of this request hold too much; raise if its finished items leave too little."""
        while True:
            if self.finished + cost > self._limits.request_decoded_bytes:
                raise too_large(
                    f"the request's media needs more than {self._limits.request_decoded_bytes} bytes when decoded"
                )
            if self.admit_now(cost):
                return
            self._finished.clear()
            await self._finished.wait()

    def finish(self, cost: int) -> None:
        self._working -= cost
        self._finished.set()


class DecodePermits:
    """A server's decode slots, and its budget of bytes for decoded media."""

    def __init__(self, limits: MediaLimits, num_slots: int) -> None:
        self.limits = limits
        self.slots = asyncio.Semaphore(num_slots)
        self.budget = Budget(limits.decoded_budget_bytes)
        self.stuck: dict[DecodePermit, float] = {}  # pool threads whose result no request waits for -> since when

    async def take(self, request: MediaRequest) -> DecodePermit:
        """Waits for a slot."""
        await self.slots.acquire()
        return DecodePermit(self, request)

    async def take_now(self, request: MediaRequest, size: int) -> DecodePermit | None:
        """A slot with `size` bytes if both are free at once; None otherwise."""
        if self.slots.locked():
            return None
        permit = await self.take(request)  # does not wait: a slot is free
        if permit.reserve_now(size):
            return permit
        permit.leave()
        return None


class DecodePermit:
    """A decode slot and the bytes reserved with it; both are held until the thread that uses them has ended."""

    def __init__(self, permits: DecodePermits, request: MediaRequest) -> None:
        self.running: concurrent.futures.Future[Any] | None = None
        self._permits = permits
        self._request = request
        self._admitted = 0
        self._reserved = 0

    async def reserve(self, size: int, timeout: float) -> None:
        limits = self._permits.limits
        if size > min(limits.request_decoded_bytes, limits.decoded_budget_bytes):
            raise too_large(
                f"the media needs {size} bytes when decoded; at most {limits.request_decoded_bytes} are allowed"
            )
        await self._request.admit(size)
        self._admitted = size
        try:
            async with asyncio.timeout(timeout):
                await self._permits.budget.reserve(size)
        except TimeoutError:
            raise busy("too much media is being decoded; try again shortly") from None
        self._reserved = size

    def reserve_now(self, size: int, leaving: int = 0) -> bool:
        """Reserve `size` bytes if they are free for this request and no item waits for bytes; False otherwise.

        `leaving`: bytes that stay free for other items.
        """
        budget = self._permits.budget
        if budget.is_awaited or budget.used + size + leaving > budget.total or not self._request.admit_now(size):
            return False
        budget.take(size)
        self._admitted = self._reserved = size
        return True

    def keep(self, size: int) -> None:
        """Move `size` bytes of the reservation to the request, which holds the result."""
        size = min(size, self._reserved)
        self._reserved -= size
        self._request.finished += size

    def give_back(self) -> None:
        """Release the bytes but not the slot; no thread uses the bytes any more."""
        self._request.finish(self._admitted)
        self._permits.budget.release(self._reserved)
        self._admitted = self._reserved = 0

    def leave(self) -> None:
        self._request.finish(self._admitted)
        if self.running is None or self.running.done():
            self._release()
            return
        loop = asyncio.get_running_loop()
        self._permits.stuck[self] = time.monotonic()

        def ended(_: concurrent.futures.Future[Any]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._late)

        self.running.add_done_callback(ended)

    def _late(self) -> None:
        del self._permits.stuck[self]
        self._release()

    def _release(self) -> None:
        self.running = None  # the future refers to an unwanted result and to this permit
        self._permits.budget.release(self._reserved)
        self._permits.slots.release()
