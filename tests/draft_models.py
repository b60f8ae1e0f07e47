"""Tiny draft models: decoders of transformers, taught for a second to follow a tiny target, and their greedy drafts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from tests import tiny
from tests.drafters import PROMPTS, greedy, greedy_texts
from tests.once import made_once

SMALL = {"num_hidden_layers": 2, "hidden_size": 48, "intermediate_size": 64, "max_position_embeddings": 256}
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: tiny.llama(**SMALL, num_attention_heads=2, num_key_value_heads=1),
    "mistral": lambda: tiny.mistral(num_hidden_layers=2, sliding_window=8),
    "gpt_oss": lambda: tiny.CHECKPOINTS["gpt_oss"](),
    "gemma3": lambda: tiny.CHECKPOINTS["gemma3"](),
}


@functools.cache
def draft_model(target: str, family: str = "llama") -> Path:
    """The folder of a model that has seen the target's greedy answers to PROMPTS."""
    return made_once(f"draft-{family}", target, lambda folder: tiny.save(taught(target, family), folder))


def taught(target: str, family: str) -> Any:
    model, large = FAMILIES[family](), tiny.reference(tiny.checkpoint(target))
    if large.config.vocab_size > model.config.vocab_size:
        model.resize_token_embeddings(large.config.vocab_size, mean_resizing=False)
    texts = torch.tensor(greedy_texts(large, PROMPTS[:2], 32))
    with torch.enable_grad():
        optimizer = torch.optim.Adam([each.requires_grad_() for each in model.parameters()], 0.01)
        for _ in range(25):
            logits = model(texts[:, :-1], use_cache=False).logits
            optimizer.zero_grad()
            functional.cross_entropy(logits.flatten(0, 1), texts[:, 1:].flatten()).backward()
            optimizer.step()
    return model


@functools.cache
def reference(folder: Path) -> Any:
    """The same model by transformers."""
    return tiny.reference(folder)


def propose(folder: Path, known: list[int], count: int) -> list[int]:
    """Greedy drafts after a text."""
    return [] if count == 0 else greedy(reference(folder), known, count)[len(known) :]
