"""Checks that a drafter fits its target: the vocabulary, the widths, the tokenizer, the target's streams.

In: configurations. Out: nothing, or a ConfigError that names what does not fit. Thread: any.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.base.drafts import FLAG
from engine.base.errors import ConfigError
from engine.base.model_config import ModelConfig, TextConfig


def check_target(target: ModelConfig) -> None:
    """Raises ConfigError if the target cannot hand out its streams."""
    if target.implementation == "transformers":
        raise ConfigError(
            f"{FLAG}: {target.architecture} runs through transformers, and drafters read the streams of our own "
            "decoders; leave the flag out, or use method ngram"
        )


def check_tokenizer(drafter: Path, target: Path) -> bool:
    """Whether both folders have a tokenizer.json with the same vocabulary. Raises ConfigError if the vocabularies
    differ."""
    vocabularies = [_vocabulary(folder / "tokenizer.json") for folder in (drafter, target)]
    if None in vocabularies:
        return False
    if vocabularies[0] != vocabularies[1]:
        raise ConfigError(
            f"{FLAG}: {drafter / 'tokenizer.json'} has another vocabulary than the target's "
            f"{target / 'tokenizer.json'}; drafts are token ids of the target: name a drafter with the same tokenizer"
        )
    return True


def _vocabulary(path: Path) -> Any:
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_bytes())["model"]["vocab"]
    except (ValueError, KeyError, TypeError):
        return None


def check_decoder(text: TextConfig, target: ModelConfig, where: str) -> None:
    """Raises ConfigError if the drafter's decoder has another vocabulary, or layers that are not served; `where`: the
    path of its configuration."""
    if len({layer.rope for layer in text.layers}) > 1:
        raise ConfigError(f"{FLAG}: {where}: layers with different rotary positions in a drafter are not supported")
    if text.vocab_size != target.text.vocab_size:
        raise ConfigError(
            f"{FLAG}: {where}: vocab_size={text.vocab_size}, but the target has {target.text.vocab_size} tokens; "
            "name a drafter that was made for this model"
        )


def check_width(width: int, target: ModelConfig, where: str) -> None:
    """Raises ConfigError if the drafter reads hidden states of another width."""
    if width != target.text.hidden_size:
        raise ConfigError(
            f"{FLAG}: {where}: the drafter reads hidden states of {width} numbers; the target makes "
            f"{target.text.hidden_size}; name a drafter that was made for this model"
        )
