"""GrammarSpec and Grammar: what an answer must look like, as plain data and compiled, as a Request carries it.

Owner: none, values; a grammar's lanes belong to the compiler (loop), their rows to the device thread. The server writes
a spec (server/structure/structure.py), engine/grammar/compile.py makes the grammar, engine/grammar/advance.py takes its
matchers. The engine knows no dialect of requests: a JSON Schema has been checked by then, a choice is Lark.
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
    """`kind` says what `text` is.

    schema   JSON Schema as JSON, all of whose keywords the grammar library enforces
    lark     a Lark grammar that this server wrote: may name special tokens as <|name|> or <[id]>, and hold %json
    ebnf     a grammar that a client wrote, in Lark or in GBNF: reaches ordinary text only
    free     nothing holds the answer once it has begun; there is a budget for what comes before it
    """

    kind: Kind
    text: str
    starts: tuple[int, ...] = ()  # the grammar begins behind the first of these token ids; (): with the answer
    fed: tuple[int, ...] = ()  # of `starts`, those that belong to the grammar: its first token
    opens: tuple[int, ...] = ()  # where given, only an answer whose first token is one of these waits for `starts`
    around: str = ""  # a Lark grammar of the whole answer, which names the one of `text` as @answer
    budget: int | None = None  # tokens that may come before the first of `starts`, which is forced then
    relaxed: tuple[str, ...] = ()  # keywords of the request's schemas that the grammar does not enforce


class Vocabulary(Protocol):
    """What rows read of the tokens of a grammar; engine/grammar/vocabulary.py describes them and makes matchers."""

    encode: Callable[[str], list[int]] | None
    memory_bytes: int
    blanks: frozenset[int]
    end: int
    num_words: int


@dataclass(slots=True, eq=False)
class Lane:
    """A prototype and how many live choices have copies of it, which the device thread counts."""

    prototype: llguidance.LLMatcher
    rows: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Grammar:
    """A compiled grammar. Every choice advances a copy of a matcher; lanes come and never go."""

    spec: GrammarSpec
    vocabulary: Vocabulary
    lanes: list[Lane] = field(default_factory=list)

    def matcher(self) -> llguidance.LLMatcher:
        """A matcher of its own for one choice, at the beginning."""
        return self.lanes[0].prototype.deep_copy()

    def lane(self) -> Lane:
        """The one with the fewest choices."""
        return min(self.lanes, key=lambda lane: lane.rows)
