"""InternLM2 and 2.5: Llama with other weight names; one matrix has the queries, key and value of each key-value head.

The code in its checkpoints (modeling_internlm2.py) is not executed.
"""

from __future__ import annotations

from engine.base.model_config import TextConfig
from engine.checkpoint.section import Section
from engine.checkpoint.text import read_text
from engine.models.base.family import Family
from engine.models.text.llama import DECODER_IGNORE, Llama
from engine.weights.table import Row, Table


class InternLM2(Llama):
    """Llama's layers with other weight names."""

    WEIGHTS = Table(
        (
            Row(("tok_embeddings",), "embed"),
            Row(("layers.*.attention_norm",), "layers.*.attention_norm"),
            Row(("layers.*.attention.wqkv",), "layers.*.attention.qkv", "rows"),
            Row(("layers.*.attention.wo",), "layers.*.o", "columns"),
            Row(("layers.*.ffn_norm",), "layers.*.mlp_norm"),
            Row(("layers.*.feed_forward.w1", "layers.*.feed_forward.w3"), "layers.*.mlp.gate_up", "rows"),
            Row(("layers.*.feed_forward.w2",), "layers.*.mlp.down", "columns"),
            Row(("norm",), "norm"),
            Row(("output",), "head", "rows"),
        ),
        ignore=("layers.*.attention.rotary_emb.inv_freq", *DECODER_IGNORE),
    )


def text(body: Section, outer: Section) -> TextConfig:
    """The decoder's config; "bias" applies to attention's linear layers, the MLP has no biases."""
    biased = body.boolean("bias", True)
    return read_text(body, outer, qkv_bias=biased, o_bias=biased, mlp_bias=False, qkv_layout="by head")


FAMILY = Family(name="InternLM2", architectures=("InternLM2ForCausalLM",), inside=True, model=InternLM2, text=text)
