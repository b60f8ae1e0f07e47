"""A sentencepiece model (tokenizer.model) as a tokenizer of the library: checkpoints such as InternLM2 have no other.

Owner: none, pure functions; called while a tokenizer is loaded. In: the file, a protobuf with the field numbers of
sentencepiece_model.proto; and tokenizer_config.json or added_tokens.json next to it, which name tokens that were unused
in training or added later. Out: a Rust tokenizer and its configuration. Merges are ranked as in transformers'
conversion: the pair whose merged piece has the highest score is merged first. ChatGLM2 and 3 define their added tokens
in code, and begin a text with two of them.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import processors

from engine.base.errors import ConfigError
from server.render.gguf_tokenizer import CONTROL, DEFINED, SPACE, tokenizer_files
from server.render.tokenizer_config import read_config, read_json

PIECES, TRAINER, NORMALIZER = 1, 2, 3  # fields of the model
TEXT, SCORE, KIND = 1, 2, 3  # fields of a piece
MODEL_TYPE, BYTES, UNKNOWN_ID, BOS_ID, EOS_ID = 3, 35, 40, 41, 42  # fields of the trainer's section
RULES, PREFIX, TRIMS = 2, 3, 4  # fields of the normaliser's section
BPE = 2
# Tokens after the pieces, in order: SPTokenizer of tokenization_chatglm.py in https://huggingface.co/THUDM/chatglm3-6b.
CHATGLM = ("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
CHATGLM_BEGINS, CHATGLM_ENDS = ("[gMASK]", "sop"), ("<|user|>", "<|observation|>")  # begin of a text; ends of an answer


def read_pieces(source: Path) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """The tokenizer and its tokenizer_config.json; ConfigError for a model that merges or normalises in another way."""
    try:
        pieces, facts = _facts(source.read_bytes())
    except (IndexError, ValueError, struct.error, KeyError) as error:
        raise ConfigError(f"{source}: not a sentencepiece model ({error})") from None
    _check(source, facts)
    config = read_config(source.parent)
    added = _added(source.parent, config)
    if is_chatglm(config):
        added |= _chatglm(len(pieces))  # files list some, as tokens that a client may write
    for number, entry in added.items():
        if number < len(pieces):
            pieces[number] = (entry["content"], 0.0, CONTROL if entry.get("special") else DEFINED)
    tokens, scores, kinds = (list(column) for column in zip(*pieces))
    whole, _ = tokenizer_files(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": scores,
            "tokenizer.ggml.token_type": kinds,
            "tokenizer.ggml.add_space_prefix": facts["prefix"],
            "tokenizer.ggml.unknown_token_id": facts["unknown"],
        },
        source,
    )
    if config.get("legacy") is False and facts["prefix"]:  # a space before the text, but not after its markers
        first = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first", "split": False}
        whole |= {"normalizer": None, "pre_tokenizer": first}
    core = tokenizers.Tokenizer.from_str(json.dumps(whole))
    frame: dict[str, Any] = {"add_bos_token": True}
    if is_chatglm(config):
        begins = [(text, len(pieces) + CHATGLM.index(text)) for text in CHATGLM_BEGINS]
        core.post_processor = processors.TemplateProcessing(single=[*CHATGLM_BEGINS, "$A"], special_tokens=begins)
        frame = {}
        config = {key: value for key, value in config.items() if key not in ("add_bos_token", "add_eos_token")}
    listed = {str(number): entry for number, entry in added.items()}
    marks = {f"{name}_token": tokens[number] for name, number in facts["marks"].items() if number < len(tokens)}
    config = {**frame, **marks, **config, "added_tokens_decoder": listed}
    behind = [number for number in sorted(added) if number >= len(pieces)]
    if behind != list(range(len(pieces), len(pieces) + len(behind))):
        raise ConfigError(f"{source}: has {len(pieces)} pieces; tokens added at {behind[:5]} ... do not follow them")
    return core, config


def _facts(data: bytes) -> tuple[list[tuple[str, float, int]], dict[str, Any]]:
    """Text, score and kind of every piece; and the settings of the sections, with the format's defaults."""
    pieces: list[tuple[str, float, int]] = []
    sections = {TRAINER: b"", NORMALIZER: b""}
    for number, value in fields(data):
        if number == PIECES and isinstance(value, bytes):
            found = dict(fields(value))
            text, score = found[TEXT], found.get(SCORE, b"\0\0\0\0")
            if not isinstance(text, bytes) or not isinstance(score, bytes):
                raise ValueError(f"piece {len(pieces)} has no text or score")
            pieces.append((text.decode(), struct.unpack("<f", score)[0], int(found.get(KIND, 1))))
        elif number in sections and isinstance(value, bytes):
            sections[number] = value
    if not pieces:
        raise ValueError("it has no pieces")
    trainer, normaliser = dict(fields(sections[TRAINER])), dict(fields(sections[NORMALIZER]))
    if not (unknown := int(trainer.get(UNKNOWN_ID, 0))) < len(pieces):
        raise ValueError(f"its unknown token {unknown} is none of {len(pieces)} pieces")
    return pieces, {
        "type": trainer.get(MODEL_TYPE, 1),
        "bytes": trainer.get(BYTES, 0),
        "unknown": unknown,
        # -1 for a missing token is written as 2 ** 64 - 1
        "marks": {"bos": int(trainer.get(BOS_ID, 1)), "eos": int(trainer.get(EOS_ID, 2))},
        "rules": normaliser.get(RULES, b""),
        "prefix": bool(normaliser.get(PREFIX, 1)),
        "trims": bool(normaliser.get(TRIMS, 1)),
    }


def _check(source: Path, facts: dict[str, Any]) -> None:
    told = {
        "its pieces are not joined by scores (BPE)": facts["type"] != BPE,
        "it has no pieces for bytes (byte_fallback)": not facts["bytes"],
        "it rewrites texts (precompiled_charsmap)": bool(facts["rules"]),
        "it drops spaces (remove_extra_whitespaces)": facts["trims"],
    }
    if any(told.values()):
        what = "; ".join(what for what, holds in told.items() if holds)
        raise ConfigError(
            f"{source}: this sentencepiece model is not read: {what}; transformers' AutoTokenizer.save_pretrained "
            "writes the tokenizer.json that is needed"
        )


def _added(folder: Path, config: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """The added tokens by id, from the files next to the model."""
    listed = config.get("added_tokens_decoder")
    if isinstance(listed, dict):
        return {int(number): entry for number, entry in listed.items()}
    older = read_json(folder / "added_tokens.json")
    return {number: {"content": text, "special": False, "normalized": False} for text, number in older.items()}


def is_chatglm(config: dict[str, Any]) -> bool:
    """Whether tokenizer_config.json belongs to ChatGLM2 or 3."""
    return config.get("tokenizer_class") == "ChatGLMTokenizer"


def _chatglm(first: int) -> dict[int, dict[str, Any]]:
    """ChatGLM's added tokens by id; `sop` inside a word is no token."""
    return {
        first + k: {"content": text, "special": True, "normalized": False, "single_word": text.isalpha()}
        for k, text in enumerate(CHATGLM)
    }


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of each field of a protobuf message: integers as int, all other types as bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if kind not in (1, 2, 5):
            raise ValueError(f"a field of type {kind} at byte {at}")
        length, at = _varint(data, at) if kind == 2 else (8 if kind == 1 else 4, at)
        if at + length > len(data):
            raise ValueError(f"it ends inside of a field, at byte {at}")
        yield key >> 3, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise ValueError(f"a number without an end at byte {at}")
