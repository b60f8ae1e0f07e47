"""GrammarRows: the matchers of live choices; they consume each step's tokens and mask the tokens of the next step.

Owner: device thread. In: the tokens of the previous step, and the slots of the step whose forward runs. Out: which rows
end, and a bit mask per row with a grammar. The work happens while the device runs the forward (engine/run/loop.py):

    host    plan N+1, launch forward N+1 | settle N: consume | fill | launch sample N+1
    device  ............ forward N+1 .......................................... | mask, choose

A row with drafts gets a mask for the token behind each draft, too (masked.py). One call of the library fills all masks,
with its own threads and without the GIL.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from engine.base.mask_lines import Lines
from engine.base.request import SamplingParams
from engine.grammar.compile import Grammar, fill_threads
from engine.grammar.masked import Masked
from engine.grammar.row import GrammarRow, RowEnd, take_ends

if TYPE_CHECKING:
    import llguidance


@dataclass(frozen=True, slots=True)
class Consumed:
    """The effect of a step's tokens on the rows with grammars, by place among the step's sampled rows."""

    # Place -> (tokens to keep of the row's run, RowEnd). A run is cut where the grammar ends (RowEnd), or where the
    # grammar
    # begins (None), because later tokens of the run were chosen without the grammar.
    cuts: dict[int, tuple[int, RowEnd | None]]
    turned: list[int]  # places of rows whose `is_waiting` changed


@dataclass(slots=True)
class GrammarRows:
    """The rows with grammars, by slot."""

    max_slots: int
    jumps: bool = False  # tokens that a grammar forces are appended without sampling
    rows: dict[int, GrammarRow] = field(default_factory=dict)
    _has: np.ndarray = field(init=False)
    _executor: llguidance.LLExecutor | None = None  # its threads start with the first grammar

    def __post_init__(self) -> None:
        self._has = np.zeros(self.max_slots, np.bool_)

    def admit(self, slot: int, grammar: Grammar, params: SamplingParams) -> None:
        """Makes the row of a slot's choice."""
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
        """Consumes the runs of tokens of a step's sampled rows, int [S, width]; called once per step, in order."""
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
        drafts: Sequence[list[int]] = (),
        room: Callable[[int], int] = lambda _: 0,
    ) -> Lines | None:
        """The masks of a step's sampled rows; None: no row has a grammar. slots int [S].

        memory(count, words) returns the int32 array for the masks; allowed_of(slot) returns bool [vocab], the tokens
        that the request's other rules allow, or None for all. The previous step's tokens must have been consumed.
        drafts: of each sampled row; (): none. room(slot): how many tokens the answer may still get.
        """
        places = np.flatnonzero(self._has[slots]).tolist() if self.rows else []
        if not places:
            return None
        named = slots[places].tolist()
        masked = [Masked(self.rows[slot], drafts[place] if drafts else []) for slot, place in zip(named, places)]
        counts = [1 + len(of.drafts) for of in masked]
        firsts = list(accumulate(counts, initial=0))
        lines = memory(firsts[-1], masked[0].row.num_words)
        words, tails = lines.view(np.uint32), np.zeros(len(lines), np.int32)
        if len(lines) > len(masked):
            words.fill(0)
        self._compute(masked, firsts, lines)
        may_end = take_ends(words, masked[0].row.end)  # all grammars have the same vocabulary
        for of, slot, first, count in zip(masked, named, firsts, counts):
            flags, own = allowed_of(slot), slice(first, first + count)
            allowed = None if flags is None else packed(flags, words.shape[1])
            of.finish(words[own], tails[own], may_end[own], allowed, room(slot))
        repeated = [place for place, count in zip(places, counts) for _ in range(count)]
        after = [number for count in counts for number in range(count)]
        verified = [1 + len(drafts[row]) if drafts else 1 for row in range(len(slots))]
        return Lines(repeated, after, lines, tails, np.cumsum(verified) - verified)

    def _compute(self, masked: list[Masked], firsts: list[int], lines: np.ndarray) -> None:
        """Fills the masks that the library can compute; a thread fills neighbours, because lanes have locks."""
        held = [(of, of.row.matcher, first) for of, first in zip(masked, firsts)]
        held.sort(key=lambda one: id(one[0].row.lane))
        memory = lines.ctypes.data, 4 * lines.shape[1], len(lines)
        alone = [(matcher, first) for of, matcher, first in held if matcher is not None and not of.known]
        along = [(matcher, first, of.known) for of, matcher, first in held if matcher is not None and of.known]
        assert self._executor is not None
        if alone:
            self._executor.unsafe_compute_mask_ptr(alone, *memory)
        if along:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(along, *memory)


def packed(flags: np.ndarray, num_words: int) -> np.ndarray:
    """flags bool [vocab] as a mask uint32 [num_words]; excess flags are dropped, excess bits are 0."""
    line = np.zeros(num_words, np.uint32)
    found = np.packbits(flags, bitorder="little")[: 4 * num_words]
    line.view(np.uint8)[: len(found)] = found
    return line
