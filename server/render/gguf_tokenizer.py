"""Converts the tokenizer of a GGUF file to tokenizer.json and tokenizer_config.json. In: the facts. Out: plain objects.

Two kinds: "gpt2", byte-level BPE whose merges are in the file and whose regular expression has a name
(tokenizer.ggml.pre); and "llama", sentencepiece's BPE, whose merges follow from the scores. Thread: any.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.base.errors import ConfigError

UNKNOWN, CONTROL, DEFINED = 2, 3, 4  # token types
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3, QWEN2 = _WORDS + r"\p{N}{1,3}" + _REST, _WORDS + r"\p{N}" + _REST
# tokenizer.ggml.pre -> its regular expression; "": GPT-2's, which the library has.
EXPRESSIONS = {
    "llama-bpe": LLAMA3, "llama3": LLAMA3, "llama-v3": LLAMA3, "qwen2": QWEN2, "deepseek-r1-qwen": QWEN2,
    "gpt-2": "", "phi-2": "", "olmo": "", "mpt": "", "smollm": "", "starcoder": "",
}  # fmt: skip
SINGLE_DIGITS = ("smollm", "starcoder")
NAMED = ("bos", "eos", "unknown", "padding")
SPACE = "\u2581"


def tokenizer_files(facts: Mapping[str, Any], path: object) -> tuple[dict[str, Any], dict[str, Any]]:
    """tokenizer.json and tokenizer_config.json; ConfigError for an unsupported tokenizer."""
    kind = facts.get("tokenizer.ggml.model")
    tokens = facts.get("tokenizer.ggml.tokens")
    if kind not in _KINDS or not isinstance(tokens, list):
        raise ConfigError(
            f"{path}: tokenizer.ggml.model={kind!r}; read are {', '.join(_KINDS)}: name another tokenizer with "
            "--tokenizer ORG/NAME or a folder"
        )
    types = facts.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise ConfigError(f"{path}: {len(types)} types of {len(tokens)} tokens; convert the model again")
    marked = [
        {
            "id": number,
            "content": tokens[number],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": types[number] == CONTROL,
        }
        for number in range(len(tokens))
        if types[number] in (CONTROL, DEFINED) or (types[number] == UNKNOWN and kind == "llama")
    ]
    whole = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": marked, "post_processor": None}
    return {**whole, **_KINDS[kind](facts, tokens, types, path)}, _config(facts, tokens, kind)


def _config(facts: Mapping[str, Any], tokens: list[str], kind: str) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for name in NAMED:
        number = facts.get(f"tokenizer.ggml.{name}_token_id")
        if isinstance(number, int) and number < len(tokens):
            short = {"unknown": "unk", "padding": "pad"}.get(name, name)
            config[f"{short}_token"] = tokens[number]
    framed = kind == "llama" or EXPRESSIONS.get(facts.get("tokenizer.ggml.pre", "")) == LLAMA3
    config["add_bos_token"] = bool(facts.get("tokenizer.ggml.add_bos_token", framed))
    config["add_eos_token"] = bool(facts.get("tokenizer.ggml.add_eos_token", False))
    if isinstance(template := facts.get("tokenizer.chat_template"), str):
        config["chat_template"] = template
    return config


def _bytes(facts: Mapping[str, Any], tokens: list[str], types: list[int], path: object) -> dict[str, Any]:
    """A tokenizer of byte-level BPE."""
    name, merges = facts.get("tokenizer.ggml.pre"), facts.get("tokenizer.ggml.merges")
    if name not in EXPRESSIONS or not isinstance(merges, list):
        raise ConfigError(
            f"{path}: tokenizer.ggml.pre={name!r}; read are {', '.join(EXPRESSIONS)}: name another tokenizer with "
            "--tokenizer ORG/NAME or a folder"
        )
    expression = EXPRESSIONS[name]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": not expression}
    before: list[dict[str, Any]] = []
    if name in SINGLE_DIGITS:
        before = [{"type": "Digits", "individual_digits": True}]
    elif expression:
        before = [{"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}]
    return {
        "normalizer": {"type": "NFC"} if expression == QWEN2 else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*before, level]},
        "decoder": {**level, "use_regex": True},
        "model": _model(tokens, [_pair(merge) for merge in merges], ignore_merges=expression == LLAMA3),
    }


def _pair(merge: str) -> list[str]:
    at = merge.find(" ", 1)
    return [merge[:at], merge[at + 1 :]]


def _pieces(facts: Mapping[str, Any], tokens: list[str], types: list[int], path: object) -> dict[str, Any]:
    """A tokenizer of sentencepiece's BPE: the adjacent pair whose merged piece has the highest score is merged
    first.
    """
    scores = facts.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise ConfigError(f"{path}: tokenizer.ggml.scores is no list of {len(tokens)} scores; convert the model again")
    numbers = {token: number for number, token in enumerate(tokens)}
    found = []
    for number, token in enumerate(tokens):
        parts = [(token[:at], token[at:]) for at in range(1, len(token))] if types[number] == 1 else []
        halves = [pair for pair in parts if pair[0] in numbers and pair[1] in numbers]
        halves.sort(key=lambda pair: (numbers[pair[0]], numbers[pair[1]]))
        found += [(scores[number], list(pair)) for pair in halves]
    found.sort(key=lambda scored: -scored[0])
    prefix = bool(facts.get("tokenizer.ggml.add_space_prefix", True))
    unknown = facts.get("tokenizer.ggml.unknown_token_id", 0)
    if not 0 <= unknown < len(tokens):
        raise ConfigError(
            f"{path}: tokenizer.ggml.unknown_token_id={unknown}: tokens are 0 to {len(tokens) - 1}; convert the model "
            "again"
        )
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    first = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
    steps = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
        *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []),
    ]  # fmt: skip
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*first, spaces]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": steps},
        "model": _model(tokens, [pair for _, pair in found], byte_fallback=True, fuse_unk=True)
        | {"unk_token": tokens[unknown]},
    }


def _model(tokens: list[str], merges: list[list[str]], **changes: bool) -> dict[str, Any]:
    return {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
        "vocab": {token: number for number, token in enumerate(tokens)}, "merges": merges, **changes,
    }  # fmt: skip


_KINDS = {"gpt2": _bytes, "llama": _pieces}
