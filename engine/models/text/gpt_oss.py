"""gpt-oss: attention sinks, windows in every other layer, biases everywhere, experts with a clamped activation.

Released checkpoints hold the experts as codes of 4 bits; other checkpoints hold them in bfloat16.
"""

from __future__ import annotations

from engine.base.model_config import TextConfig
from engine.checkpoint.experts import read_experts, with_experts
from engine.checkpoint.rope import RopeDefaults
from engine.checkpoint.section import Section
from engine.checkpoint.text import every_layer, read_text, refuse
from engine.kernels.activation import SWIGLU_ALPHA, SWIGLU_LIMIT
from engine.models.base.family import Family
from engine.models.text.llama import DECODER_IGNORE, DECODER_ROWS, Llama
from engine.quant.blocks import holds_experts
from engine.weights.table import Row, Table

ROPE = RopeDefaults(150_000.0)
RELEASED = {  # default rope_parameters
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


class GptOss(Llama):
    """Llama's layers with experts; a layer's experts are one transposed tensor, with interleaved columns of gate and
    up."""

    WEIGHTS = Table(
        (
            *DECODER_ROWS,
            Row(("layers.*.self_attn",), "layers.*.attention.sinks"),
            Row(("layers.*.mlp.router",), "layers.*.experts.router"),
            Row(("layers.*.mlp.experts",), "layers.*.experts.gate_up", "rows"),
            Row(("layers.*.mlp.experts",), "layers.*.experts.down", "columns"),
        ),
        ignore=DECODER_IGNORE,
    )


def text(body: Section, outer: Section) -> TextConfig:
    """The decoder's config. The softmax over the chosen logits equals the full softmax divided by the chosen sum."""
    refuse(body, swiglu_alpha=SWIGLU_ALPHA, swiglu_limit=SWIGLU_LIMIT)
    body = Section({"attention_bias": True, **body.values}, body.path)
    if not (body.values.get("rope_parameters") or body.values.get("rope_scaling")):
        body.values["rope_parameters"] = RELEASED
    read = read_text(body, outer, sliding="layers", pattern=2, head_dim=64, rope=ROPE, eps=1e-5)
    layout = "codes by turns" if holds_experts(outer) else "by turns"
    experts = read_experts(
        body, width="intermediate_size", norm_topk_prob=True, layout=layout, clamped=True, router_bias=True
    )
    return with_experts(every_layer(read, sinks=True), experts)


FAMILY = Family(name="gpt-oss", architectures=("GptOssForCausalLM",), inside=True, model=GptOss, text=text)
