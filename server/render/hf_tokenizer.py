"""HfTokenizer: a checkpoint's tokenizer.json and the files next to it, without transformers.

Owner: any thread; the Rust object never changes after construction. Long texts are encoded and decoded with the GIL
released. In: text, or token ids. Out: token ids, or text. Special tokens spelled in a text become their ids.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, processors

from engine.base.errors import ConfigError
from server.render.frames import place_of
from server.render.token_bytes import TokenBytes
from server.render.tokenizer import PlainTexts, Tokenizer
from server.render.tokenizer_config import content, named_tokens, read_config, read_templates

# Shorter texts (in characters) are encoded without releasing the GIL: waking the library's threads takes longer.
RELEASE_CHARS = 4096


class HfTokenizer(Tokenizer):
    """The tokenizer of one tokenizer.json."""

    def __init__(self, core: tokenizers.Tokenizer, config: dict[str, Any], templates: dict[str, str]) -> None:
        self.core = core
        named = named_tokens(config)
        _register_special(core, config, named)
        core.no_truncation()
        core.no_padding()
        _frame(core, config, named)
        self._bytes = TokenBytes(core)
        self._added = core.get_added_tokens_decoder()
        table = self._bytes.table(core.get_vocab(with_added_tokens=False), self._added)
        super().__init__(config, templates, named, table)
        rules = self._bytes.rules
        self.strip = rules.strip
        self.decodes_first_apart = not rules.known or (rules.metaspace is not None and rules.metaspace_first)

    @classmethod
    def read(cls, source: Path) -> HfTokenizer:
        """Read tokenizer.json and the files next to it."""
        try:
            core = tokenizers.Tokenizer.from_file(str(source))
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"{source}: not a tokenizer that this server reads ({error})") from error
        config = read_config(source.parent)
        return cls(core, config, read_templates(source.parent, config))

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        if len(text) < RELEASE_CHARS:
            return self.core.encode(text, add_special_tokens=add_special_tokens).ids
        return self.core.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [found.ids for found in self.core.encode_batch_fast(texts, add_special_tokens=False)]

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]] | None:
        found = self.core.encode(first, second, add_special_tokens=True)
        return found.ids, found.type_ids

    def encode_segments(self, segments: Iterable[tuple[str, bool]], add_special_tokens: bool = False) -> list[int]:
        ids: list[int] = []
        for text, plain in segments:
            core = self._plain_core if plain else self.core
            ids += core.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if not add_special_tokens:
            return ids
        bare, framed = self.encode("x"), self.encode("x", add_special_tokens=True)
        start = place_of(bare, framed)
        return [*framed[:start], *ids, *framed[start + len(bare) :]]

    @functools.cached_property
    def _plain_core(self) -> tokenizers.Tokenizer:
        # a second object, because the switch is part of it and threads share the first
        core = tokenizers.Tokenizer.from_str(self.core.to_str())
        core.encode_special_tokens = True
        return core

    def plain_texts(self, spellings: Iterable[str]) -> PlainTexts:
        """`encode_special_tokens` makes special tokens ordinary text, so the spellings become special first."""
        data, named = json.loads(self.core.to_str()), frozenset(spellings)
        for token in data["added_tokens"]:
            token["special"] = token["special"] or token["content"] in named
        first = _plain(data)
        inside = _plain(data) if _drop_prefix(data) else first
        return PlainTexts(partial(_ids, first), partial(_ids, inside))

    def decode(self, ids: Sequence[int] | np.ndarray, skip_special_tokens: bool = False) -> str:
        if not self._bytes.rules.known:
            return self.core.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]
        return super().decode(ids, skip_special_tokens)

    def first_bytes(self, token_id: int) -> bytes:
        name = self.core.id_to_token(token_id)
        return b"" if name is None else self._bytes.first(name)

    def token_of(self, token_id: int) -> str | None:
        return self.core.id_to_token(token_id)

    def id_of(self, token: str) -> int | None:
        return self.core.token_to_id(token)

    @property
    def added_tokens(self) -> dict[str, int]:
        return {token.content: token_id for token_id, token in self._added.items()}

    @property
    def special_spellings(self) -> list[str]:
        return [token.content for token in self._added.values() if token.special]


def _plain(data: dict[str, Any]) -> tokenizers.Tokenizer:
    core = tokenizers.Tokenizer.from_str(json.dumps(data))
    core.encode_special_tokens = True
    return core


def _ids(core: tokenizers.Tokenizer, text: str) -> list[int]:
    return core.encode_batch_fast([text], add_special_tokens=False)[0].ids


def _drop_prefix(data: dict[str, Any]) -> bool:
    """Remove the steps of a tokenizer.json that put a space before a text; returns whether there were any."""
    normalizer, splitter = data.get("normalizer") or {}, data.get("pre_tokenizer") or {}
    steps = normalizer.get("normalizers", [normalizer])
    left = [step for step in steps if step.get("type") != "Prepend"]
    if len(left) < len(steps):
        data["normalizer"] = {"type": "Sequence", "normalizers": left} if left else None
    found = len(left) < len(steps)
    for step in splitter.get("pretokenizers", [splitter]):
        if step.get("type") == "Metaspace" and step.get("prepend_scheme") != "never":
            step["prepend_scheme"], found = "never", True
        if step.get("type") == "ByteLevel" and step.get("add_prefix_space"):
            step["add_prefix_space"], found = False, True
    return found


def _frame(core: tokenizers.Tokenizer, config: dict[str, Any], named: dict[str, str]) -> None:
    """Apply `add_bos_token` and `add_eos_token` if given: whether the named token begins or ends a text.

    All other tokens that tokenizer.json adds remain: texts of Qwen3-Embedding end with another token than `eos_token`.
    """
    bare, whole = (core.encode("x", add_special_tokens=framed).ids for framed in (False, True))
    start = place_of(bare, whole)
    before, after = whole[:start], whole[start + len(bare) :]
    front, back = before, after
    bos, eos = (core.token_to_id(named.get(f"{name}_token", "")) for name in ("bos", "eos"))
    if bos is not None and config.get("add_bos_token") is not None:
        rest = before[1:] if before[:1] == [bos] else before
        front = [bos, *rest] if config["add_bos_token"] else rest
    if eos is not None and config.get("add_eos_token") is not None:
        rest = after[:-1] if after[-1:] == [eos] else after
        back = [*rest, eos] if config["add_eos_token"] else rest
    if (front, back) == (before, after):
        return
    single = [*map(str, front), "$A", *map(str, back)]
    second = [*(f"{token}:1" for token in front), "$B:1", *(f"{token}:1" for token in back)]
    spelled = [{"id": str(token), "ids": [token], "tokens": [core.id_to_token(token)]} for token in {*front, *back}]
    core.post_processor = processors.TemplateProcessing(single=single, pair=[*single, *second], special_tokens=spelled)


def _register_special(core: tokenizers.Tokenizer, config: dict[str, Any], named: dict[str, str]) -> None:
    """Add tokens that only tokenizer_config.json has: `added_tokens_decoder`, and named tokens not yet marked
    special.
    """
    known = {token.content: token.special for token in core.get_added_tokens_decoder().values()}
    decoder = config.get("added_tokens_decoder") or {}
    for _, entry in sorted(decoder.items(), key=lambda item: int(item[0])):
        if entry.get("content") not in known:
            flags = {key: entry[key] for key in ("single_word", "lstrip", "rstrip", "normalized") if key in entry}
            token = AddedToken(entry["content"], special=bool(entry.get("special")), **flags)
            core.add_special_tokens([token]) if token.special else core.add_tokens([token])
            known[token.content] = token.special
    listed = [config.get("additional_special_tokens"), config.get("extra_special_tokens")]
    texts = [content(value) for values in listed if isinstance(values, list) for value in values]
    for text in [*named.values(), *texts]:
        if text and not known.get(text):
            core.add_special_tokens([AddedToken(text, special=True, normalized=False)])
            known[text] = True
