"""GrammarSpec: what an answer must look like, as plain data.

Owner: none, values. Made by the server (server/structure/structure.py) out of a request; engine/grammar/compile.py
compiles it. The engine knows no dialect of requests: a JSON Schema has been checked by then, a choice is Lark.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
