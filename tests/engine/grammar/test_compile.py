"""Grammars are compiled once, in the pool, and cached; errors of grammars that do not compile are in our words."""

import asyncio
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from engine.base.errors import GrammarBusyError, GrammarError
from engine.base.grammar import GrammarSpec
from engine.base.request import SamplingParams
from engine.grammar import compile as compiling
from engine.grammar.advance import GrammarRows
from engine.grammar.compile import CROWDED, MOST_LANES, NICE, GrammarCompiler, held_bytes, is_crowded
from engine.grammar.vocabulary import GrammarVocabulary
from tests.engine.grammar.kit import SPECIAL, TOKENS, allowed, compiled, drawn, vocabulary


@pytest.fixture
def pool():
    with ThreadPoolExecutor(2) as pool:
        yield pool


def compiler(pool, **changed):
    return GrammarCompiler(
        vocabulary(), pool, **{"timeout": 5.0, "cache_bytes": 1 << 26, "max_bytes": 1 << 17, **changed}
    )


class Maker:
    """A maker of grammars that counts its calls."""

    def __init__(self, text='start: "a"', seconds=0.0):
        self.text, self.seconds, self.count = text, seconds, 0

    def __call__(self):
        self.count += 1
        time.sleep(self.seconds)
        return GrammarSpec("lark", self.text)


async def test_equal_keys_compile_once_also_at_the_same_time(pool):
    kept, make = compiler(pool), Maker(seconds=0.02)
    first, second = await asyncio.gather(kept.get(b"k", make), kept.get(b"k", make))
    third = await kept.get(b"k", make)
    assert first is second is third
    assert make.count == 1
    assert (await kept.get(b"other", make)) is not first


async def settled(kept):
    while kept.adding:
        await asyncio.gather(*kept.adding.values())


async def test_a_grammar_that_many_choices_follow_gets_lanes(pool, monkeypatch):
    monkeypatch.setattr(compiling, "fill_threads", lambda: 8)
    kept, make, rows = compiler(pool), Maker('start: "a" | "b"'), GrammarRows(64)
    grammar = await kept.get(b"k", make)
    one = kept.held_bytes
    for slot in range(64):
        assert await kept.get(b"k", make) is grammar
        await settled(kept)
        rows.admit(slot, grammar, SamplingParams())
    assert len(grammar.lanes) == MOST_LANES
    assert kept.held_bytes == MOST_LANES * one == held_bytes(grammar)
    assert (make.count, sum(lane.rows for lane in grammar.lanes)) == (1, 64)
    assert all(lane.rows >= CROWDED for lane in grammar.lanes)
    slots = np.arange(64)
    lines = rows.fill(slots, lambda *shape: np.zeros(shape, np.int32), lambda _slot: None)
    assert lines.places == slots.tolist()
    assert np.array_equal(lines.words, lines.words[:1].repeat(64, 0))
    rows.admit(0, compiled('start: "c"'), SamplingParams())  # the slot is reused without having been freed
    for slot in range(64):
        rows.reset(slot)
    assert [lane.rows for lane in grammar.lanes] == [0] * MOST_LANES
    await kept.get(b"k", make)
    assert not kept.adding
    kept.close()


async def test_a_lane_that_does_not_compile_leaves_those_there_are(pool, monkeypatch):
    monkeypatch.setattr(compiling, "fill_threads", lambda: 8)
    kept, make = compiler(pool), Maker()
    grammar = await kept.get(b"k", make)
    grammar.lanes[0].rows = CROWDED
    monkeypatch.setattr(compiling, "compile_now", lambda *_args: 1 / 0)
    await kept.get(b"k", make)
    with pytest.raises(ZeroDivisionError):
        await settled(kept)
    assert (len(grammar.lanes), await kept.get(b"k", make), kept.held_bytes) == (1, grammar, held_bytes(grammar))
    with pytest.raises(ZeroDivisionError):
        await settled(kept)
    kept.close()


async def test_failures_are_remembered(pool):
    kept, make = compiler(pool), Maker("start: undefined")
    for _ in range(3):
        with pytest.raises(GrammarError, match="does not define"):
            await kept.get(b"k", make)
    assert make.count == 1


async def test_the_cache_has_bounded_bytes(pool):
    kept = compiler(pool, cache_bytes=3 << 18)
    makers = [Maker(f'start: "{n}"') for n in range(6)]
    for n, make in enumerate(makers):
        await kept.get(b"%d" % n, make)
        assert kept.held_bytes <= 3 << 18
    await kept.get(b"5", makers[5])
    await kept.get(b"0", makers[0])
    assert [makers[5].count, makers[0].count] == [1, 2]


async def test_a_slow_compile_is_left_behind(pool):
    kept = compiler(pool, timeout=0.02)
    with pytest.raises(GrammarError, match="--grammar-timeout") as refused:
        await kept.get(b"k", Maker(seconds=0.1))
    assert refused.value.reason == "grammar_too_complex"


class Held:
    """Makers that return only after `go_on`."""

    def __init__(self):
        self.go_on = threading.Event()
        self.made = []
        self._loop, self._news = asyncio.get_running_loop(), asyncio.Event()

    def __call__(self, name):
        def make():
            self.made.append(name)
            self._loop.call_soon_threadsafe(self._news.set)
            assert self.go_on.wait(20)
            return GrammarSpec("lark", f'start: "{name}"')

        return make

    async def began(self, count):
        while len(self.made) < count:
            self._news.clear()
            await self._news.wait()


async def test_s30_compiles_that_no_caller_awaits_are_dropped(pool):
    kept, held = compiler(pool), Held()
    leavers = [asyncio.ensure_future(kept.get(b"%d" % n, held(f"x{n}"), "", "one")) for n in range(20)]
    await held.began(2)
    for task in leavers:
        task.cancel()
    await asyncio.gather(*leavers, return_exceptions=True)
    wanted = asyncio.ensure_future(kept.get(b"wanted", held("wanted"), "", "two"))
    held.go_on.set()
    assert (await wanted).lanes
    assert sorted(held.made[2:]) == ["wanted"], "what had begun was finished, the rest was not begun"
    await asyncio.gather(*(compiling.task for compiling in kept.running.values()), return_exceptions=True)
    assert not kept.running
    kept.close()


async def test_s30_clients_compile_in_turn_and_the_line_is_bounded(pool):
    kept, held = compiler(pool, timeout=20.0), Held()
    one = [asyncio.ensure_future(kept.get(b"%d" % n, held(f"x{n}"), "", "one")) for n in range(60)]
    await held.began(2)
    refused, _ = await asyncio.wait(one, return_when="FIRST_EXCEPTION")
    assert 20 <= len(refused) <= 40
    error = refused.pop().exception()
    assert isinstance(error, GrammarBusyError)
    assert (error.reason, error.retry_after >= 1) == ("key_busy", True)
    two = asyncio.ensure_future(kept.get(b"other", held("other"), "", "two"))
    held.go_on.set()
    await two
    assert held.made.index("other") < 8, "it had not to wait for all of the first client's"
    await asyncio.gather(*one, return_exceptions=True)
    assert (await kept.get(b"0", held("x0"))).lanes
    kept.close()


async def test_s30_a_long_line_is_no_fault_of_the_grammar(pool):
    kept, held = compiler(pool, timeout=0.2), Held()
    first = [asyncio.ensure_future(kept.get(b"%d" % n, held(f"x{n}"), "", "one")) for n in range(2)]
    await held.began(2)
    with pytest.raises(GrammarBusyError) as busy:
        await kept.get(b"k", Maker(), "", "two")
    assert busy.value.reason == "queue_full"
    for task in first:
        with pytest.raises(GrammarError, match="--grammar-timeout"):
            await task
    held.go_on.set()
    assert (await kept.get(b"k", Maker(), "", "two")).lanes
    kept.close()


async def test_a_long_grammar_is_refused_before_the_library_sees_it(pool):
    with pytest.raises(GrammarError, match="--grammar-max-bytes") as refused:
        await compiler(pool, max_bytes=100).get(b"k", Maker('start: "' + "a" * 100 + '"'))
    assert refused.value.reason == "grammar_too_complex"


@pytest.mark.parametrize(
    ("kind", "text", "told"),
    [
        ("schema", '{"enum": []}', "no text satisfies"),
        ("schema", '{"$ref": "#"}', "no text satisfies"),
        ("schema", '{"type": "integer", "minimum": 5, "maximum": 4}', "no text satisfies"),
        ("schema", '{"uniqueItems": true}', "not supported"),
        ("schema", '{"patternProperties": {"^a": {"type": "null"}, "b$": {}}}', "two patterns of patternProperties"),
        ("ebnf", 'start: "a\n', 'line 1 of the grammar: got "; a text or an expression must end on the line'),
        ("ebnf", "start: missing", "line 1, column 8: the grammar names what it does not define"),
        ("ebnf", "start: /(/", "not well formed"),
        ("ebnf", 'root ::= "a" missing', "GBNF"),
        ("ebnf", "root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "too deeply"),
        ("ebnf", 'start: "a"\n%llguidance {"no_forcing": false}', "line 2 of the grammar: got %"),
        ("ebnf", "start: <think>", "line 1 of the grammar: got <"),
        ("ebnf", "start: <[257]>", "line 1 of the grammar: got <"),
        ("ebnf", 'start: %json {"uniqueItems": true}', "got %"),
        ("ebnf", "start: @other", "got @"),
        ("ebnf", 'start: "a" [<[257]>]', "line 1 of the grammar: got <"),  # an optional part of a rule
        ("ebnf", 'start: "a"\n | [ %json {"type": "null"} ]', "line 2 of the grammar: got %"),
        # The library reads these lines as one regular expression.
        ("ebnf", "start: /a\nb/ | <[257]> | /x/", "line 1 of the grammar: got /"),
        ("ebnf", "start[lazy]: a0\n" + "\n".join(f'a{n}: "x" a{n + 1} ":"' for n in range(512)), "has 513 rules"),
    ],
)
def test_bad_grammars_are_refused_in_our_words(kind, text, told):
    with pytest.raises(GrammarError, match=told) as refused:
        compiled(text, kind)
    assert refused.value.reason in ("grammar_invalid", "grammar_too_complex")


def test_gbnf_of_too_many_rules_is_not_translated(monkeypatch):
    monkeypatch.setattr("llguidance.gbnf_to_lark.gbnf_to_lark", lambda text: pytest.fail("needs seconds"))
    with pytest.raises(GrammarError, match="has 5000 rules"):
        compiled("root ::= r0\n" + "\n".join(f'r{n} ::= "a" r{n + 1}' for n in range(4999)), "ebnf")


@pytest.mark.parametrize(
    ("kind", "text", "answers"),
    [
        ("lark", 'start: "yes" | "no"', {b"yes", b"no"}),
        ("lark", "start: <[256]> /a{2}/", {b"<think>aa"}),
        ("ebnf", 'start: "<think>" // %json <x> @y', {b"<think>"}),
        ("ebnf", 'start: x\nx: "%<@" | /[%<@]\\//', {b"%<@", b"%/", b"</", b"@/"}),
        ("ebnf", 'start: "a" ["b"] /[c:]/', {b"ac", b"abc", b"a:", b"ab:"}),
        ("ebnf", 'root ::= foo-bar | "z"\nfoo-bar ::= [ab] "é"', {"aé".encode(), "bé".encode(), b"z"}),
    ],
)
def test_answers_are_those_of_the_grammar(kind, text, answers):
    rng = np.random.default_rng(0)
    grammar = compiled(text, kind)
    assert {drawn(grammar, rng) for _ in range(40)} == answers


def test_text_that_must_come_is_not_forced_into_its_usual_tokens():
    matcher = compiled('start: "ab"').matcher()
    assert {TOKENS[token] for token in allowed(matcher).tolist()} == {b"a", b"ab"}


def test_bytes_that_the_library_reads_differently_are_found():
    with pytest.raises(ValueError, match="token 3 is"):
        GrammarVocabulary(lambda number: b"" if number == 3 else TOKENS[number], lambda number: False, len(TOKENS))


@pytest.mark.skipif(sys.platform != "linux", reason="niceness is a thread's on Linux alone")
async def test_threads_that_compile_step_back_and_the_pool_does_not(pool, monkeypatch):
    seen = {}

    def niceness():
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def compile_now(*args):
        seen["compiles"] = niceness()
        return real(*args)

    def make():
        seen["makes"] = niceness()
        return GrammarSpec("lark", 'start: "a"')

    real = compiling.compile_now
    monkeypatch.setattr(compiling, "compile_now", compile_now)
    kept = compiler(pool)
    await kept.get(b"k", make)
    assert seen == {"compiles": min(19, niceness() + NICE), "makes": niceness()}
    kept.close()
    with pytest.raises(RuntimeError, match="shutdown"):
        await kept.get(b"other", make)


def bounded(memory_bytes):
    return GrammarVocabulary(
        TOKENS.__getitem__, lambda number: TOKENS[number] in SPECIAL, len(TOKENS), memory_bytes=memory_bytes
    )


async def test_s30_a_grammar_that_would_take_too_much_memory_is_refused_before_it_is_compiled(pool):
    kept = GrammarCompiler(bounded(1 << 20), pool, 5.0, 1 << 26, 1 << 17)
    with pytest.raises(
        GrammarError, match=r"about 1\d{6} bytes when compiled; at most 1048576 .*--grammar-memory-b"
    ) as no:
        await kept.get(b"k", Maker('start: "' + "a" * 20_000 + '"'))
    assert no.value.reason == "grammar_too_complex"
    assert (await kept.get(b"j", Maker())).lanes


async def test_s30_the_states_of_a_lexer_are_bounded(pool):
    maker = Maker("start: /(a|b)*a(a|b){12}/")  # each answer reaches new states

    async def ends_in_error(memory_bytes):
        kept = GrammarCompiler(bounded(memory_bytes), pool, 5.0, 1 << 26, 1 << 17)
        matcher = (await kept.get(b"k", maker)).matcher()
        rng = np.random.default_rng(0)
        for token in rng.integers(97, 99, 4000).tolist():
            matcher.consume_token(token)
            matcher.compute_bitmask()
            if matcher.is_error():
                return True
        return False

    assert await ends_in_error(1 << 20)
    assert not await ends_in_error(1 << 30)


async def test_s30_memory_bounds_the_lanes_of_a_grammar(pool, monkeypatch):
    monkeypatch.setattr("engine.grammar.compile.fill_threads", lambda: 8)
    for memory_bytes, crowded in ((1 << 30, True), (150 << 20, False)):
        kept = GrammarCompiler(bounded(memory_bytes), pool, 5.0, 1 << 26, 1 << 17)
        grammar = await kept.get(b"k", Maker())
        grammar.lanes[0].rows = CROWDED
        assert is_crowded(grammar) == crowded
