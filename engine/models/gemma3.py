"""Gemma 3, text only: engine/models/gemma.py with norms of heads, windows on five of six layers, and two thetas."""

from __future__ import annotations

from engine.models.family import Family
from engine.models.gemma import KEYS, SandwichGemma, gemma3_text

FAMILY = Family(name="Gemma 3", model=SandwichGemma, text=gemma3_text, keys=KEYS)
