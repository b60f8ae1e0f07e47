"""Tokenizer: a checkpoint's tokenizer.json and the files beside it, without transformers.

Owner: any thread. The Rust object is never changed after `load`, so threads share it without waiting for each other;
long texts are encoded and decoded with the GIL released. In: text, or token ids. Out: token ids, or text; and the
table of token bytes from which answers are detokenized (`_fast/detok.pyx`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

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
        core.no_truncation()
        core.no_padding()
        self._bytes = TokenBytes(core)
        self._added = core.get_added_tokens_decoder()
        self.table = self._bytes.table(core.get_vocab(with_added_tokens=False), self._added)
        self.strip = self._bytes.rules.strip
        self._bos = self._asked_id("bos_token", "add_bos_token")
        self._eos = self._asked_id("eos_token", "add_eos_token")

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
            ids = self.core.encode(text, add_special_tokens=add_special_tokens).ids
        else:
            ids = self.core.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return self._framed(ids) if add_special_tokens else ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of whole sequences, as the library decodes it (spaces are not cleaned up)."""
        return self.core.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]

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

    def is_special(self, token_id: int) -> bool:
        return self.table.is_special(token_id)

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

    # -- what the configuration asks beyond tokenizer.json

    def _asked_id(self, name: str, switch: str) -> tuple[int | None, bool | None]:
        text, asked = self.special_tokens.get(name), self.config.get(switch)
        return (None if text is None else self.core.token_to_id(text)), asked if isinstance(asked, bool) else None

    def _framed(self, ids: list[int]) -> list[int]:
        """`add_bos_token` and `add_eos_token` win over what tokenizer.json's post-processor does."""
        (bos, want_bos), (eos, want_eos) = self._bos, self._eos
        if bos is not None and want_bos is not None:
            if want_bos and ids[:1] != [bos]:
                ids = [bos, *ids]
            elif not want_bos and ids[:1] == [bos] and self.core.num_special_tokens_to_add(False):
                ids = ids[1:]
        if eos is not None and want_eos and ids[-1:] != [eos]:
            ids = [*ids, eos]
        return ids


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in NAMED_TOKENS:
        text = _content(config.get(name))
        if text is not None:
            found[name] = text
    extra = config.get("extra_special_tokens")
    named = dict(extra) if isinstance(extra, dict) else {}
    named.update(config.get("model_specific_special_tokens") or {})
    for name, value in named.items():
        text = _content(value)
        if text is not None:
            found.setdefault(name, text)
    return found


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
