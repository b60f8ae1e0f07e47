"""TiktokenTokenizer: tiktoken's merge files (`tiktoken.model`, `*.tiktoken`, Llama 3's and GLM-4's `tokenizer.model`).

Owner: any thread; nothing changes after `read`. In: text, or token ids. Out: token ids, or text. A merge file has
neither the splitting pattern nor special tokens. Special tokens come from tokenizer_config.json
(`added_tokens_decoder`), or from this file for families that define them in code; patterns always come from this file.
The family is recognised by the file's name and by the class in tokenizer_config.json. Needs the optional library
tiktoken.
"""

from __future__ import annotations

import array
import base64
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _fast.detok import TokenTable
from engine.base.errors import ConfigError
from server.render.tokenizer import Tokenizer, unsplittable
from server.render.tokenizer_config import content, named_tokens, read_config, read_templates

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
LLAMA_PATTERN = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_MARKS}|{_TAIL}"
QWEN_PATTERN = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_MARKS}|{_TAIL}"
# Kimi: Han characters are separate from other letters; words begin with capitals or have none.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI_PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}",
        r"\p{N}{1,3}",
        _MARKS,
        _TAIL,
    ]
)
QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{k}|>" for k in range(205)))
LLAMA_SPECIAL = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>",
    "<|reserved_special_token_2|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
    *(f"<|reserved_special_token_{k}|>" for k in range(3, 248)),
)


@dataclass(frozen=True, slots=True)
class Family:
    """The data of a family that its merge file lacks."""

    pattern: str
    special: tuple[str, ...] = ()  # in the order of their ids, after the merges
    named: tuple[tuple[str, str], ...] = ()
    adds_bos: bool = False
    before: tuple[str, ...] = ()  # tokens before every text that gets special tokens


QWEN = Family(QWEN_PATTERN, QWEN_SPECIAL, (("eos_token", "<|endoftext|>"), ("pad_token", "<|endoftext|>")))
KIMI = Family(KIMI_PATTERN)
LLAMA = Family(
    LLAMA_PATTERN, LLAMA_SPECIAL, (("bos_token", "<|begin_of_text|>"), ("eos_token", "<|eot_id|>")), adds_bos=True
)
# tokenization_chatglm.py of https://huggingface.co/THUDM/glm-4v-9b; the pattern is Llama 3's.
GLM = Family(LLAMA_PATTERN, before=("[gMASK]", "<sop>"))


def family_of(source: Path, config: dict[str, Any]) -> Family:
    """The family by the file's name: qwen.tiktoken, tiktoken.model (Kimi, Moonlight), tokenizer.model (Llama
    3, GLM-4).
    """
    if config.get("tokenizer_class") == "ChatGLM4Tokenizer":
        return GLM
    if source.suffix == ".tiktoken":
        return QWEN
    return KIMI if source.name == "tiktoken.model" else LLAMA


class TiktokenTokenizer(Tokenizer):
    """One merge file with its family's rules."""

    def __init__(
        self, ranks: dict[bytes, int], family: Family, config: dict[str, Any], templates: dict[str, str]
    ) -> None:
        import tiktoken

        listed = config.get("added_tokens_decoder") or {}
        special = {content(entry) or "": int(token_id) for token_id, entry in listed.items()}
        if not special:
            special = {text: len(ranks) + k for k, text in enumerate(family.special)}
        pattern = config.get("pat_str") or family.pattern
        self.core = tiktoken.Encoding(name="checkpoint", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
        named = {**dict(family.named), **named_tokens(config)}
        named = {name: text for name, text in named.items() if text in special}
        self._special = special
        self._added = {token_id: entry.get("special", True) for token_id, entry in _entries(listed)}
        super().__init__(config, templates, named, self._table(ranks))
        adds_bos = config.get("add_bos_token", family.adds_bos)
        self._bos = [special[named["bos_token"]]] if adds_bos and "bos_token" in named else []
        self._bos += [special[text] for text in family.before if text in special]
        self._eos = [special[named["eos_token"]]] if config.get("add_eos_token") and "eos_token" in named else []

    @classmethod
    def read(cls, source: Path) -> TiktokenTokenizer:
        """Read the merge file and the files next to it."""
        config = read_config(source.parent)
        try:
            lines = [line.split() for line in source.read_bytes().splitlines() if line]
            ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
            return cls(ranks, family_of(source, config), config, read_templates(source.parent, config))
        except ImportError as error:
            raise ConfigError(f"{source}: needs tiktoken; run pip install tiktoken") from error
        except (ValueError, OSError) as error:
            raise ConfigError(f"{source}: not a merge file that this server reads ({error})") from error

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return self.encode_segments([(text, False)], add_special_tokens)

    def encode_segments(self, segments: Iterable[tuple[str, bool]], add_special_tokens: bool = False) -> list[int]:
        ids: list[int] = []
        try:
            for text, plain in segments:
                ids += self.core.encode_ordinary(text) if plain else self.core.encode(text, allowed_special="all")
        except ValueError as error:
            raise unsplittable() from error
        return [*self._bos, *ids, *self._eos] if add_special_tokens else ids

    def token_of(self, token_id: int) -> str | None:
        data = self.table.token_bytes(token_id)
        return data.decode("utf-8", "replace") if data else None

    def id_of(self, token: str) -> int | None:
        try:
            return self.core.encode_single_token(token)
        except KeyError:
            return None

    @property
    def special_spellings(self) -> list[str]:
        return [text for text, token_id in self._special.items() if self.is_special(token_id)]

    def _table(self, ranks: dict[bytes, int]) -> TokenTable:
        pieces = [b""] * (max(*ranks.values(), *self._special.values()) + 1)
        special = bytearray(len(pieces))
        for data, token_id in ranks.items():
            pieces[token_id] = data
        for text, token_id in self._special.items():
            pieces[token_id] = text.encode()
            special[token_id] = self._added.get(token_id, True)
        offsets, total = array.array("i", [0]), 0
        for piece in pieces:
            total += len(piece)
            offsets.append(total)
        return TokenTable(b"".join(pieces), offsets, bytes(special))


def _entries(listed: dict[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    return [(int(token_id), entry) for token_id, entry in listed.items() if isinstance(entry, dict)]
