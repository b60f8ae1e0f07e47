"""Tokenizer: the interface of every kind of tokenizer.

Owner: any thread. Nothing in a tokenizer changes after loading, so threads share it without locks. In: text, or token
ids. Out: token ids, or text; and the table of token bytes from which answers are detokenized (`_fast/detok.pyx`).
server/render/load_tokenizer.py chooses the kind.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from _fast.detok import Detokenizer, TokenTable
from server.render.errors import RenderError, invalid
from server.render.prompt import PIECE
from server.render.tokenizer_config import NAMED_TOKENS

if TYPE_CHECKING:
    from server.render.mistral_chat import MistralChat


@dataclass(frozen=True, slots=True)
class PlainTexts:
    """Encodes texts in which special tokens are ordinary text."""

    first: Callable[[str], list[int]]  # a text at the beginning of a prompt, or after a marker that begins one
    inside: Callable[[str], list[int]]  # a text that continues another: no piece gets a space in front


class Tokenizer(ABC):
    """Encodes and decodes; has the special tokens by name and the checkpoint's chat templates."""

    strip = 0  # spaces dropped at the start of a text
    decodes_first_apart = False  # whether a token at the start of a text has other bytes than elsewhere
    ends: tuple[int, ...] = ()  # tokens that end an answer, defined only in the released code and in no file
    chat_format: MistralChat | None = None  # renders conversations in place of templates

    def __init__(
        self, config: dict[str, Any], templates: dict[str, str], named: dict[str, str], table: TokenTable
    ) -> None:
        self.config = config  # tokenizer_config.json
        self.chat_templates = templates  # by name; "default" is the one to use
        self.special_tokens = named  # name -> text, as passed to templates
        self.table = table

    def end_tokens(self) -> tuple[int, ...]:
        """Tokens that end an answer, in addition to those of the model's files: training tools often change only the
        tokenizer's `eos_token`.
        """
        named = self.special_tokens.get("eos_token")
        end = None if named is None else self.id_of(named)
        return self.ends if end is None else (*self.ends, end)

    def require_texts(self, param: str) -> None:  # noqa: B027 - most tokenizers have them
        """Raise RenderError, naming the parameter, if the server has no tokenizer."""

    # -- ids and text

    @abstractmethod
    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a text."""

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Token ids of each text, without special tokens."""
        return [self.encode(text) for text in texts]

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]] | None:
        """Ids and token types of two texts as one input; None if this kind of tokenizer has no pairs."""
        return None

    @abstractmethod
    def encode_segments(self, segments: Iterable[tuple[str, bool]], add_special_tokens: bool = False) -> list[int]:
        """Ids of a text in pieces (text, plain); in plain pieces, special tokens are ordinary text."""

    def plain_texts(self, spellings: Iterable[str]) -> PlainTexts:
        """Encoders of texts in which neither special tokens nor these spellings become tokens."""
        return PlainTexts(self._plainly, self._plainly)

    def _plainly(self, text: str) -> list[int]:
        return self.encode_segments([(text, True)])

    @abstractmethod
    def token_of(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of a token."""

    @abstractmethod
    def id_of(self, token: str) -> int | None:
        """The id of a token by its spelling in the vocabulary."""

    @property
    @abstractmethod
    def special_spellings(self) -> list[str]:
        """The spelling of every special token."""

    @property
    def added_tokens(self) -> dict[str, int]:
        """Tokens outside the base vocabulary, special or not, by their spelling; including parsers' markers."""
        found = {name: self.id_of(name) for name in self.special_spellings}
        return {name: token_id for name, token_id in found.items() if token_id is not None}

    def decode(self, ids: Sequence[int] | np.ndarray, skip_special_tokens: bool = False) -> str:
        """The text of a whole sequence; spaces are not cleaned up."""
        first = self.first_bytes if self.decodes_first_apart else None
        machine = Detokenizer(self.table, skip_special=skip_special_tokens, strip=self.strip, first=first)
        texts = [machine.feed(ids[start : start + PIECE]) for start in range(0, len(ids), PIECE)]
        return "".join(texts) + machine.finish()

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text; b"" for ids without a token."""
        return self.table.token_bytes(token_id)

    def first_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds at the start of a text."""
        return self.table.token_bytes(token_id)

    def token_text(self, token_id: int) -> str:
        """The text of one token; invalid UTF-8 becomes U+FFFD."""
        return self.table.token_bytes(token_id).decode("utf-8", "replace")

    def is_special(self, token_id: int) -> bool:
        return self.table.is_special(token_id)

    def info(self) -> dict[str, Any]:
        """tokenizer_config.json for clients: tokens as plain text, the template in use, no paths."""
        settings = {
            name: value for name, value in self.config.items() if not name.endswith(("_file", "_path", "_paths"))
        }
        settings.pop("added_tokens_decoder", None)
        settings.update(self.special_tokens)
        for name in NAMED_TOKENS:
            settings.setdefault(name, None)
        return {**settings, "chat_template": self.chat_templates.get("default"), "vocab_size": self.vocab_size}

    @property
    def vocab_size(self) -> int:
        """One more than the highest id."""
        return self.table.num_tokens


def unsplittable() -> RenderError:
    """The error for a text on which the splitting pattern fails: hundreds of thousands of marks in a row."""
    return invalid("The text has a run of characters too long for this model's tokenizer; break it with spaces.")
