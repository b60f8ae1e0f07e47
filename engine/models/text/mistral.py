"""Mistral, also in Mistral's own format: Llama, with a window in every layer if the checkpoint names one."""

from __future__ import annotations

from functools import partial

from engine.checkpoint.text import read_text
from engine.models.base.family import Family
from engine.models.text.llama import Llama

FAMILY = Family(
    name="Mistral",
    architectures=("MistralForCausalLM",),
    inside=True,
    model=Llama,
    text=partial(read_text, sliding="always"),
)
