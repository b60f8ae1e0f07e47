"""GLM-4.5, 4.6 and 4.7: half of each head rotated, dense first layers, corrected sigmoid scores, a shared MLP."""

from __future__ import annotations

from dataclasses import replace

from engine.base.model_config import ExpertsConfig, TextConfig
from engine.checkpoint.experts import read_experts, with_experts
from engine.checkpoint.rope import RopeDefaults
from engine.checkpoint.section import Section
from engine.checkpoint.text import read_text, refuse
from engine.models.base.family import Family
from engine.models.text.sparse import Sparse

ROPE = RopeDefaults(partial=0.5)


def read_noaux_experts(body: Section, shared: str, scale: float = 1.0) -> ExpertsConfig:
    """DeepSeek-V3's noaux_tc routing: sigmoid scores, a correction for selection, groups ranked by their two best
    scores.

    `shared`: the key of the number of shared experts; `scale`: default of the factor on the experts' sum.
    """
    refuse(body, scoring_func="sigmoid", topk_method="noaux_tc")
    return read_experts(
        body,
        score="sigmoid",
        correction=True,
        n_group=body.size("n_group", 1),
        topk_group=body.size("topk_group", 1),
        group_rank="best two",
        norm_topk_prob=body.boolean("norm_topk_prob", True),
        eps=1e-20,
        scale=body.number("routed_scaling_factor", scale),
        shared_width=body.size("moe_intermediate_size") * body.integer(shared, 1),
    )


def text(body: Section, outer: Section, rope: RopeDefaults = ROPE) -> TextConfig:
    """The decoder's config. The first layers have no experts; the files also hold multi-token-prediction layers."""
    norms = "head" if body.boolean("use_qk_norm", False) else "none"
    bias = body.boolean("attention_bias", False)
    read = read_text(body, outer, qkv_bias=bias, rope=rope, eps=1e-5, qk_norm=norms)
    dense = body.integer("first_k_dense_replace", 1)
    read = replace(read, num_nextn_predict_layers=max(1, body.integer("num_nextn_predict_layers", 1)))
    return with_experts(read, read_noaux_experts(body, "n_shared_experts"), range(dense, len(read.layers)))


FAMILY = Family(name="GLM-4.5 MoE", architectures=("Glm4MoeForCausalLM",), model=Sparse, text=text)
