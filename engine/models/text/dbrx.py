"""DBRX: LayerNorms without biases; clipped queries, keys and values; experts in every layer."""

from __future__ import annotations

from engine.base.errors import ConfigError
from engine.base.model_config import TextConfig
from engine.checkpoint.experts import read_experts, with_experts
from engine.checkpoint.section import Section
from engine.checkpoint.text import read_text, refuse
from engine.models.base.family import Family
from engine.models.text.llama import Llama
from engine.weights.table import Row, Table

NORMS, FFN = "blocks.*.norm_attn_norm.", "blocks.*.ffn."


class Dbrx(Llama):
    """Llama's layers with other weight names; three matrices hold all experts of a layer, stacked along the rows."""

    WEIGHTS = Table(
        (
            Row(("wte",), "embed"),
            Row((NORMS + "norm_1",), "layers.*.attention_norm"),
            Row((NORMS + "attn.Wqkv",), "layers.*.attention.qkv", "rows"),
            Row((NORMS + "attn.out_proj",), "layers.*.o", "columns"),
            Row((NORMS + "norm_2",), "layers.*.mlp_norm"),
            Row((FFN + "router.layer",), "layers.*.experts.router"),
            Row((FFN + "experts.mlp",), "layers.*.experts.gate_up", "rows"),
            Row((FFN + "experts.mlp",), "layers.*.experts.down", "columns"),
            Row(("norm_f",), "norm"),
            Row(("lm_head",), "head", "rows"),
        ),
        prefixes=("transformer.",),
    )


def text(body: Section, outer: Section) -> TextConfig:
    """The decoder's config; attention and experts have separate sections in config.json."""
    attention, ffn = body.section("attn_config"), body.section("ffn_config")
    refuse(body, tie_word_embeddings=False)
    power = ffn.values.get("moe_normalize_expert_weights", 1)
    if power not in (None, 1):
        raise ConfigError(
            f"{ffn.path}: moe_normalize_expert_weights={power!r} is not supported; supported are 1 (weights are "
            "divided by their sum) and null"
        )
    words = {
        "num_key_value_heads": attention.size("kv_n_heads", 1),
        "rope_theta": attention.number("rope_theta", 10_000.0),
        "hidden_act": ffn.section("ffn_act_fn").values.get("name") if ffn.values.get("ffn_act_fn") else "silu",
        "intermediate_size": ffn.size("ffn_hidden_size", 3584),
    }
    clip = attention.number("clip_qkv", 0.0)
    whole = Section({**words, **body.values, "num_key_value_heads": words["num_key_value_heads"]}, body.path)
    read = read_text(whole, outer, eps=1e-5, qkv_layout="joined", qkv_clip=clip, layer_norm=True)
    experts = read_experts(
        ffn, width="ffn_hidden_size", chosen="moe_top_k", norm_topk_prob=power == 1, layout="one below the other"
    )
    return with_experts(read, experts)


KEYS = {"d_model": "hidden_size", "n_heads": "num_attention_heads", "n_layers": "num_hidden_layers",
        "max_seq_len": "max_position_embeddings"}  # fmt: skip
FAMILY = Family(name="DBRX", architectures=("DbrxForCausalLM",), model=Dbrx, text=text, keys=KEYS)
