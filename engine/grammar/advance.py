"""GrammarRows: the matchers of live choices; they take each step's tokens and say what the next step may choose.

Owner: device thread. In: the tokens of the step before, and the slots of the step whose forward runs. Out: which rows
end, and a line of bits per row with a grammar. All of it happens in the gap that engine/run/loop.py leaves:

    host    plan N+1, launch forward N+1 | settle N: consume | fill | launch sample N+1
    device  ............ forward N+1 .......................................... | mask, choose

A choice's matcher sees its answer only, so chunked prompts, cached prompts and preemption do not concern it: tokens
that are computed again are not sampled again. One call fills all lines, with the library's own threads and without the
GIL.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from engine.base.errors import EngineError, GrammarConflictError
from engine.base.mask_lines import Lines
from engine.base.request import SamplingParams
from engine.grammar.compile import Grammar, fill_threads

if TYPE_CHECKING:
    import llguidance

log = logging.getLogger("omniloop.engine")

LEAST_JUMP = 2  # forced tokens: one costs a step either way
MOST_BYTES = 256  # of forced text at a time
WATCHED_FIELDS = (  # of SamplingParams: what would have to follow each token
    "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens", "logit_bias", "allowed_token_ids",
    "not_first_token_ids", "bad_words", "timestamps", "logprobs", "logprob_token_ids",
)  # fmt: skip
CONFLICT = (
    "no token was left that the grammar, bad_words and allowed_token_ids allow together, or the grammar grew too "
    "complex in the middle of the answer; allow more tokens, or make the grammar simpler"
)
REFUSED = "the grammar refused a token that its mask had allowed; this is a mistake of the server's"


@dataclass(frozen=True, slots=True)
class RowEnd:
    """A row that its grammar ends: complete, or with an error of its own."""

    keeps_token: bool  # of this step
    error: EngineError | None = None


@dataclass(frozen=True, slots=True)
class Consumed:
    """What a step's tokens did to the rows with grammars, by place among its sampled rows."""

    # How many tokens a row keeps of a run that is cut: where its grammar ends, and how, or where its grammar begins,
    # since the tokens behind were chosen without it.
    cuts: dict[int, tuple[int, RowEnd | None]]
    turned: list[int]  # rows that wait for a token now and did not before, or the reverse


class GrammarRow:
    """One choice under its grammar."""

    __slots__ = (
        "_asleep", "_blanks", "_encode", "_ending_ids", "_fed", "_is_free", "_jumped", "_jumps", "_left", "_matcher",
        "_min_tokens", "_opens", "_starts", "_taken", "_verdict", "end", "lane", "may_open", "num_words", "over",
        "redoes", "wakes",
    )  # fmt: skip

    def __init__(self, grammar: Grammar, params: SamplingParams, jumps: bool = False) -> None:
        self.lane = grammar.lane()
        self._matcher = self.lane.prototype.deep_copy()
        self._encode = grammar.vocabulary.encode
        self.end, self.num_words = grammar.vocabulary.end, grammar.vocabulary.num_words
        self._ending_ids = params.ending_token_ids
        self._min_tokens = params.min_tokens
        self._starts, self._opens = frozenset(grammar.spec.starts), frozenset(grammar.spec.opens)
        self._fed, self._blanks = frozenset(grammar.spec.fed), grammar.vocabulary.blanks
        self.may_open = bool(self._opens)  # with the next token the answer may leave its grammar for a while
        self._asleep = bool(self._starts) and not self._opens  # the grammar has not begun
        self._is_free = grammar.spec.kind == "free"
        self._jumps = jumps and self._encode is not None and chooses_freely(params)
        self._jumped = False  # since the newest chosen token
        self._left = grammar.spec.budget  # tokens that may come before the grammar begins; None: any number
        self.wakes = grammar.spec.starts[:1]  # what is forced when none is left
        self._taken = 0  # tokens of the answer
        self._verdict: RowEnd | None = None  # of the step in flight, whatever that step chooses
        self.redoes = False  # the next token was chosen without the grammar, and is chosen again
        self.over = False  # what steps in flight still choose for this row counts no more

    def copy(self) -> GrammarRow:
        """A copy in the same state, which advances independently."""
        row = object.__new__(GrammarRow)
        for name in GrammarRow.__slots__:
            setattr(row, name, getattr(self, name))
        row._matcher = self._matcher.deep_copy()
        return row

    @property
    def verdict(self) -> RowEnd | None:
        """How the row ends when its grammar allows no further token; None: the row continues."""
        return self._verdict

    @property
    def matcher(self) -> llguidance.LLMatcher | None:
        """None while the answer is free."""
        return None if self._asleep or self.over or self._is_free else self._matcher

    @property
    def must_wake(self) -> bool:
        """Whether the budget of what comes before the grammar is spent."""
        return self._asleep and self._left is not None and self._left <= 0

    @property
    def waits_for(self) -> tuple[int, ...]:
        """The tokens after which a sleeping grammar begins; (): it is awake, or waits for a budget to be spent."""
        return tuple(self._starts) if self.is_waiting else ()

    @property
    def is_waiting(self) -> bool:
        """Whether `waits_for` names tokens."""
        return self._asleep and self._left is None

    def take(self, token: int) -> RowEnd | None:
        """Takes the token that a step chose. Returns how the token ends the row, None where the row goes on."""
        if self.over or token < 0 or self.redoes:
            self.redoes = False
            return None
        if self._verdict is not None:
            self.over = True
            return self._verdict
        self._jumped = False
        self._taken += 1
        if self.may_open:
            self.may_open = token in self._blanks  # models write line ends in front of their reasoning
            if token in self._opens:
                self._asleep, self._matcher = True, self.lane.prototype.deep_copy()
                return None
        if self._asleep:
            self._asleep = token not in self._starts
            if self._left is not None:
                self._left -= 1
            if token not in self._fed:
                return None
        if self._is_free:
            return None
        if token in self._ending_ids:
            self.over = True  # the scheduler knows why
            return None
        if not self._matcher.consume_token(token):
            self.over = True
            refused = "doesn't satisfy" in self._matcher.get_error()  # else it met a limit
            return RowEnd(False, GrammarConflictError(REFUSED if refused else CONFLICT))
        if self._matcher.is_stopped():  # nothing can be added: no end token is waited for
            self.over = True
            return RowEnd(True)
        return None

    def jump(self, most: int) -> list[int]:
        """Takes the tokens that the grammar leaves no choice about, `most` at most; [] where they are too few.

        They are those that the tokenizer cuts the settled part of the forced text into. A token is chosen between two
        jumps, whichever steps were in flight.
        """
        if not self._jumps or self._jumped or self.may_open or most < LEAST_JUMP:
            return []
        if self.matcher is None or self._verdict is not None:
            return []
        try:
            return self._forced(most)
        except Exception:  # of a tokenizer or the library: this row alone goes on token by token
            log.exception("the forced text of an answer could not be cut into tokens")
            self._jumps = False
            return []

    def _forced(self, most: int) -> list[int]:
        """As `jump`; a row that raises is as it was."""
        probe = self._matcher.deep_copy()  # some microseconds; what is too much for it leaves the row as it was
        forced = probe.compute_ff_bytes()
        if probe.is_error():
            self._jumps = False
        text = forced[:MOST_BYTES].decode("utf-8", "ignore")
        if not self._jumps or self._encode is None or len(text) <= LEAST_JUMP:
            return []
        tokens = self._encode(text[: settled(text)])[:most]
        if (end := next((place for place, token in enumerate(tokens) if token in self._ending_ids), None)) is not None:
            tokens = tokens[:end]
        for run in (tokens, tokens[:-1]):  # an answer's last token is chosen, and ends the row as any does
            probe = self._matcher.deep_copy()
            taken = probe.try_consume_tokens(run) if len(run) >= LEAST_JUMP else 0
            if taken and taken == len(run) and not probe.is_stopped():
                self._matcher, self._jumped = probe, True
                self._taken += taken
                return run
        return []

    def finish(self, line: np.ndarray, may_end: bool, allowed: np.ndarray | None) -> None:
        """Applies the request's other rules to a filled line, uint32 [num_words], that has lost the bit of the end.

        `may_end`: whether the line had that bit, as each line of a matcher in error has; `allowed`: the line of the
        request's own rules, where it has one. A line that leaves nothing ends the row with the step whose line it is.
        """
        if may_end and self._matcher.is_error():
            self._end_now(line, RowEnd(False, GrammarConflictError(CONFLICT)))
            return
        if self.may_open:
            self._set(line, self._opens)
        if allowed is not None:
            line &= allowed
        if may_end and (self._taken >= self._min_tokens or line.any()):
            self._set(line, self._ending_ids)  # until min_tokens the other rules forbid them
            if allowed is not None:
                line &= allowed
        if (may_end or allowed is not None) and not line.any():
            self._end_now(line, RowEnd(False, None if may_end else GrammarConflictError(CONFLICT)))

    def wake(self, line: np.ndarray) -> None:
        """A line that leaves nothing but the token with which the grammar begins."""
        line.fill(0)
        self._set(line, self.wakes)

    def _set(self, line: np.ndarray, tokens: Iterable[int]) -> None:
        for token in tokens:
            if token >> 5 < len(line):
                line[token >> 5] |= np.uint32(1 << (token & 31))

    def _end_now(self, line: np.ndarray, verdict: RowEnd) -> None:
        line.fill(0xFFFF_FFFF)
        self._verdict = verdict


def settled(text: str) -> int:
    """How many characters of a text belong to the same tokens whatever follows it.

    Tokenizers merge inside pieces: letters, digits or marks with a sign or a space before them, marks with line ends
    behind them. So the last piece stays open, and a mark that a word at the end may be joined to: a model that would
    write ` ` and `{"` has never seen ` {` before a quote, and behind it closes the object.
    """
    kept = len(text)
    for belongs in (str.isalnum, _is_mark, str.isspace):
        while kept and belongs(text[kept - 1]):
            kept -= 1
    if text[kept : kept + 1] in ("\n", "\r"):
        while kept and _is_mark(text[kept - 1]):
            kept -= 1
        kept -= text[:kept].endswith(" ")
    return kept


def _is_mark(character: str) -> bool:
    return not (character.isalnum() or character.isspace())


def chooses_freely(params: SamplingParams) -> bool:
    """Whether only the grammar and the draw choose tokens, and the request asks for no log-probabilities."""
    plain = SamplingParams()
    return all(getattr(params, name) == getattr(plain, name) for name in WATCHED_FIELDS)


@dataclass(slots=True)
class GrammarRows:
    """The rows with grammars, by slot."""

    max_slots: int
    jumps: bool = False  # tokens that a grammar leaves no choice about are not chosen one by one
    rows: dict[int, GrammarRow] = field(default_factory=dict)
    _has: np.ndarray = field(init=False)
    _executor: llguidance.LLExecutor | None = None  # its threads start with the first grammar

    def __post_init__(self) -> None:
        self._has = np.zeros(self.max_slots, np.bool_)

    def admit(self, slot: int, grammar: Grammar, params: SamplingParams) -> None:
        """Gives a slot's choice its matcher."""
        if self._executor is None:
            import llguidance

            self._executor = llguidance.LLExecutor(fill_threads())
        self.reset(slot)
        row = self.rows[slot] = GrammarRow(grammar, params, self.jumps)
        row.lane.rows += 1
        self._has[slot] = True

    def reset(self, slot: int) -> None:
        """Forgets a freed slot."""
        row = self.rows.pop(slot, None)
        if row is not None:
            row.lane.rows -= 1
        self._has[slot] = False

    def ledger(self) -> dict[str, int]:
        """Matchers that are alive; zero when idle."""
        return {"matchers": len(self.rows)}

    def has_any(self, slots: np.ndarray) -> bool:
        """Whether one of these slots has a grammar. slots int [S]."""
        return bool(self._has[slots].any())

    def consume(self, slots: np.ndarray, runs: np.ndarray) -> Consumed:
        """Takes the runs of a step's sampled rows, int [S, width], once per step, in order."""
        consumed = Consumed({}, [])
        named, chosen = slots.tolist(), runs.tolist()
        for place in np.flatnonzero(self._has[slots]).tolist():
            row = self.rows[named[place]]
            waited = row.is_waiting
            cut = self._take(row, chosen[place])
            if cut is not None:
                consumed.cuts[place] = cut
            if waited != row.is_waiting:
                consumed.turned.append(place)
        return consumed

    def _take(self, row: GrammarRow, run: list[int]) -> tuple[int, RowEnd | None] | None:
        for place, token in enumerate(run):
            if place and token < 0:
                break
            waited = row.is_waiting
            if (end := row.take(token)) is not None:
                return place + end.keeps_token, end
            if waited and not row.is_waiting:
                return place + 1, None
        return None

    def fill(
        self,
        slots: np.ndarray,
        memory: Callable[[int, int], np.ndarray],
        allowed_of: Callable[[int], np.ndarray | None],
    ) -> Lines | None:
        """What the sampled rows of a step may choose, None where no row has a grammar. slots int [S].

        memory(count, words) is where lines are written, int32; allowed_of(slot) bool [vocab] says which tokens the
        request's own rules leave, None for all. The tokens of the step before have been consumed.
        """
        places = np.flatnonzero(self._has[slots]).tolist() if self.rows else []
        if not places:
            return None
        named = slots[places].tolist()
        rows = [self.rows[slot] for slot in named]
        lines = memory(len(rows), rows[0].num_words)
        matchers = [row.matcher for row in rows]
        steered = [(matcher, number) for number, matcher in enumerate(matchers) if matcher is not None]
        if steered:
            assert self._executor is not None
            steered.sort(key=lambda one: id(rows[one[1]].lane))  # a thread takes neighbours, and a lane has one lock
            self._executor.unsafe_compute_mask_ptr(steered, lines.ctypes.data, 4 * lines.shape[1], len(rows))
        words, tails = lines.view(np.uint32), np.zeros(len(rows), np.int32)
        may_end = take_ends(words, rows[0].end)  # all grammars are of one vocabulary
        for number, (row, matcher) in enumerate(zip(rows, matchers)):
            flags = allowed_of(named[number])
            allowed = None if flags is None else packed(flags, lines.shape[1])
            if matcher is not None:
                if may_end[number] or allowed is not None or row.may_open:
                    row.finish(words[number], may_end[number], allowed)
            elif row.must_wake:
                row.wake(words[number])
            elif allowed is not None:
                words[number] = allowed
            else:
                words[number].fill(0xFFFF_FFFF)
                tails[number] = -1
        return Lines(places, lines, tails)


def take_ends(words: np.ndarray, end: int) -> list[bool]:
    """Takes the bit of the end out of lines uint32 [rows, num_words]; which of them had it."""
    word, bit = end >> 5, np.uint32(1 << (end & 31))
    had: list[bool] = (words[:, word] & bit != 0).tolist()
    words[:, word] &= ~bit
    return had


def packed(flags: np.ndarray, num_words: int) -> np.ndarray:
    """A line uint32 [num_words] of flags bool [vocab]; what is beyond either is not set."""
    line = np.zeros(num_words, np.uint32)
    found = np.packbits(flags, bitorder="little")[: 4 * num_words]
    line.view(np.uint8)[: len(found)] = found
    return line
