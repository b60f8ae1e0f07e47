"""GrammarCompiler: compiles the grammars of requests in threads, and caches them by content.

Owner: loop; the work runs in the pool and in the compiler's own threads. In: a key that identifies the content, and
`make`, which writes the GrammarSpec. Out: a Grammar, from which each choice gets a matcher. Equal keys compile once,
also if requested at the same time. Failures are cached for a while, so that a client that repeats a bad schema costs
one compile per minute.

    loop      | get(key, make) -> known? ... await                      | Grammar -> Request
    pool                          make -> GrammarSpec
    compiler                                          matcher, first mask

The library compiles without the GIL, so compiling threads compete with other threads only for cores; on Linux they
have a lower priority than computing threads. `make` is Python and holds the GIL, so the pool, whose threads have
normal priority, runs it.

Matchers copied from one prototype share the prototype's lexer states and a lock, so their masks are filled one after
another. A grammar that many choices use at the same time is compiled again, for up to eight prototypes (lanes).

Clients are served in turn (line.py). The library's own step limits bound a compile (engine/grammar/vocabulary.py); the
timeout only ends the waiting. --grammar-memory-bytes bounds a grammar's text, its lanes, and the states of its lexers.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.base.errors import GrammarBusyError, GrammarError, GrammarReason
from engine.base.grammar import Grammar, GrammarSpec, Lane
from engine.grammar.lark import lark_of
from engine.grammar.line import CompileLine

if TYPE_CHECKING:
    import llguidance

    from engine.grammar.vocabulary import GrammarVocabulary

FAILURE_S = 60.0  # seconds for which a failure is remembered
MAX_FAILURES = 1024
AT_ONE_TIME = 2  # concurrent compiles
MAX_THREADS = 8
CROWDED, MOST_LANES = 4, MAX_THREADS  # a further lane is made when every lane has CROWDED choices
LANE_BYTES = 100 << 20  # size to which a lane's lexer states may grow (engine/grammar/vocabulary)
NICE = 10  # niceness of the compiling threads: a tenth of a computing thread's share
# Stack size of the compiling threads: the library recurses for each schema inside a schema, also along $ref, with 4 to
# 16 KiB per level. Only the touched part of a stack takes memory.
STACK_BYTES = 256 << 20
# Measured: a schema's matcher holds about 40 times its text, and its lexer grows as answers meet new states.
BYTES_PER_CHARACTER, BYTES_AT_LEAST = 64, 1 << 18


def lane_bytes(grammar: Grammar) -> int:
    """The estimated memory of a lane of the grammar."""
    return BYTES_AT_LEAST + BYTES_PER_CHARACTER * len(grammar.spec.text)


def held_bytes(grammar: Grammar) -> int:
    """The estimated memory of the grammar."""
    return lane_bytes(grammar) * len(grammar.lanes)


def is_crowded(grammar: Grammar) -> bool:
    """Whether the lanes have so many rows that another lane is worth a compile."""
    if len(grammar.lanes) >= min(MOST_LANES, fill_threads()) or grammar.lane().rows < CROWDED:
        return False
    return (len(grammar.lanes) + 1) * (lane_bytes(grammar) + LANE_BYTES) <= grammar.vocabulary.memory_bytes


@dataclass(slots=True, eq=False)
class Compiling:
    """A compile that waits for its turn or runs, and how many callers await it."""

    task: asyncio.Future[Grammar]
    begun: asyncio.Future[float]  # the time at which its turn came
    waiters: int = 0


class GrammarCompiler:
    """Compiles grammars and caches them. Owner: loop."""

    def __init__(
        self, vocabulary: GrammarVocabulary, pool: Executor, timeout: float, cache_bytes: int, max_bytes: int
    ) -> None:
        self._vocabulary, self._pool = vocabulary, pool
        self._timeout, self._cache_bytes, self._max_bytes = timeout, cache_bytes, max_bytes
        self._known: OrderedDict[bytes, Grammar] = OrderedDict()  # the least recently used first
        self._failed: OrderedDict[bytes, tuple[float, Exception]] = OrderedDict()  # the oldest first
        self.running: dict[bytes, Compiling] = {}
        self.adding: dict[bytes, asyncio.Future[None]] = {}
        self._line = CompileLine(AT_ONE_TIME)
        self._threads = ThreadPoolExecutor(
            AT_ONE_TIME, "grammar", initializer=step_back
        )  # started by the first grammar
        self.held_bytes = 0

    @property
    def compiling(self) -> int:
        """Number of grammars that are being compiled or wait to be compiled."""
        return len(self.running)

    async def get(self, key: bytes, make: Callable[[], GrammarSpec], field: str = "", client: str = "") -> Grammar:
        """The grammar of this key. Raises GrammarError, GrammarBusyError if too many wait, or the error of `make`,
        which may name the request's `field`. A compile that has not begun is dropped when no caller awaits it."""
        found = self._known.get(key)
        if found is not None:
            self._known.move_to_end(key)
            if is_crowded(found) and key not in self.adding:
                adding = self.adding[key] = asyncio.ensure_future(self._add_lane(key, found))
                adding.add_done_callback(_look)
            return found
        named = key + field.encode()  # failures are cached per field, because error texts name the field
        failed = self._failed.get(named)
        if failed is not None and time.monotonic() - failed[0] < FAILURE_S:
            raise failed[1].with_traceback(None)
        compiling = self.running.get(named)
        if compiling is None:
            begun: asyncio.Future[float] = asyncio.get_running_loop().create_future()
            task = asyncio.ensure_future(self._compile(key, make, named, client, begun))
            task.add_done_callback(_look)
            compiling = self.running[named] = Compiling(task, begun)
        compiling.waiters += 1
        try:
            return await self._awaited(compiling)
        finally:
            compiling.waiters -= 1
            if not compiling.waiters and not compiling.begun.done():
                self.running.pop(named, None)  # the next caller starts a new compile
                compiling.task.cancel()

    async def _awaited(self, compiling: Compiling) -> Grammar:
        """Waits for a turn, then for the compile, each up to --grammar-timeout. The first timeout means a busy server,
        the second a grammar that is too complex."""
        first: set[asyncio.Future[Any]] = {compiling.task, compiling.begun}
        await asyncio.wait(first, timeout=self._timeout, return_when="FIRST_COMPLETED")
        if not compiling.begun.done() and not compiling.task.done():
            raise self._line.busy("queue_full", f"no grammar's turn came within --grammar-timeout {self._timeout:g} s")
        spent = time.monotonic() - compiling.begun.result() if compiling.begun.done() else 0.0
        try:
            async with asyncio.timeout(max(0.0, self._timeout - spent)):
                return await asyncio.shield(compiling.task)
        except TimeoutError:
            text = f"the grammar did not compile within --grammar-timeout {self._timeout:g} s; make it smaller"
            raise GrammarError("grammar_too_complex", text) from None

    async def _compile(
        self, key: bytes, make: Callable[[], GrammarSpec], named: bytes, client: str, begun: asyncio.Future[float]
    ) -> Grammar:
        loop = asyncio.get_running_loop()
        try:
            await self._line.enter(client)
            begun.set_result(time.monotonic())
            try:
                spec = await loop.run_in_executor(self._pool, self._written, make)
                grammar = await self._in_thread(spec)
            finally:
                self._line.leave(time.monotonic() - begun.result())
            self._keep(key, grammar)
            return grammar
        except GrammarBusyError:
            raise
        except Exception as error:
            self._failed[named] = time.monotonic(), error
            while len(self._failed) > MAX_FAILURES:
                self._failed.popitem(last=False)
            raise
        finally:
            self.running.pop(named, None)

    async def _add_lane(self, key: bytes, grammar: Grammar) -> None:
        """Compiles one more lane in the background; a compile that fails leaves the present lanes."""
        try:
            await self._line.enter("")
            entered = time.monotonic()
            try:
                made = await self._in_thread(grammar.spec)
            finally:
                self._line.leave(time.monotonic() - entered)
            grammar.lanes.extend(made.lanes)
            if self._known.get(key) is grammar:
                self.held_bytes += lane_bytes(grammar)
                self._evict()
        finally:
            del self.adding[key]

    def _in_thread(self, spec: GrammarSpec) -> asyncio.Future[Grammar]:
        """Runs `compile_now` in a thread of the compiler."""
        before = threading.stack_size(STACK_BYTES)
        try:  # the executor starts a thread inside this call, so the thread gets the stack size
            return asyncio.get_running_loop().run_in_executor(self._threads, compile_now, spec, self._vocabulary)
        finally:
            threading.stack_size(before)

    def _written(self, make: Callable[[], GrammarSpec]) -> GrammarSpec:
        """The GrammarSpec, checked for size; runs in the pool."""
        spec = make()
        size = len(spec.text.encode())
        if size > self._max_bytes:
            text = f"the grammar has {size} bytes; at most {self._max_bytes} are allowed (--grammar-max-bytes)"
            raise GrammarError("grammar_too_complex", text)
        needs, most = BYTES_AT_LEAST + BYTES_PER_CHARACTER * len(spec.text), self._vocabulary.memory_bytes
        if needs > most:
            text = f"the grammar takes about {needs} bytes when compiled; at most {most} are allowed"
            raise GrammarError("grammar_too_complex", f"{text} (--grammar-memory-bytes); make it smaller")
        return spec

    def close(self) -> None:
        """Ends the threads; compiles that have not begun are dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _keep(self, key: bytes, grammar: Grammar) -> None:
        before = self._known.pop(key, None)  # two fields may have compiled the same key at the same time
        self._known[key] = grammar
        self.held_bytes += held_bytes(grammar) - (held_bytes(before) if before else 0)
        self._evict()

    def _evict(self) -> None:
        while self.held_bytes > self._cache_bytes and self._known:
            _, oldest = self._known.popitem(last=False)
            self.held_bytes -= held_bytes(oldest)


def fill_threads() -> int:
    """Number of threads that fill masks (engine/grammar/advance)."""
    return max(1, min(MAX_THREADS, (os.cpu_count() or 1) // 2))


def step_back() -> None:
    """Lowers the calling thread's priority, on Linux only: elsewhere niceness applies to the whole process."""
    if sys.platform == "linux":
        os.nice(NICE)


def compile_now(spec: GrammarSpec, vocabulary: GrammarVocabulary) -> Grammar:
    """Compiles a grammar and computes its first mask, because some grammars that allow nothing compile. Raises
    GrammarError."""
    prototype = vocabulary.matcher(lark_of(spec))
    _check(prototype, spec)
    first = prototype.deep_copy()
    first.compute_bitmask()
    _check(first, spec)
    return Grammar(spec, vocabulary, [Lane(prototype)])


# (pattern in the library's error text, error code, our text for the client); the library's text is not passed on.
_CAUSES: tuple[tuple[str, GrammarReason, str], ...] = (
    ("circular", "grammar_invalid", "a $ref that leads back to itself has keywords beside it; move them"),
    ("maxProperties", "grammar_invalid", "minProperties and maxProperties need each named property to be required"),
    ("disjoint", "grammar_invalid", "two patterns of patternProperties match one name; make them exclude each other"),
    ("unsatisfiable|NoExtension", "grammar_invalid", "no text satisfies the grammar"),
    ("unimplemented|not supported", "grammar_invalid", "the grammar asks for what is not supported"),
    ("unknown|not found|undefined|not present", "grammar_invalid", "the grammar names what it does not define"),
    ("too (complex|large|big|many|deep)|limit|fuel|TooComplex", "grammar_too_complex", "the grammar is too complex"),
    ("regex", "grammar_invalid", "an expression is not well formed; check its brackets and escapes"),
)
_PLACE = re.compile(r"^at (\d+)\((\d+)\):")


def _check(matcher: llguidance.LLMatcher, spec: GrammarSpec) -> None:
    if not matcher.is_error():
        return
    error = matcher.get_error()
    place = _PLACE.match(error) if spec.kind == "ebnf" else None  # the first line of the text is ours
    where = f"line {int(place[1]) - 1}, column {place[2]}: " if place else ""
    for pattern, code, text in _CAUSES:
        if re.search(pattern, error[:2000], re.IGNORECASE):
            raise GrammarError(code, where + text)
    text = f"{where}the grammar is not well formed; it must be Lark, or GBNF with a rule `root`"
    raise GrammarError("grammar_invalid", text)


def _look(done: asyncio.Future[Any]) -> None:
    """Retrieves a compile's exception, so that asyncio does not log it as never retrieved if all waiters gave up."""
    if not done.cancelled():
        done.exception()
