"""Gemma 3, text only: gemma.py with norms of heads, windows in five of six layers, and two thetas."""

from __future__ import annotations

from engine.models.base.family import Family
from engine.models.text.gemma import KEYS, SandwichGemma, gemma3_text

FAMILY = Family(
    name="Gemma 3", architectures=("Gemma3ForCausalLM",), inside=True, model=SandwichGemma, text=gemma3_text, keys=KEYS
)
