"""Markers: distinguishes marker tokens from text with the same spelling, for parsers.

Owner: none, made once while the server loads. In: a tokenizer and the formats in use. Out: a second TokenTable in which
each marker token is one private-use character, drawn when the server starts; and the spellings of these characters, for
markers that occur outside a call or reasoning block. Markers that are no token of the vocabulary stay text.

    id of <tool_call> -> U+10F3A7 -> parser sees the marker        "<tool_call>" spelled in letters -> text
"""

from __future__ import annotations

import array
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from _fast.detok import TokenTable
from server.output.events import PLAIN, Spelling
from server.output.tools.json_text import escaped
from server.render.tokenizer import Tokenizer

PRIVATE = range(0x100000, 0x10F000)  # private-use code points


@dataclass(frozen=True, slots=True)
class Markers:
    """Marker tokens of one vocabulary."""

    table: TokenTable
    chars: Mapping[str, str] = field(default_factory=dict)  # marker -> its character
    ids: Mapping[str, int] = field(default_factory=dict)  # marker -> its token
    with_special: Spelling = PLAIN  # characters to text
    skipped: Spelling = PLAIN  # the same without special tokens

    @classmethod
    def of(cls, tokenizer: Tokenizer, texts: Iterable[str]) -> Markers:
        """The added tokens of the vocabulary that occur in any of the texts."""
        added = tokenizer.added_tokens
        texts = list(texts)
        used = [name for name in added if len(name) > 1 and any(name in text for text in texts)]
        if not used:
            return cls(tokenizer.table)
        first = secrets.choice(PRIVATE)
        chars = {name: chr(first + at) for at, name in enumerate(used)}
        table = table_with({added[name]: char.encode() for name, char in chars.items()}, tokenizer.table)
        special = {name for name in used if tokenizer.is_special(added[name])}
        ids = {name: added[name] for name in used}
        return cls(table, chars, ids, spelling(chars, frozenset()), spelling(chars, special))


def spelling(chars: Mapping[str, str], without: Iterable[str]) -> Spelling:
    hidden = set(without)
    text = {ord(char): "" if name in hidden else name for name, char in chars.items()}
    return Spelling(text, {code: escaped(name) for code, name in text.items()})


def table_with(changed: Mapping[int, bytes], table: TokenTable) -> TokenTable:
    """The same table with other bytes for a few tokens, which are never left out."""
    pieces = [changed.get(token) or table.token_bytes(token) for token in range(table.num_tokens)]
    offsets, total = array.array("i", [0]), 0
    for piece in pieces:
        total += len(piece)
        offsets.append(total)
    special = bytes(table.is_special(token) and token not in changed for token in range(table.num_tokens))
    return TokenTable(b"".join(pieces), offsets, special, table.each_byte)
