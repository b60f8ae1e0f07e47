"""Nomic's BERT (nomic-embed-text, snowflake-arctic-embed-m-long): BERT with rotary positions, SwiGLU and no biases.

Released files have GPT-2's words for sizes (https://huggingface.co/nomic-ai/nomic-bert-2048); those of transformers
have BERT's.
"""

from __future__ import annotations

import torch

from engine.checkpoint.rope import RopeDefaults
from engine.checkpoint.section import Section
from engine.checkpoint.text import refuse
from engine.errors import ConfigError
from engine.model_config import ModelConfig, TextConfig
from engine.models.bert import head, post_norm_text
from engine.models.encoder import Encoder
from engine.models.family import Family
from engine.weights.table import Row, Table

LAYER = "encoder.layers.*."
ROWS = (
    Row(("embeddings.word_embeddings",), "embed"),
    Row(("embeddings.token_type_embeddings",), "types"),
    Row(("emb_ln",), "embed_norm"),
    Row((LAYER + "attn.Wqkv",), "layers.*.qkv", "rows"),
    Row((LAYER + "attn.out_proj",), "layers.*.o", "columns"),
    Row((LAYER + "norm1",), "layers.*.attention_norm"),
    Row((LAYER + "mlp.fc12", LAYER + "mlp.fc11"), "layers.*.up", "rows"),
    Row((LAYER + "mlp.fc2",), "layers.*.down", "columns"),
    Row((LAYER + "norm2",), "layers.*.mlp_norm"),
)
IGNORED = ("pooler.dense.*", "cls.*", "lm_head.*")
KEYS = {
    "n_embd": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers",
    "n_inner": "intermediate_size", "n_positions": "max_position_embeddings", "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
}  # fmt: skip


class NomicBert(Encoder):
    """Two types of tokens, no table of positions."""

    WEIGHTS = Table(ROWS, prefixes=("bert.", "nomic_bert."), ignore=IGNORED)
    reads_pairs = True

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
        types = Section(config.raw, "config.json").size("type_vocab_size", 2)
        super().__init__(config, dtype, device, types, first_position=None)


def text(body: Section, outer: Section) -> TextConfig:
    """The encoder."""
    refuse(
        body, activation_function="swiglu", hidden_act="silu", causal=False, prenorm=False, parallel_block=False,
        use_rms_norm=False, qkv_proj_bias=False, mlp_fc1_bias=False, mlp_fc2_bias=False, rotary_emb_fraction=1.0,
        rotary_emb_interleaved=False, rotary_emb_scale_base=None,
    )  # fmt: skip
    if body.values.get("moe_every_n_layers"):
        raise ConfigError(f"{body.path}: moe_every_n_layers: Nomic's BERT with experts is not supported")
    silu = Section({**body.values, "hidden_act": "silu"}, body.path, body.outer)
    return post_norm_text(silu, RopeDefaults(1000.0), qkv_bias=False, o_bias=False, mlp_bias=False, qkv_layout="joined")


def untrained(body: Section) -> int:
    """Positions behind those of training, where frequencies change with the length of an input: they are not served."""
    if not body.values.get("rotary_scaling_factor"):
        return 0
    longest = body.size("max_position_embeddings")
    return longest - body.integer("max_trained_positions", 2048, least=1, most=longest)


FAMILY = Family(name="Nomic BERT", model=NomicBert, text=text, head=head, keys=KEYS, first_position=untrained)
