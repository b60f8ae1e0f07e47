"""Chat template settings in the file where sentence-transformers saves a Transformer module's settings.

In: a checkpoint's folder. Out: whether texts are messages, and how a conversation ends. Thread: any.
"""

from __future__ import annotations

from pathlib import Path

from engine.base.errors import ConfigError
from engine.checkpoint.files import read_json
from engine.checkpoint.section import Section

LENGTHS = "sentence_bert_config.json"


def reads_messages(folder: Path) -> bool:
    """Whether each text becomes a message of the chat template."""
    ways = read_json(folder / LENGTHS, required=False).get("modality_config") or {}
    if not isinstance(ways, dict):
        raise ConfigError(f"{LENGTHS}: modality_config must be an object")
    return "message" in ways


def pairs_template(folder: Path) -> str:
    """The template of a reranker's pairs, a name in server/pooling/pairs: "chat", or "" for the tokenizer's pairs."""
    return "chat" if reads_messages(folder) else ""


def opens_answer(folder: Path) -> bool:
    """Whether `processing_kwargs` ask for the generation prompt after a conversation."""
    values = read_json(folder / LENGTHS, required=False)
    for key in ("processing_kwargs", "chat_template"):
        values = values.get(key) or {}
        if not isinstance(values, dict):
            raise ConfigError(f"{LENGTHS}: {key} must be an object")
    return Section(values, f"{LENGTHS}: chat_template").boolean("add_generation_prompt", False)
