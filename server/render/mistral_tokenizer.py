"""MistralTokenizer: tekken.json, or a versioned tokenizer.model, through mistral-common (an optional library).

Owner: any thread; the library's objects do not change after construction. In: text, or token ids. Out: token ids, or
text. Text never becomes a control token here: `[INST]` in a prompt is six characters, as on Mistral's own servers, so
nothing needs to be escaped. `chat_format` renders conversations in place of a template.
"""

from __future__ import annotations

import array
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from _fast.detok import TokenTable
from engine.base.errors import ConfigError
from server.render.mistral_chat import MistralChat
from server.render.tokenizer import PlainTexts, Tokenizer, unsplittable

SPACE = "▁"  # a space inside sentencepiece's pieces
FIRST = "☺"  # mistral-common's choice: no token joins it to the character after it
NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


class MistralTokenizer(Tokenizer):
    """One tokenizer of mistral-common."""

    def __init__(self, library: Any) -> None:
        self.library = library  # its MistralTokenizer
        self._text = library.instruct_tokenizer.tokenizer  # Tekkenizer or SentencePieceTokenizer
        self.is_tekken = type(self._text).__name__ == "Tekkenizer"
        self._special = {self._text.id_to_piece(token_id): token_id for token_id in sorted(self._text.special_ids)}
        named = {name: text for name, text in NAMED.items() if text in self._special}
        config = {"tokenizer_class": "MistralCommonTokenizer", "version": str(self._text.version.value)}
        super().__init__(config, {}, named, self._table())
        self.decodes_first_apart = not self.is_tekken
        self.chat_format = MistralChat(library)

    @classmethod
    def read(cls, source: Path) -> MistralTokenizer:
        """Read the file; its name gives its kind and version."""
        try:
            from mistral_common.tokens.tokenizers.mistral import MistralTokenizer as Library
            from mistral_common.tokens.tokenizers.mistral import ValidationMode
        except ImportError as error:
            raise _missing(source) from error
        logging.getLogger("mistral_common").setLevel(logging.WARNING)
        try:
            # agnostic: like with templates, any role may end a conversation
            return cls(Library.from_file(source, mode=ValidationMode.agnostic))
        except ImportError as error:
            raise _missing(source) from error
        except Exception as error:  # assertions, key errors and the library's own errors
            said = f"{type(error).__name__}: {error}"[:300]
            raise ConfigError(f"{source}: mistral-common cannot read this tokenizer ({said})") from error

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        try:
            return self._text.encode(text, bos=add_special_tokens, eos=False)
        except ValueError as error:
            raise unsplittable() from error

    def encode_segments(self, segments: Iterable[tuple[str, bool]], add_special_tokens: bool = False) -> list[int]:
        return self.encode("".join(text for text, _ in segments), add_special_tokens)

    def plain_texts(self, spellings: Iterable[str]) -> PlainTexts:
        """Text never becomes a control token here. The text inside follows a character, as in mistral-common's prompts
        of gaps; for sentencepiece this character takes the space that begins a text.
        """
        first = len(self.encode(FIRST))
        return PlainTexts(self.encode, lambda text: self.encode(FIRST + text)[first:])

    def first_bytes(self, token_id: int) -> bytes:
        """The bytes of a text's first token: sentencepiece drops the space of its first piece."""
        known = 0 <= token_id < self._text.n_words and not self.is_special(token_id)
        if self.is_tekken or not known or self._text._model.IsByte(token_id):
            return self.table.token_bytes(token_id)
        return self._text._model.decode([token_id]).encode()

    def token_of(self, token_id: int) -> str | None:
        return self._text.id_to_piece(token_id) if 0 <= token_id < self._text.n_words else None

    def id_of(self, token: str) -> int | None:
        if token in self._special:
            return self._special[token]
        if not self.is_tekken:
            token_id = self._text._model.piece_to_id(token)
            return token_id if self._text.id_to_piece(token_id) == token else None
        ids = self.encode(token)
        return ids[0] if len(ids) == 1 else None

    @property
    def special_spellings(self) -> list[str]:
        return list(self._special)

    def _table(self) -> TokenTable:
        offsets, total, pieces = array.array("i", [0]), 0, []
        for token_id in range(self._text.n_words):
            pieces.append(self._piece(token_id))
            total += len(pieces[-1])
            offsets.append(total)
        special = bytearray(len(pieces))
        for token_id in self._special.values():
            special[token_id] = 1
        return TokenTable(b"".join(pieces), offsets, bytes(special), not self.is_tekken)

    def _piece(self, token_id: int) -> bytes:
        text = self._text
        if self.is_tekken:
            return text.id_to_byte_piece(token_id, "keep")
        piece = text.id_to_piece(token_id)
        if text._model.IsByte(token_id):
            return bytes([int(piece[3:5], 16)])
        if token_id == text.unk_id:
            return " ⁇ ".encode()  # the library's text for unknown pieces
        return piece.replace(SPACE, " ").encode()


def _missing(source: Path) -> ConfigError:
    return ConfigError(f"{source}: needs mistral-common; run pip install 'mistral-common[sentencepiece]'")
