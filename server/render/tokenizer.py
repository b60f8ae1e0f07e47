"""Tokenizer: a checkpoint's tokenizer.json and the files beside it, without transformers.

Owner: any thread. The Rust object is never changed after `load`, so threads share it without waiting for each other;
long texts are encoded and decoded with the GIL released. In: text, or token ids. Out: token ids, or text; and the
table of token bytes from which answers are detokenized (`_fast/detok.pyx`).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, processors

from _fast.detok import Detokenizer
from engine.errors import ConfigError
from server.render.token_bytes import TokenBytes

# Below this many characters the GIL is kept: waking the library's own threads costs more than it gives.
RELEASE_CHARS = 4096

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """Encodes and decodes; knows special tokens by name, and the checkpoint's chat templates."""

    def __init__(self, core: tokenizers.Tokenizer, config: dict[str, Any], templates: dict[str, str]) -> None:
        self.core = core
        self.config = config  # tokenizer_config.json
        self.chat_templates = templates  # by name; "default" is the one to use
        self.special_tokens = _named_tokens(config)  # name -> text, as templates see them
        _register_special(core, config, self.special_tokens)
        _frame(core, config, self.special_tokens)
        core.no_truncation()
        core.no_padding()
        self._bytes = TokenBytes(core)
        self._added = core.get_added_tokens_decoder()
        self.table = self._bytes.table(core.get_vocab(with_added_tokens=False), self._added)
        self.strip = self._bytes.rules.strip

    @classmethod
    def load(cls, folder: str | Path, mode: str = "auto") -> Tokenizer:
        """Reads a checkpoint's folder; every complaint names the file."""
        folder = Path(folder)
        if mode not in ("auto", "hf"):
            raise ConfigError(f"--tokenizer-mode {mode}: this build reads tokenizer.json only; use auto or hf")
        source = folder / "tokenizer.json"
        if not source.is_file():
            raise ConfigError(
                f"{folder}: no tokenizer.json; name a folder that has one with --tokenizer "
                "(transformers' AutoTokenizer.save_pretrained writes it)"
            )
        try:
            core = tokenizers.Tokenizer.from_file(str(source))
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"{source}: not a tokenizer that this server reads ({error})") from error
        config = _read_json(folder / "tokenizer_config.json")
        for name, value in _read_json(folder / "special_tokens_map.json").items():
            config.setdefault(name, value)
        return cls(core, config, _read_templates(folder, config))

    # -- ids and text

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids. Special tokens written in the text become their ids."""
        if len(text) < RELEASE_CHARS:
            return self.core.encode(text, add_special_tokens=add_special_tokens).ids
        return self.core.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def encode_segments(self, segments: Iterable[tuple[str, bool]], add_special_tokens: bool = False) -> list[int]:
        """Ids of a text in pieces; in those that are marked, special tokens are only letters."""
        ids: list[int] = []
        for text, plain in segments:
            core = self._plain_core if plain else self.core
            ids += core.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if not add_special_tokens:
            return ids
        bare, framed = self.encode("x"), self.encode("x", add_special_tokens=True)
        start = next(k for k in range(len(framed)) if framed[k : k + len(bare)] == bare)
        return [*framed[:start], *ids, *framed[start + len(bare) :]]

    @functools.cached_property
    def _plain_core(self) -> tokenizers.Tokenizer:
        # A second object, because the switch is part of it and threads share the first.
        core = tokenizers.Tokenizer.from_str(self.core.to_str())
        core.encode_special_tokens = True
        return core

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """The text of a whole sequence, as the library decodes it; spaces are not cleaned up."""
        if not self._bytes.rules.known:
            return self.core.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]
        first = self.first_bytes if self.decodes_first_apart else None
        machine = Detokenizer(self.table, skip_special=skip_special_tokens, strip=self.strip, first=first)
        return machine.feed(ids) + machine.finish()

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to a text; b"" for ids without a token."""
        return self.table.token_bytes(token_id)

    def first_bytes(self, token_id: int) -> bytes:
        """What a token adds at the very start of a text."""
        name = self.core.id_to_token(token_id)
        return b"" if name is None else self._bytes.first(name)

    def token_text(self, token_id: int) -> str:
        """One token for people to read: broken UTF-8 shows as U+FFFD."""
        return self.table.token_bytes(token_id).decode("utf-8", "replace")

    def token_of(self, token_id: int) -> str | None:
        """The vocabulary's own spelling."""
        return self.core.id_to_token(token_id)

    def id_of(self, token: str) -> int | None:
        return self.core.token_to_id(token)

    @property
    def special_spellings(self) -> list[str]:
        """How every special token is written."""
        return [token.content for token in self._added.values() if token.special]

    def is_special(self, token_id: int) -> bool:
        return self.table.is_special(token_id)

    def info(self) -> dict[str, Any]:
        """tokenizer_config.json for clients: tokens as plain text, the template in use, nothing that names a path."""
        shown = {name: value for name, value in self.config.items() if not name.endswith(("_file", "_path", "_paths"))}
        shown.pop("added_tokens_decoder", None)
        shown.update(self.special_tokens)
        for name in NAMED_TOKENS:
            shown.setdefault(name, None)
        return {**shown, "chat_template": self.chat_templates.get("default"), "vocab_size": self.vocab_size}

    @property
    def vocab_size(self) -> int:
        """One more than the highest id."""
        return self.table.num_tokens

    @property
    def decodes_first_apart(self) -> bool:
        """Whether a token at the start of a text has other bytes than elsewhere."""
        rules = self._bytes.rules
        return not rules.known or (rules.metaspace is not None and rules.metaspace_first)

    @property
    def bos_token(self) -> str | None:
        return self.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.special_tokens.get("eos_token")

    @property
    def pad_token(self) -> str | None:
        return self.special_tokens.get("pad_token")


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    """The usual names, every other `..._token`, and those listed as extra."""
    named = {name: config.get(name) for name in NAMED_TOKENS}
    named.update({name: value for name, value in config.items() if name.endswith("_token")})
    for key in ("extra_special_tokens", "model_specific_special_tokens"):
        if isinstance(config.get(key), dict):
            named.update(config[key])
    texts = {name: _content(value) for name, value in named.items()}
    return {name: text for name, text in texts.items() if text is not None}


def _frame(core: tokenizers.Tokenizer, config: dict[str, Any], named: dict[str, str]) -> None:
    """`add_bos_token` and `add_eos_token`, where given, replace what tokenizer.json puts around a text."""
    if "add_bos_token" not in config and "add_eos_token" not in config:
        return
    bos = named.get("bos_token") if config.get("add_bos_token") else None
    eos = named.get("eos_token") if config.get("add_eos_token") else None
    pieces = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
    tokens = [(text, core.token_to_id(text)) for text in (bos, eos) if text]
    core.post_processor = processors.TemplateProcessing(single=pieces, special_tokens=tokens)


def _content(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _register_special(core: tokenizers.Tokenizer, config: dict[str, Any], named: dict[str, str]) -> None:
    """Adds what only tokenizer_config.json knows: `added_tokens_decoder`, and named tokens not yet marked special."""
    known = {token.content: token.special for token in core.get_added_tokens_decoder().values()}
    decoder = config.get("added_tokens_decoder") or {}
    for _, entry in sorted(decoder.items(), key=lambda item: int(item[0])):
        if entry.get("content") not in known:
            flags = {key: entry[key] for key in ("single_word", "lstrip", "rstrip", "normalized") if key in entry}
            token = AddedToken(entry["content"], special=bool(entry.get("special")), **flags)
            core.add_special_tokens([token]) if token.special else core.add_tokens([token])
            known[token.content] = token.special
    listed = [config.get("additional_special_tokens"), config.get("extra_special_tokens")]
    texts = [_content(value) for values in listed if isinstance(values, list) for value in values]
    for text in [*named.values(), *texts]:
        if text and not known.get(text):
            core.add_special_tokens([AddedToken(text, special=True, normalized=False)])
            known[text] = True


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: a JSON object is needed")
    return value


def _read_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """By name. Later wins: tokenizer_config, chat_template.json, additional_chat_templates/, chat_template.jinja."""
    found: dict[str, str] = {}
    for value in (config.get("chat_template"), _read_json(folder / "chat_template.json").get("chat_template")):
        if isinstance(value, str):
            found["default"] = value
        elif isinstance(value, list):
            found.update({entry["name"]: entry["template"] for entry in value})
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = path.read_text("utf-8")
    single = folder / "chat_template.jinja"
    if single.is_file():
        found["default"] = single.read_text("utf-8")
    return found
