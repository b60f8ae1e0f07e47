"""Gemma 2: gemma.py with norms after attention and MLP, caps of scores and logits, windows in half the layers."""

from __future__ import annotations

from engine.models.base.family import Family
from engine.models.text.gemma import KEYS, SandwichGemma, gemma2_text

FAMILY = Family(
    name="Gemma 2", architectures=("Gemma2ForCausalLM",), inside=True, model=SandwichGemma, text=gemma2_text, keys=KEYS
)
