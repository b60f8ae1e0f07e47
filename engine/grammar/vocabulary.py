"""GrammarVocabulary: the tokenizer as the grammar library knows it, made once from our own token bytes.

Owner: made while the server loads; read by any thread. Building holds the interpreter for about a second per 150,000
tokens, which is why a server does so before it is ready. Each id's bytes are read back and compared: where the library
sees other bytes than answers are detokenized with, masks would allow the wrong text, so structured output stays off.

    bits of a line:  0 .. num_tokens - 1 | end | padding        bit t is bit t % 32 of word t // 32

`end` is an id behind all tokens that stands for "the answer may end here". Which ids end an answer differs by request
(ignore_eos, stop_token_ids), so engine/grammar/advance.py sets the bits of these ids in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import llguidance

from engine.base.errors import GrammarError

STATE_BYTES = 2000  # of a lexer, at most
MOST_STATES = 50_000


def limits_of(memory_bytes: int) -> llguidance.LLParserLimits:
    """The library's limits, where a lexer may take so many bytes."""
    return llguidance.LLParserLimits(
        initial_lexer_fuel=1_000_000,  # about 20 ms of building
        step_lexer_fuel=40_000,  # about 3 ms of a step
        step_max_items=20_000,  # about 1 ms of a step
        max_lexer_states=min(MOST_STATES, memory_bytes // STATE_BYTES),
        max_grammar_size=500_000,
        verbose_errors=False,  # they repeat the client's text
    )


class _Tokens:
    """What LLTokenizer reads."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: list[int], end: int) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, special, end
        self._single = {token: number for number, token in enumerate(tokens) if len(token) == 1}

    def __call__(self, text: bytes) -> list[int]:
        """Some tokens for a text. The library asks for forced text only, which our grammars switch off."""
        return [self._single[text[at : at + 1]] for at in range(len(text))]


class GrammarVocabulary:
    """Tokens by id, ready for matchers."""

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        is_special: Callable[[int], bool],
        num_tokens: int,
        encode: Callable[[str], list[int]] | None = None,
        memory_bytes: int = 1 << 30,
    ) -> None:
        """`encode`: a text's ordinary tokens; `memory_bytes`: what a grammar may take, in all its lanes.

        Raises ValueError where the library reads other bytes than were given.
        """
        self.encode = encode
        self.memory_bytes = memory_bytes
        self._limits = limits_of(memory_bytes)
        tokens = [token_bytes(number) for number in range(num_tokens)]
        self.blanks = frozenset(number for number, token in enumerate(tokens) if token and not token.strip())
        special = [number for number in range(num_tokens) if is_special(number)]
        self.end = num_tokens
        self.num_words = num_tokens // 32 + 1  # of a line: int32
        wrapped = llguidance.TokenizerWrapper(_Tokens([*tokens, b"<end>"], [*special, num_tokens], num_tokens))
        self._tokenizer = llguidance.LLTokenizer(
            wrapped, n_vocab=num_tokens + 1, eos_token=[num_tokens], slices=llguidance.LLTokenizer.json_slices()
        )
        self._compare(tokens)

    def _compare(self, tokens: Sequence[bytes]) -> None:
        for number, token in enumerate(tokens):
            if b"\xff" in token:  # in no UTF-8 text, so no grammar allows it
                continue
            found = self._tokenizer.decode_bytes([number])
            if found != token:
                raise ValueError(f"token {number} is {token!r} here and {found!r} to the grammar library")

    def matcher(self, lark: str) -> llguidance.LLMatcher:
        """A matcher at the grammar's beginning; it may be in error."""
        try:
            return llguidance.LLMatcher(self._tokenizer, lark, log_level=0, limits=self._limits)
        except ValueError:  # numbers that no float holds
            raise GrammarError("grammar_invalid", "the grammar holds a number out of range") from None
