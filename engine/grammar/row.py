"""GrammarRow: one choice under its grammar; consumes the answer's tokens, finishes masks, finds forced tokens.

Owner: device thread; in beam search a thread of the pool. In: tokens, and masks of the grammar library. Out: the ends
of answers, masks after the request's other rules, tokens that the grammar forces. A matcher consumes only the tokens of
the answer, so chunked prompts, cached prompts and preemption do not affect it: recomputed tokens are not sampled again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.base.errors import EngineError, GrammarConflictError
from engine.base.request import SamplingParams
from engine.grammar.compile import Grammar

if TYPE_CHECKING:
    import llguidance

log = logging.getLogger("omniloop.engine")

LEAST_JUMP = 2  # least forced tokens of a jump: a single token costs a step with or without a jump
MOST_BYTES = 256  # bytes of forced text per jump
WATCHED_FIELDS = (  # fields of SamplingParams that require work for each token and so exclude jumps
    "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens", "logit_bias", "allowed_token_ids",
    "not_first_token_ids", "bad_words", "timestamps", "logprobs", "logprob_token_ids", "dry_multiplier",
)  # fmt: skip
CONFLICT = (
    "no token was left that the grammar, bad_words and allowed_token_ids allow together, or the grammar grew too "
    "complex in the middle of the answer; allow more tokens, or make the grammar simpler"
)
REFUSED = "the grammar refused a token that its mask had allowed; this is a mistake of the server's"


@dataclass(frozen=True, slots=True)
class RowEnd:
    """The end of a row by its grammar: the answer is complete, or the row has an error."""

    keeps_token: bool  # the answer includes this step's token
    error: EngineError | None = None


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
        self.may_open = bool(self._opens)  # the next token may open a part that the grammar does not constrain
        self._asleep = bool(self._starts) and not self._opens  # the grammar has not begun
        self._is_free = grammar.spec.kind == "free"
        self._jumps = jumps and self._encode is not None and chooses_freely(params)
        self._jumped = False  # a jump happened after the newest sampled token
        self._left = grammar.spec.budget  # tokens left before the grammar must begin; None: no limit
        self.wakes = grammar.spec.starts[:1]  # the token that is forced when no token is left
        self._taken = 0  # tokens of the answer
        self._verdict: RowEnd | None = None  # ends the row with the step in flight, whatever token that step chooses
        self.redoes = False  # the next token was chosen without the grammar, and must be sampled again
        self.over = False  # the row has ended; tokens of steps in flight are ignored

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
        """The matcher; None while the grammar does not constrain the answer."""
        return None if self._asleep or self.over or self._is_free else self._matcher

    @property
    def is_steady(self) -> bool:
        """Whether tokens change only the matcher, until the grammar ends: none of them opens a part or is forced."""
        return self.matcher is not None and not (self.may_open or self._jumps)

    @property
    def must_wake(self) -> bool:
        """Whether the budget of tokens before the grammar is used up."""
        return self._asleep and self._left is not None and self._left <= 0

    @property
    def waits_for(self) -> tuple[int, ...]:
        """The tokens that start a sleeping grammar; (): the grammar has begun, or has a token budget."""
        return tuple(self._starts) if self.is_waiting else ()

    @property
    def is_waiting(self) -> bool:
        """Whether the grammar has not begun and waits only for a token."""
        return self._asleep and self._left is None

    def take(self, token: int) -> RowEnd | None:
        """Consumes the token that a step chose. Returns the row's end, or None if the row continues."""
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
            self.over = True  # the scheduler ends the row
            return None
        if not self._matcher.consume_token(token):
            self.over = True
            refused = "doesn't satisfy" in self._matcher.get_error()  # else the matcher hit a limit
            return RowEnd(False, GrammarConflictError(REFUSED if refused else CONFLICT))
        if self._matcher.is_stopped():  # no token can follow, so the row ends without an end token
            self.over = True
            return RowEnd(True)
        return None

    def jump(self, most: int) -> list[int]:
        """Consumes and returns the tokens that the grammar forces, at most `most`; []: fewer than LEAST_JUMP.

        The tokens are the tokenization of the settled part of the forced text. Between two jumps at least one token is
        sampled, whatever steps are in flight.
        """
        if not self._jumps or self._jumped or self.may_open or most < LEAST_JUMP:
            return []
        if self.matcher is None or self._verdict is not None:
            return []
        try:
            return self._forced(most)
        except Exception:  # an error of the tokenizer or the library: this row continues token by token
            log.exception("the forced text of an answer could not be cut into tokens")
            self._jumps = False
            return []

    def _forced(self, most: int) -> list[int]:
        """As `jump`; if it raises, the row is unchanged."""
        probe = self._matcher.deep_copy()  # takes some microseconds; an error in the copy leaves the row unchanged
        forced = probe.compute_ff_bytes()
        if probe.is_error():
            self._jumps = False
        text = forced[:MOST_BYTES].decode("utf-8", "ignore")
        if not self._jumps or self._encode is None or len(text) <= LEAST_JUMP:
            return []
        tokens = self._encode(text[: settled(text)])[:most]
        if (end := next((place for place, token in enumerate(tokens) if token in self._ending_ids), None)) is not None:
            tokens = tokens[:end]
        for run in (tokens, tokens[:-1]):  # the answer's last token must be sampled, so that it ends the row as usual
            probe = self._matcher.deep_copy()
            taken = probe.try_consume_tokens(run) if len(run) >= LEAST_JUMP else 0
            if taken and taken == len(run) and not probe.is_stopped():
                self._matcher, self._jumped = probe, True
                self._taken += taken
                return run
        return []

    def finish(self, line: np.ndarray, may_end: bool, allowed: np.ndarray | None) -> None:
        """Applies the request's other rules to a mask from the matcher, uint32 [num_words], whose end bit was removed.

        `may_end`: whether the end bit was set (it always is if the matcher is in error); `allowed`: the mask of the
        request's other rules, or None. If no token is left, the row ends with the step that this mask belongs to.
        """
        if may_end and self._matcher.is_error():
            self._end_now(line, RowEnd(False, GrammarConflictError(CONFLICT)))
            return
        if self.may_open:
            self._set(line, self._opens)
        if allowed is not None:
            line &= allowed
        if may_end and (self._taken >= self._min_tokens or line.any()):
            self._set(line, self._ending_ids)  # before min_tokens the other rules remove these ids
            if allowed is not None:
                line &= allowed
        if (may_end or allowed is not None) and not line.any():
            self._end_now(line, RowEnd(False, None if may_end else GrammarConflictError(CONFLICT)))

    def finish_behind(self, line: np.ndarray, behind: int, may_end: bool, allowed: np.ndarray | None) -> None:
        """As `finish`, for the token behind so many drafts. No token is left in a mask of zeros: what this means is
        known once the drafts are tokens of the answer. The library's masks for grammars in error allow only the end."""
        if not line.any():
            return
        if allowed is not None:
            line &= allowed
        if may_end and (self._taken + behind >= self._min_tokens or line.any()):
            self._set(line, self._ending_ids)
            if allowed is not None:
                line &= allowed

    def wake(self, line: np.ndarray) -> None:
        """Makes the mask allow only the token that starts the grammar."""
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
    """The length of the text's prefix whose tokenization does not depend on the text that follows.

    Tokenizers merge only inside pieces: letters, digits or punctuation with a preceding sign or space, or punctuation
    with following line ends. So the last piece stays open, as does a punctuation mark that may join a following word.
    Example: a model that writes ` ` and `{"` has never seen the token ` {` before a quote, and would close the object.
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
    """Whether no rule but the grammar restricts tokens, and the request wants no log-probabilities."""
    plain = SamplingParams()
    return all(getattr(params, name) == getattr(plain, name) for name in WATCHED_FIELDS)


def take_ends(words: np.ndarray, end: int) -> list[bool]:
    """Clears the end bit in masks uint32 [rows, num_words]; returns for each row whether the bit was set."""
    word, bit = end >> 5, np.uint32(1 << (end & 31))
    had: list[bool] = (words[:, word] & bit != 0).tolist()
    words[:, word] &= ~bit
    return had
