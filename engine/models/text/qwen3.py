"""Qwen3: Llama with an RMSNorm on every query and key head before the rotation, and a separate key `head_dim`."""

from __future__ import annotations

from functools import partial

from engine.checkpoint.text import read_text
from engine.models.base.family import Family
from engine.models.text.llama import Llama

FAMILY = Family(
    name="Qwen3",
    architectures=("Qwen3ForCausalLM",),
    inside=True,
    model=Llama,
    text=partial(read_text, sliding="switch", head_dim=128, qk_norm="head"),
)
