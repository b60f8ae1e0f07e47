"""Qwen3-Next (80B-A3B, Coder-Next): Qwen3.5's layers; other names in layers with a state; experts in most layers."""

from __future__ import annotations

from engine.base.model_config import TextConfig
from engine.checkpoint.experts import read_experts, with_experts
from engine.checkpoint.rope import RopeDefaults
from engine.checkpoint.section import Section
from engine.models.base.family import Family
from engine.models.text.llama import DECODER_IGNORE, DECODER_ROWS
from engine.models.text.qwen3_5_moe_text import MOE_ROWS, Qwen3_5MoE
from engine.models.text.qwen3_5_text import DELTA_ROWS, GROUPED, PREDICTORS, read
from engine.models.text.qwen3_moe import sparse_layers
from engine.weights.table import Table

ROPE = RopeDefaults(10_000_000.0, partial=0.25)


class Qwen3Next(Qwen3_5MoE):
    """Files of delta layers group rows by key head."""

    WEIGHTS = Table((*DECODER_ROWS, *DELTA_ROWS, GROUPED, *MOE_ROWS), ignore=(*DECODER_IGNORE, PREDICTORS))


def text(body: Section, outer: Section) -> TextConfig:
    """The configuration of the decoder."""
    found = read(body, outer, by_key_head=True, rope=ROPE)
    experts = read_experts(
        body,
        norm_topk_prob=body.boolean("norm_topk_prob", True),
        layout="upright",
        shared_width=body.size("shared_expert_intermediate_size", 512),
        shared_gate=True,
    )
    return with_experts(found, experts, sparse_layers(body, len(found.layers)))


FAMILY = Family(name="Qwen3-Next", architectures=("Qwen3NextForCausalLM",), model=Qwen3Next, text=text)
