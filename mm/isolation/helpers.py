"""Helpers: the processes that decode, started when the first file needs them, and the jobs that lease them.

Owner: loop; they start and end in the pool. In: the largest number of helpers. Out: a helper for as long as a file
needs it. A job that is cancelled while its helper works (a deadline, a client that disconnects) kills the helper, and
the next file gets a new one. Invariant: leased + idle <= number; without open requests nothing is leased.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from mm.isolation.helper import Helper
from mm.limits import MediaLimits
from mm.processors.base import Processor

log = logging.getLogger("omniloop.media")


@dataclass(frozen=True, slots=True)
class HelperCounts:
    """Counts for metrics."""

    busy: int
    idle: int
    started: int
    ended: int  # killed at a limit, or ended on their own


class Helpers:
    """One per server."""

    def __init__(self, limits: MediaLimits, pool: concurrent.futures.Executor) -> None:
        self._started = self._ended = 0
        self.leased: set[Helper] = set()
        self._idle: list[Helper] = []
        self._limits = limits
        self._pool = pool
        self._places = asyncio.Semaphore(limits.helper_processes)
        self._closed = False
        self._warned = False  # whether a missing filter of system calls has been logged

    def counts(self) -> HelperCounts:
        idle = sum(helper.alive for helper in self._idle)  # polling also reaps dead processes
        return HelperCounts(len(self.leased), idle, self._started, self._ended)

    def pids(self) -> tuple[int, ...]:
        """Process numbers of the live helpers."""
        return tuple(helper.pid for helper in (*self.leased, *self._idle) if helper.alive)

    @asynccontextmanager
    async def lease(self, processor: Processor) -> AsyncIterator[Helper]:
        """Lease a helper that waits for a file, when this caller's turn has come."""
        async with self._places:
            helper = self._found(processor)
            self.leased.add(helper)
            complete = False
            try:
                if not helper.alive:
                    self._started += 1
                    await asyncio.get_running_loop().run_in_executor(self._pool, helper.start)
                    if not (helper.filtered or self._warned):
                        self._warned = True
                        log.warning("helpers run without a filter of system calls: this kernel has none for them")
                yield helper
                complete = True
            except asyncio.CancelledError:
                helper.kill()  # even if a thread of the pool is about to send it a message
                raise
            except Exception:
                complete = not helper.talks
                raise
            finally:
                self.leased.remove(helper)
                self._return(helper, complete)

    def close(self) -> None:
        """Ends all helpers; a thread that waits for a leased helper gets an error."""
        self._closed = True
        for helper in self.leased:
            helper.kill()
        for helper in self._idle:
            helper.end()
        self._idle.clear()

    def _found(self, processor: Processor) -> Helper:
        while self._idle:
            helper = self._idle.pop()
            if helper.alive:
                return helper
            self._end(helper)
        return Helper(self._limits, processor)

    def _return(self, helper: Helper, complete: bool) -> None:
        if helper.holds and complete:
            helper.forget()
        if complete and helper.alive and not self._closed:
            self._idle.append(helper)
        else:
            self._end(helper)

    def _end(self, helper: Helper) -> None:
        """End a helper. The pool waits for its exit, or the thread that still uses it does."""
        helper.kill()
        self._ended += 1
        if helper.talks:  # a talking thread reads the descriptor: if closed, another file may get the number
            return
        try:
            self._pool.submit(helper.end)
        except RuntimeError:  # the pool is closed: the process ends
            helper.end()
