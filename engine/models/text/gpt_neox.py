"""GPT-NeoX and Pythia: attention and MLP in parallel, a norm before each; LayerNorms and biases everywhere.

In the checkpoint each head's query, key and value rows are adjacent; a quarter of each head is rotated.
"""

from __future__ import annotations

from engine.base.model_config import TextConfig
from engine.checkpoint.rope import RopeDefaults
from engine.checkpoint.section import Section
from engine.checkpoint.text import read_text
from engine.models.base.family import Family
from engine.models.text.llama import Llama
from engine.weights.table import Row, Table


class GPTNeoX(Llama):
    """Parallel layers, or Llama's layers if use_parallel_residual is false."""

    WEIGHTS = Table(
        (
            Row(("embed_in",), "embed"),
            Row(("layers.*.input_layernorm",), "layers.*.attention_norm"),
            Row(("layers.*.attention.query_key_value",), "layers.*.attention.qkv", "rows"),
            Row(("layers.*.attention.dense",), "layers.*.o", "columns"),
            Row(("layers.*.post_attention_layernorm",), "layers.*.mlp_norm"),
            Row(("layers.*.mlp.dense_h_to_4h",), "layers.*.mlp.up", "rows"),
            Row(("layers.*.mlp.dense_4h_to_h",), "layers.*.mlp.down", "columns"),
            Row(("final_layer_norm",), "norm"),
            Row(("embed_out",), "head", "rows"),
        ),
        prefixes=("gpt_neox.",),
        ignore=("layers.*.attention.bias", "layers.*.attention.masked_bias", "layers.*.attention.rotary_emb.inv_freq"),
    )


def text(body: Section, outer: Section) -> TextConfig:
    """The decoder."""
    has = body.boolean("attention_bias", True)
    return read_text(
        body,
        outer,
        rope=RopeDefaults(partial=0.25),
        activation="gelu",
        eps=1e-5,
        qkv_bias=has,
        o_bias=has,
        mlp_bias=True,
        qkv_layout="by head",
        gated_mlp=False,
        layer_norm=True,
        norm_bias=True,
        parallel=body.boolean("use_parallel_residual", True),
    )


KEYS = {"layer_norm_eps": "rms_norm_eps", "rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"}
FAMILY = Family(name="GPT-NeoX, Pythia", architectures=("GPTNeoXForCausalLM",), model=GPTNeoX, text=text, keys=KEYS)
