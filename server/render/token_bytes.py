"""The bytes of every token, read once from a tokenizer's decoder.

Owner: none; called while a tokenizer is loaded. In: a Rust tokenizer. Out: a TokenTable (`_fast/detok.pyx`), which
makes detokenizing a look-up; and how the decoder treats the start of a text (DecoderRules). Three kinds are read as
data: byte-level alphabets, sentencepiece pieces (metaspace, with or without byte fallback), and joined pieces. With any
other decoder, the library itself decodes each token once, after another token.
"""

from __future__ import annotations

import array
import codecs
import json
from dataclasses import dataclass
from typing import Any

import tokenizers

from _fast.detok import TokenTable


@dataclass(frozen=True, slots=True)
class DecoderRules:
    """A decoder pipeline as data. `known` False: only the library can compute a token's bytes."""

    byte_level: bool = False
    byte_fallback: bool = False
    replace: tuple[tuple[str, str], ...] = ()
    metaspace: str | None = None  # the character for a space, which is dropped from the first token
    metaspace_first: bool = False
    strip: int = 0  # spaces dropped at the start of a text
    known: bool = True


def decoder_rules(core: tokenizers.Tokenizer) -> DecoderRules:
    """Read the rules from the decoder's own JSON."""
    if core.decoder is None:
        return DecoderRules(known=False)
    state: dict[str, Any] = json.loads(core.decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    fields: dict[str, Any] = {"replace": ()}
    for step in steps:
        kind = step["type"]
        if kind == "ByteLevel":
            fields["byte_level"] = True
        elif kind == "ByteFallback":
            fields["byte_fallback"] = True
        elif kind == "Replace" and "String" in step["pattern"]:
            fields["replace"] = (*fields["replace"], (step["pattern"]["String"], step["content"]))
        elif kind == "Metaspace":
            fields["metaspace"] = step["replacement"]
            fields["metaspace_first"] = step["prepend_scheme"] != "never"
        elif kind == "Strip" and step["content"] == " " and not step["stop"]:
            fields["strip"] = step["start"]
        elif kind != "Fuse":
            return DecoderRules(known=False)
    if fields.get("byte_level") and len(steps) > 1:
        return DecoderRules(known=False)
    return DecoderRules(**fields)


def byte_alphabet() -> dict[int, int]:
    """Code point -> byte of the byte-level alphabet: printable Latin-1 maps to itself, the other bytes from
    U+0100 on.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    mapping = {byte: byte for byte in plain}
    mapping.update({0x100 + k: byte for k, byte in enumerate(b for b in range(256) if b not in mapping)})
    return mapping


class TokenBytes:
    """Bytes of single tokens under one decoder."""

    def __init__(self, core: tokenizers.Tokenizer) -> None:
        self.core = core
        self.rules = decoder_rules(core)
        self._alphabet = byte_alphabet()

    def of(self, token: str) -> bytes:
        """The bytes that this token adds to a text, except at its start."""
        rules = self.rules
        if not rules.known:
            return self._by_library(token)
        if rules.byte_level:
            try:
                return bytes([self._alphabet[ord(char)] for char in token])
            except KeyError:
                return token.encode()
        for old, new in rules.replace:
            token = token.replace(old, new)
        if rules.byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        return token.replace(rules.metaspace, " ").encode() if rules.metaspace else token.encode()

    def first(self, token: str) -> bytes:
        """The bytes that this token adds at the start of a text."""
        if not self.rules.known:
            return self._decode([token])
        if self.rules.metaspace and self.rules.metaspace_first:
            return token.replace(self.rules.metaspace, "").encode()
        return self.of(token)

    def _by_library(self, token: str) -> bytes:
        return self._decode(["x", token])[1:]

    def _decode(self, tokens: list[str]) -> bytes:
        if self.core.decoder is None:
            return " ".join(tokens).encode()
        return self.core.decoder.decode(tokens).encode()

    def table(self, vocab: dict[str, int], added: dict[int, tokenizers.AddedToken]) -> TokenTable:
        """The table for all ids up to the highest; unused ids have no bytes."""
        num_tokens = max(max(vocab.values(), default=-1), max(added, default=-1)) + 1
        names: list[str] = [""] * num_tokens
        for token, token_id in vocab.items():
            names[token_id] = token
        for token_id, entry in added.items():  # the library decodes a normalised token as it matches it: with its space
            names[token_id] = self.core.id_to_token(token_id) or entry.content
        pieces = self._pieces(names)
        offsets = array.array("i", [0])
        total = 0
        for piece in pieces:
            total += len(piece)
            offsets.append(total)
        special = bytearray(num_tokens)
        for token_id, entry in added.items():
            special[token_id] = entry.special
        return TokenTable(b"".join(pieces), offsets, bytes(special), self.rules.byte_fallback)

    def _pieces(self, names: list[str]) -> list[bytes]:
        if not self.rules.byte_level:
            return [self.of(name) if name else b"" for name in names]
        # 150,000 names: one call of the C codec for each, Python only for names outside the alphabet.
        encode = codecs.charmap_encode
        pieces = []
        for name in names:
            try:
                pieces.append(encode(name, "strict", self._alphabet)[0])
            except UnicodeEncodeError:
                pieces.append(name.encode())
        return pieces
