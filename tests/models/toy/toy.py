"""A family in one file, as a newcomer would write it: Gemma 2's decoder, with silu instead of its GELU.

It differs from Llama in nearly everything that a family may declare: also a norm after each part, norm weights stored
as weight - 1, scaled embeddings, capped scores and logits, a scale of its own, windows on every other layer.
"""

from __future__ import annotations

from dataclasses import replace

from engine.base.model_config import TextConfig
from engine.checkpoint.section import Section
from engine.checkpoint.text import read_text
from engine.models.base.family import Family
from engine.models.text.llama import DECODER_ROWS, Llama
from engine.weights.table import Row, Table

NORMS = (
    Row(("layers.*.post_attention_layernorm",), "layers.*.attention_post_norm"),
    Row(("layers.*.pre_feedforward_layernorm",), "layers.*.mlp_norm"),
    Row(("layers.*.post_feedforward_layernorm",), "layers.*.mlp_post_norm"),
)


class Toy(Llama):
    """Llama's layers with another norm after each part."""

    WEIGHTS = Table((*(row for row in DECODER_ROWS if not row.target.endswith("mlp_norm")), *NORMS))


def read_toy(body: Section, outer: Section) -> TextConfig:
    """Reads Llama's keys and Gemma's."""
    text = read_text(body, outer, sliding="layers", head_dim=256)
    scale = body.number("query_pre_attn_scalar") ** -0.5
    softcap = body.number("attn_logit_softcapping")
    layers = tuple(replace(layer, scale=scale, softcap=softcap, post_norms=True) for layer in text.layers)
    return replace(
        text,
        layers=layers,
        tie_embeddings=True,
        norm_offset=1.0,
        embedding_scale=text.hidden_size**0.5,
        logit_softcap=body.number("final_logit_softcapping"),
    )


FAMILY = Family(name="Toy", architectures=("ToyForCausalLM",), model=Toy, text=read_toy)
