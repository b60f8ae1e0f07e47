"""A small vocabulary for grammar tests, and answers drawn at random under a grammar's masks."""

from __future__ import annotations

from functools import cache

import numpy as np

from engine.base.grammar import Grammar, GrammarSpec
from engine.grammar.compile import compile_now
from engine.grammar.vocabulary import GrammarVocabulary

SPECIAL = (b"<think>", b"</think>")
WORDS = (b'{"', b'": "', b'", "', b'": ', b'"}', b", ", b"true", b" the", b"ab", "é".encode(), "é".encode()[:1] + b"x")
TOKENS = (*(bytes([byte]) for byte in range(256)), *SPECIAL, *WORDS)


@cache
def vocabulary() -> GrammarVocabulary:
    return GrammarVocabulary(TOKENS.__getitem__, lambda number: TOKENS[number] in SPECIAL, len(TOKENS))


def compiled(text: str, kind: str = "lark") -> Grammar:
    return compile_now(GrammarSpec(kind, text), vocabulary())  # type: ignore[arg-type]


def allowed(matcher: object) -> np.ndarray:
    """The ids allowed by a matcher's mask, ascending; vocabulary().end is among them if the answer may end."""
    mask = matcher.compute_bitmask()  # type: ignore[attr-defined]
    return np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little"))


def drawn(grammar: Grammar, rng: np.random.Generator, most: int = 400) -> bytes | None:
    """A random answer under the masks that tends to end soon; None if it has not ended after `most` tokens."""
    matcher, answer, end = grammar.matcher(), b"", grammar.vocabulary.end
    for at in range(most):
        ids = allowed(matcher)
        assert not matcher.is_error(), matcher.get_error()
        closing = [token for token in ids.tolist() if token == end or token in (34, 93, 125)]
        token = int(rng.choice(closing if closing and rng.random() < 0.3 + at / most else ids))
        if token == end:
            return answer
        assert matcher.consume_token(token), matcher.get_error()
        answer += TOKENS[token]
        if matcher.is_stopped():
            return answer
    return None
