"""Ministral 3, text only: Mistral with YaRN, and queries scaled by their position (llama_4_scaling_beta)."""

from __future__ import annotations

from dataclasses import replace

from engine.base.model_config import TextConfig
from engine.checkpoint.section import Section
from engine.checkpoint.text import read_text
from engine.models.base.family import Family
from engine.models.text.llama import Llama

RELEASED = {  # default rope_parameters
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def text(body: Section, outer: Section) -> TextConfig:
    """The decoder."""
    key = "rope_parameters" if body.values.get("rope_parameters") else "rope_scaling"
    rope = body.values.get(key) or RELEASED
    body = Section({**body.values, key: rope}, body.path)
    read = read_text(body, outer, sliding="given", head_dim=128, eps=1e-5)
    beta = Section(rope, f"{body.path}: {key}").number("llama_4_scaling_beta", 0.0)
    if not beta:
        return read
    turned = replace(read.layers[0].rope, query_scaling=beta)
    return replace(read, layers=tuple(replace(layer, rope=turned) for layer in read.layers))


FAMILY = Family(name="Ministral 3", architectures=("Ministral3ForCausalLM",), inside=True, model=Llama, text=text)
