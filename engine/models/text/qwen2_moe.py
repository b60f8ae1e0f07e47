"""Qwen2 with experts, and a shared expert with a gate (Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B)."""

from __future__ import annotations

from engine.base.model_config import TextConfig
from engine.checkpoint.experts import read_experts, with_experts
from engine.checkpoint.section import Section
from engine.checkpoint.text import read_text, refuse
from engine.models.base.family import Family
from engine.models.text.qwen3_moe import Qwen3MoE, sparse_layers


def text(body: Section, outer: Section) -> TextConfig:
    """The decoder's config; windows are off in every release."""
    refuse(body, use_sliding_window=False)
    read = read_text(body, outer, qkv_bias=body.boolean("qkv_bias", True))
    experts = read_experts(
        body,
        norm_topk_prob=body.boolean("norm_topk_prob", False),
        shared_width=body.size("shared_expert_intermediate_size"),
        shared_gate=True,
    )
    return with_experts(read, experts, sparse_layers(body, len(read.layers)))


FAMILY = Family(name="Qwen2 MoE", architectures=("Qwen2MoeForCausalLM",), model=Qwen3MoE, text=text)
