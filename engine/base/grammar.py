"""GrammarSpec and Grammar: the form that an answer must have, as plain data and compiled; a Request carries both.

Owner: none, values; a grammar's lanes belong to the compiler (loop), their rows to the device thread. The server writes
a spec (server/structure/structure.py), engine/grammar/compile.py makes the grammar, engine/grammar/advance.py uses its
matchers. The engine knows no request dialect: the server has checked JSON Schemas and written choices as Lark.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    import llguidance

Kind = Literal["schema", "lark", "ebnf", "free"]


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A grammar as text. `kind` says in which form:

    schema   a JSON Schema as JSON; the grammar library enforces all of its keywords
    lark     a Lark grammar that this server wrote: may name special tokens as <|name|> or <[id]>, and contain %json
    ebnf     a grammar that a client wrote, in Lark or in GBNF: can produce ordinary text only
    free     no constraint on the answer once it has begun; a budget limits the tokens before the answer
    """

    kind: Kind
    text: str
    starts: tuple[int, ...] = ()  # the grammar begins after the first of these token ids; (): with the answer
    fed: tuple[int, ...] = ()  # the ids of `starts` that are themselves the grammar's first token
    opens: tuple[int, ...] = ()  # if given, only an answer whose first token is in `opens` waits for `starts`
    around: str = ""  # a Lark grammar of the whole answer, which refers to the grammar of `text` as @answer
    budget: int | None = None  # tokens allowed before a token of `starts`; then starts[0] is forced
    relaxed: tuple[str, ...] = ()  # keywords of the request's schemas that the grammar does not enforce


class Vocabulary(Protocol):
    """The part of a grammar's vocabulary that rows read; engine/grammar/vocabulary.py implements it."""

    encode: Callable[[str], list[int]] | None
    memory_bytes: int
    blanks: frozenset[int]
    end: int
    num_words: int


@dataclass(slots=True, eq=False)
class Lane:
    """A prototype matcher, and the number of live choices with a copy of it; the device thread counts these."""

    prototype: llguidance.LLMatcher
    rows: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Grammar:
    """A compiled grammar. Every choice advances its own copy of a matcher; lanes are added and never removed."""

    spec: GrammarSpec
    vocabulary: Vocabulary
    lanes: list[Lane] = field(default_factory=list)

    def matcher(self) -> llguidance.LLMatcher:
        """A new matcher for one choice, at the grammar's beginning."""
        return self.lanes[0].prototype.deep_copy()

    def lane(self) -> Lane:
        """The lane with the fewest choices."""
        return min(self.lanes, key=lambda lane: lane.rows)
