"""GrammarVocabulary: the grammar library's tokenizer, built once from our own token bytes.

Owner: made while the server loads; read by any thread. The build holds the GIL for about a second per 150,000
tokens, so a server builds it before it is ready. The build reads back each id's bytes and compares them. If the
library has different bytes than the detokenizer, masks would allow the wrong text, so structured output stays off.

    bits of a line:  0 .. num_tokens - 1 | end | padding        bit t is bit t % 32 of word t // 32

`end` is an extra id after all tokens; its bit means "the answer may end here". The ids that end an answer differ by
request (ignore_eos, stop_token_ids), so engine/grammar/row.py replaces the end bit by the bits of these ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import llguidance

from engine.base.errors import GrammarError

STATE_BYTES = 2000  # most bytes of a lexer state
MOST_STATES = 50_000


def limits_of(memory_bytes: int) -> llguidance.LLParserLimits:
    """The library's limits for a lexer of at most `memory_bytes` bytes."""
    return llguidance.LLParserLimits(
        initial_lexer_fuel=1_000_000,  # about 20 ms of building
        step_lexer_fuel=40_000,  # about 3 ms of a step
        step_max_items=20_000,  # about 1 ms of a step
        max_lexer_states=min(MOST_STATES, memory_bytes // STATE_BYTES),
        max_grammar_size=500_000,
        verbose_errors=False,  # verbose errors repeat the client's text
    )


class _Tokens:
    """The tokenizer interface that LLTokenizer expects."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: list[int], end: int) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, special, end
        self._single = {token: number for number, token in enumerate(tokens) if len(token) == 1}

    def __call__(self, text: bytes) -> list[int]:
        """A text as single-byte tokens. The library tokenizes only forced text, which our grammars switch off."""
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
        """`encode`: text -> ordinary tokens; `memory_bytes`: the memory limit of a grammar with all its lanes.

        Raises ValueError if the library has different bytes for a token.
        """
        self.encode = encode
        self.memory_bytes = memory_bytes
        self._limits = limits_of(memory_bytes)
        tokens = [token_bytes(number) for number in range(num_tokens)]
        self.blanks = frozenset(number for number, token in enumerate(tokens) if token and not token.strip())
        special = [number for number in range(num_tokens) if is_special(number)]
        self.end = num_tokens
        self.num_words = num_tokens // 32 + 1  # int32 words of a mask
        wrapped = llguidance.TokenizerWrapper(_Tokens([*tokens, b"<end>"], [*special, num_tokens], num_tokens))
        self._tokenizer = llguidance.LLTokenizer(
            wrapped, n_vocab=num_tokens + 1, eos_token=[num_tokens], slices=llguidance.LLTokenizer.json_slices()
        )
        self._compare(tokens)

    def _compare(self, tokens: Sequence[bytes]) -> None:
        for number, token in enumerate(tokens):
            if b"\xff" in token:  # never in UTF-8 text, so no grammar allows the token
                continue
            found = self._tokenizer.decode_bytes([number])
            if found != token:
                raise ValueError(f"token {number} is {token!r} here and {found!r} to the grammar library")

    def matcher(self, lark: str) -> llguidance.LLMatcher:
        """A matcher at the grammar's beginning; it may be in error."""
        try:
            return llguidance.LLMatcher(self._tokenizer, lark, log_level=0, limits=self._limits)
        except ValueError:  # a number beyond the range of floats
            raise GrammarError("grammar_invalid", "the grammar holds a number out of range") from None
