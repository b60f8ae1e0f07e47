"""Qwen2 with experts, and a shared MLP with a gate (Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B)."""

from __future__ import annotations

from engine.base.model_config import TextConfig
from engine.checkpoint.experts import read_experts, with_experts
from engine.checkpoint.section import Section
from engine.checkpoint.text import read_text, refuse
from engine.models.base.family import Family
from engine.models.text.llama import DECODER_IGNORE, DECODER_ROWS, Llama
from engine.models.text.qwen3_moe import sparse_layers
from engine.models.text.sparse import sparse_rows
from engine.weights.table import Row, Table


class Qwen2MoE(Llama):
    """Llama's layers with experts; the shared MLP's gate is a matrix of one row."""

    WEIGHTS = Table(
        (
            *DECODER_ROWS,
            *sparse_rows(shared="shared_expert"),
            Row(("layers.*.mlp.shared_expert_gate",), "layers.*.experts.shared_gate"),
        ),
        ignore=DECODER_IGNORE,
    )


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


FAMILY = Family(name="Qwen2 MoE", architectures=("Qwen2MoeForCausalLM",), model=Qwen2MoE, text=text)
