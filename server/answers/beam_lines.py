"""The allowed next tokens of beams under a grammar, and the grammar's state after the token that each beam takes.

Owner: loop; the work runs in the pool, since every beam needs a mask. In: beams' GrammarRows. Out: a line per beam, and
rows advanced by one token. A row is copied before it advances, because two beams may continue the same beam.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.base.errors import EngineError
from engine.base.request import FinishReason, TokenLogprob
from engine.grammar.row import GrammarRow, take_ends

MOST_LISTED = 1024  # most allowed tokens that are requested by id; for more, the likeliest tokens often suffice


@dataclass(frozen=True, slots=True, eq=False)
class Line:
    """The allowed next tokens of one beam."""

    allowed: np.ndarray | None = None  # int64, ascending; None: all tokens
    finish: FinishReason = FinishReason.NONE  # set if no token is allowed
    error: EngineError | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        """All allowed tokens, for a request by id."""
        return () if self.allowed is None else tuple(self.allowed.tolist())

    @property
    def listed(self) -> tuple[int, ...]:
        """`tokens` if they are few, otherwise ()."""
        return () if self.allowed is None or len(self.allowed) > MOST_LISTED else self.tokens

    def likeliest(self, entry: TokenLogprob, most: int) -> list[tuple[int, float]]:
        """The `most` likeliest allowed tokens among those that an entry lists, with their log-probabilities."""
        if self.allowed is None:
            return list(zip(entry.top_ids, entry.top_logprobs))[:most]
        logprobs_of = dict(zip(entry.top_ids, entry.top_logprobs))
        logprobs_of = {token: logprobs_of[token] for token in {*self.allowed.tolist()} & logprobs_of.keys()}
        return sorted(logprobs_of.items(), key=lambda pair: (-pair[1], pair[0]))[:most]

    def is_short(self, entry: TokenLogprob, most: int) -> bool:
        """Whether the entry may lack some of the `most` likeliest allowed tokens."""
        if self.allowed is None or self.listed:
            return False
        return len(self.likeliest(entry, most)) < most


def lines_of(rows: Sequence[GrammarRow | None], vocab: int) -> list[Line]:
    """A line per row (pool). `vocab`: the number of tokens that the model chooses from."""
    return [Line() if row is None else line_of(row, vocab) for row in rows]


def line_of(row: GrammarRow, vocab: int) -> Line:
    if row.matcher is None:
        return Line()
    words = np.frombuffer(row.matcher.compute_bitmask(), np.uint32)[: row.num_words].copy()
    row.finish(words, take_ends(words[None], row.end)[0], None)
    if row.verdict is not None:
        reason = FinishReason.ERROR if row.verdict.error else FinishReason.COMPLETE
        return Line(np.empty(0, np.int64), reason, row.verdict.error)
    return Line(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab]))


def grown_rows(pairs: Sequence[tuple[GrammarRow, int]]) -> list[tuple[GrammarRow, bool]]:
    """(row after the token, whether the answer is complete) of each pair (pool)."""
    found = []
    for row, token in pairs:
        copy = row.copy()
        found.append((copy, copy.take(token) is not None))
    return found
