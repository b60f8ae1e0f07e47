"""OPT, except the post-norm OPT-350m: learned positions instead of rotation, LayerNorms, biases everywhere, relu."""

from __future__ import annotations

from engine.base.model_config import TextConfig
from engine.checkpoint.rope import no_rope
from engine.checkpoint.section import Section
from engine.checkpoint.text import every_layer, read_text, refuse
from engine.models.base.family import Family
from engine.models.text.gpt2 import BIASED, LearnedPositions
from engine.models.text.llama import ATTENTION
from engine.weights.table import Row, Table


class OPT(LearnedPositions):
    """Llama's layers with other weight names."""

    OFFSET = 2
    WEIGHTS = Table(
        (
            Row(("embed_tokens",), "embed"),
            Row(("embed_positions",), "positions"),
            Row(("layers.*.self_attn_layer_norm",), "layers.*.attention_norm"),
            Row((ATTENTION + "q_proj", ATTENTION + "k_proj", ATTENTION + "v_proj"), "layers.*.attention.qkv", "rows"),
            Row((ATTENTION + "out_proj",), "layers.*.o", "columns"),
            Row(("layers.*.final_layer_norm",), "layers.*.mlp_norm"),
            Row(("layers.*.fc1",), "layers.*.mlp.up", "rows"),
            Row(("layers.*.fc2",), "layers.*.mlp.down", "columns"),
            Row(("final_layer_norm",), "norm"),
            Row(("lm_head",), "head", "rows"),
        ),
        prefixes=("model.", "decoder."),
    )


def text(body: Section, outer: Section) -> TextConfig:
    """The decoder."""
    refuse(
        body,
        do_layer_norm_before=True,
        enable_bias=True,
        layer_norm_elementwise_affine=True,
        _remove_final_layer_norm=False,
        word_embed_proj_dim=body.size("hidden_size"),
    )
    read = read_text(body, outer, tied=True, activation="relu", eps=1e-5, **BIASED)
    return every_layer(read, rope=no_rope(read.head_dim))


FAMILY = Family(
    name="OPT",
    architectures=("OPTForCausalLM",),
    model=OPT,
    text=text,
    keys={"ffn_dim": "intermediate_size", "activation_function": "hidden_act"},
)
