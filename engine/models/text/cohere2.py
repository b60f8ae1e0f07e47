"""Command R7B and Command A (Cohere 2): Cohere with windows in three of four layers, and no rotation in the fourth."""

from __future__ import annotations

from dataclasses import replace

from engine.base.model_config import TextConfig
from engine.checkpoint.rope import no_rope
from engine.checkpoint.section import Section
from engine.models.base.family import Family
from engine.models.text.cohere import KEYS, Cohere, cohere_text


def text(body: Section, outer: Section) -> TextConfig:
    """The decoder."""
    read = cohere_text(body, outer, "layers", 10_000.0)
    none = no_rope(read.head_dim)
    return replace(read, layers=tuple(each if each.window else replace(each, rope=none) for each in read.layers))


FAMILY = Family(
    name="Command R7B, Command A",
    architectures=("Cohere2ForCausalLM",),
    inside=True,
    model=Cohere,
    text=text,
    keys=KEYS,
)
