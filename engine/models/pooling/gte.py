"""GTE (gte-multilingual, gte-base-en-v1.5 and their rerankers): BERT with rotary positions and GeGLU.

The released classes are called New..., transformers' classes Gte.... Rotary frequencies are stretched by a fixed "ntk"
(https://kexue.fm/archives/9706), computed as in https://huggingface.co/Alibaba-NLP/new-impl.
"""

from __future__ import annotations

from typing import Any

import torch

from engine.base.model_config import ModelConfig, TextConfig
from engine.checkpoint.rope import RopeDefaults
from engine.checkpoint.section import Section
from engine.checkpoint.text import refuse
from engine.models.base.encoder import Encoder
from engine.models.base.family import Family
from engine.models.pooling.bert import head, post_norm_text
from engine.models.pooling.classes import VECTORS_AND_SCORES, classes
from engine.weights.table import Row, Table

LAYER = "encoder.layer.*."
ROWS = (
    Row(("embeddings.word_embeddings",), "embed"),
    Row(("embeddings.token_type_embeddings",), "types"),
    Row(("embeddings.LayerNorm",), "embed_norm"),
    Row((LAYER + "attention.qkv_proj",), "layers.*.qkv", "rows"),
    Row((LAYER + "attention.o_proj",), "layers.*.o", "columns"),
    Row((LAYER + "attn_ln",), "layers.*.attention_norm"),
    Row((LAYER + "mlp.up_gate_proj",), "layers.*.up", "rows"),
    Row((LAYER + "mlp.down_proj",), "layers.*.down", "columns"),
    Row((LAYER + "mlp_ln",), "layers.*.mlp_norm"),
)
IGNORED = ("pooler.dense.*", "embeddings.position_ids", "lm_head.*")


class Gte(Encoder):
    """No table of positions; in the files up's rows come before gate's."""

    WEIGHTS = Table(ROWS, prefixes=("new.", "gte."), ignore=IGNORED)
    reads_pairs = True

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
        types = Section(config.raw, "config.json").integer("type_vocab_size", 1)
        super().__init__(config, dtype, device, types, first_position=None)
        width = config.text.intermediate_size
        for layer in self.layers:
            layer.up.arrange = lambda _, rows: rows.roll(width, 0)


def text(body: Section, outer: Section) -> TextConfig:
    """The encoder."""
    refuse(
        body,
        position_embedding_type="rope",
        layer_norm_type="layer_norm",
        pack_qkv=True,
        logn_attention_scale=False,
        logn_attention_clip1=False,
    )
    biases = {"qkv_bias": True, "o_bias": True, "mlp_bias": True}
    return post_norm_text(_without_ntk(body), RopeDefaults(160_000.0), qkv_layout="joined", joined_mlp=True, **biases)


def _without_ntk(body: Section) -> Section:
    """Rewrites a fixed ntk as a larger theta and a linear scaling of all frequencies."""
    scaling = body.values.get("rope_scaling")
    if not isinstance(scaling, dict) or scaling.get("type") != "ntk":
        return body
    given = Section(scaling, f"{body.path}: rope_scaling")
    refuse(given, mixed_b=None)
    factor, width = given.number("factor"), body.size("hidden_size") // body.size("num_attention_heads")
    said: dict[str, Any] = {
        "rope_theta": body.number("rope_theta", 10_000.0) * factor,
        "rope_scaling": {"type": "linear", "factor": factor ** (2 / width)},
    }
    return Section({**body.values, **said}, body.path, body.outer)


FAMILY = Family(
    name="GTE",
    architectures=(*classes("New", *VECTORS_AND_SCORES), *classes("Gte", *VECTORS_AND_SCORES)),
    model=Gte,
    text=text,
    head=head,
)
