"""Grammar: the part that masks tokens by a grammar, adds the tokens that the grammar forces, and ends answers.

Owner: device thread. Between a step's forward and its sampling the previous step is settled: matchers consume its
tokens (`collect`), then fill a mask line of allowed tokens for each row (`between`), which sampling reads.

    host    plan N+1, launch forward N+1 | settle N: collect, after | between | launch choice N+1
    device  ............ forward N+1 ................................................. | masks, choose

If only one continuation is allowed, its tokens (a run) join the sequence after step N's token (`after`). Forward N+1
computes step N's token, the token that it samples is dropped, and step N+2 computes the run.

A step that verifies drafts of a row reads a mask for the token behind each of them, too. The device sends the drafts
when the step's forward begins, so the masks are filled while the forward runs.

A grammar may begin only after a token that ends free text, such as thinking. Until then the grammar sleeps: steps are
plain, two are in flight, and the GIL-free loop returns to Python after a token that wakes the grammar. The step that
was launched meanwhile sampled without the grammar; its token for the slot is dropped and sampled again (`redo`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from _fast.layout import RowFlag
from _fast.scheduler import Scheduler
from _fast.steady import SPECIAL_ALWAYS, SPECIAL_WATCHED
from engine.base.config import EngineConfig
from engine.base.output import StepOutput
from engine.base.request import FinishReason
from engine.grammar.advance import GrammarRows
from engine.grammar.row import GrammarRow, RowEnd
from engine.step.live import LiveRow
from engine.step.parts.part import ABSENT, JOINS, StepPart, Steps
from engine.step.sizes import Sizes
from engine.step.step import Step


class Grammar(StepPart):
    """Matchers of the slots whose requests have a grammar."""

    name = "matchers"

    def __init__(self, config: EngineConfig, sizes: Sizes, on_host: bool) -> None:
        # A row with forced tokens misses the next step. By default that is worth it on a CPU: no step is in flight.
        jumps = on_host if config.jump_forward is None else config.jump_forward
        self._grammars = GrammarRows(sizes.max_slots, jumps)
        self._room = np.zeros(sizes.max_slots, np.int32)  # tokens that a slot's answer may still get
        self._steps: Steps

    def start(self, steps: Steps) -> None:
        self._steps = steps

    def admit(self, slot: int, row: LiveRow, words: np.ndarray) -> bool:
        if row.request.grammar is None:
            return False
        self._grammars.admit(slot, row.request.grammar, row.request.sampling)
        self._watch(slot)
        return True

    def reset(self, slot: int, poison: bool) -> None:
        self._grammars.reset(slot)

    def special(self, slot: int) -> int:
        is_asleep = self._steps.watched[slot, 0] >= 0
        return SPECIAL_WATCHED if is_asleep and self._steps.backend.sampler.may_sleep(slot) else SPECIAL_ALWAYS

    def role(self, step: Step) -> int:
        """JOINS if a row has a grammar. On an accelerator the Rules part returns WAITS for grammars that are awake."""
        return JOINS if self._grammars.has_any(step.sampled_slots) else ABSENT

    def between(self, step: Step) -> None:
        backend = self._steps.backend
        given = backend.masks.memory, backend.sampler.allowed_of
        lines = self._grammars.fill(step.sampled_slots, *given, self._drafts(step), self._room.__getitem__)
        if lines is not None:
            backend.masks.send(step, lines)

    def _drafts(self, step: Step) -> list[list[int]]:
        """The drafts of the step's sampled rows; []: no row with a grammar has drafts."""
        rows = step.rows
        if not step.plan.drafting:
            return []
        drafted = (rows.flags[rows.sampled] & RowFlag.FEED > 0) & (rows.lens[rows.sampled] > 1)
        if not self._grammars.has_any(step.sampled_slots[drafted]):
            return []
        found = self._steps.backend.drafts_of(step)
        return [tokens[: max(count, 0)] for count, *tokens in found.tolist()]

    def collect(self, step: Step) -> None:
        """Consumes the step's tokens: cuts and ends rows, and notes slots whose next step sampled without the grammar
        that has just begun."""
        home, sampled = step.home, step.rows.sampled
        assert home.tokens is not None
        consumed = self._grammars.consume(step.sampled_slots, home.tokens[sampled])
        runs = (home.tokens[sampled] >= 0).sum(1)
        for place, (count, end) in consumed.cuts.items():
            self._cut(step, int(sampled[place]), count, end)
        redone = []
        behind = self._steps.behind(step)
        for place in consumed.turned:
            slot = int(step.sampled_slots[place])
            self._watch(slot)
            self._steps.mark(slot)
            if self._row(slot).is_waiting:
                continue
            # Of a run that was cut, the device has more tokens than the answer, so the next step began too far.
            is_cut = place in consumed.cuts and consumed.cuts[place][0] < runs[place]
            follows = behind is not None and behind.error is None and slot in behind.sampled_slots
            if is_cut or (follows and behind is not None and behind.chosen):
                self._row(slot).redoes = follows
                redone.append(slot)
        step.notes[self.name] = redone

    def after(self, step: Step, output: StepOutput, places: Sequence[int], scheduler: Scheduler) -> None:
        """Drops tokens that were sampled without the grammar, and appends the tokens that grammars force."""
        settler = scheduler.settler
        for slot in step.notes.get(self.name, ()):
            settler.redo(slot)
        for row, slot in zip(step.rows.sampled.tolist(), step.sampled_slots.tolist()):
            matched = self._grammars.rows.get(slot)
            if matched is None:
                continue
            room = self._room[slot] = settler.room(slot)
            if not (tokens := matched.jump(room - 1)):
                continue
            matched.redoes |= settler.extend(slot, np.asarray(tokens, np.int32))
            for token in tokens:
                output.add(output.ids[places[row]], token, FinishReason.NONE)

    def ledger(self) -> dict[str, int]:
        return self._grammars.ledger()

    def _watch(self, slot: int) -> None:
        """Updates whether a slot's grammar sleeps, and which tokens wake the grammar."""
        watched = self._steps.watched
        wakers = self._row(slot).waits_for[: watched.shape[1] + 1]
        is_asleep = 0 < len(wakers) <= watched.shape[1]
        watched[slot] = -1
        if is_asleep:
            watched[slot, : len(wakers)] = wakers
        self._steps.backend.sampler.set_asleep(slot, is_asleep)

    def _row(self, slot: int) -> GrammarRow:
        return self._grammars.rows[slot]

    @staticmethod
    def _cut(step: Step, row: int, count: int, end: RowEnd | None) -> None:
        """Cuts a row's run of tokens to `count` tokens, and ends the row if the matcher ends it."""
        home = step.home
        if end is not None and end.error is not None:
            home.invalid[row] = end.error
        elif end is not None:
            home.finishes[row] = FinishReason.COMPLETE
            home.invalid.pop(row, None)
        home.cut(row, count)
