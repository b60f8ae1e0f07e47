"""Granite 3: Llama with multipliers of embeddings, attention scores, residual additions and logits."""

from __future__ import annotations

from dataclasses import replace

from engine.base.errors import ConfigError
from engine.base.model_config import TextConfig
from engine.checkpoint.section import Section
from engine.checkpoint.text import every_layer, read_text
from engine.models.base.family import Family
from engine.models.text.llama import Llama


def text(body: Section, outer: Section) -> TextConfig:
    """The decoder's config; multipliers default to 1."""
    residual, divisor = body.number("residual_multiplier", 1.0), body.number("logits_scaling", 1.0)
    if residual <= 0 or divisor == 0:
        raise ConfigError(
            f"{body.path}: residual_multiplier={residual} and logits_scaling={divisor}: the first must be positive and "
            "the second not 0"
        )
    read = every_layer(read_text(body, outer), scale=body.number("attention_multiplier", 1.0))
    multiplier = body.number("embedding_multiplier", 1.0)
    return replace(
        read,
        embedding_scale=multiplier,
        media_scale=multiplier,
        residual_scale=residual,
        logit_scale=1.0 / divisor,
    )


FAMILY = Family(name="Granite", architectures=("GraniteForCausalLM",), inside=True, model=Llama, text=text)
