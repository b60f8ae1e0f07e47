"""Escapes special tokens in clients' texts, so that they are tokenized as plain text (`--escape-special-tokens`).

Owner: the pool; one Escapes per request. In: a client's text. Out: the text in which each spelled special token is
replaced by a mark of digits, unique to the request. Templates pass marks unchanged (trimming, quoting, upper case).
After the template, each mark is replaced by its spelling again, which is tokenized as plain text.

    client text -> marks -> template -> segments: (text, False) as templates are, (spelling, True) as plain text
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from typing import Any


class Escapes:
    """The marks of one request."""

    def __init__(self, spellings: Iterable[str]) -> None:
        longest_first = sorted(filter(None, spellings), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        self._nonce = f"{secrets.randbelow(10**24):024d}"
        self._mark = re.compile(self._nonce + r"(\d{6})")
        self._found: list[str] = []

    def text(self, text: str) -> str:
        """A client's text with marks in place of special tokens."""
        return text if self._special is None else self._special.sub(self._put, text)

    def value(self, value: Any) -> Any:
        """A copy of plain data with marks in every string, including keys."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.value(key): self.value(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.value(item) for item in value]
        return value

    def segments(self, text: str) -> list[tuple[str, bool]]:
        """The rendered text in pieces; True: a piece to tokenize as plain text."""
        pieces = self._mark.split(text)
        return [
            (self._found[int(piece)], True) if index % 2 else (piece, False)
            for index, piece in enumerate(pieces)
            if piece
        ]

    def _put(self, match: re.Match[str]) -> str:
        self._found.append(match[0])
        return f"{self._nonce}{len(self._found) - 1:06d}"
