"""Qwen3 with experts (Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder): Qwen3's attention, and experts in most layers.

The published models have no shared expert. Models derived from Qwen3's class may have one, with a gate, under Qwen2
MoE's keys and names; vLLM's qwen3_moe.py reads them in this way.
"""

from __future__ import annotations

from engine.base.model_config import TextConfig
from engine.checkpoint.experts import read_experts, with_experts
from engine.checkpoint.section import Section
from engine.checkpoint.text import read_text
from engine.models.base.family import Family
from engine.models.text.llama import DECODER_IGNORE, DECODER_ROWS, Llama
from engine.models.text.sparse import sparse_rows
from engine.weights.table import Row, Table

GATED_ROWS = (
    *sparse_rows(shared="shared_expert"),
    Row(("layers.*.mlp.shared_expert_gate",), "layers.*.experts.shared_gate"),
)


class Qwen3MoE(Llama):
    """Llama's layers with experts; the gate of a shared expert is a matrix of one row."""

    WEIGHTS = Table((*DECODER_ROWS, *GATED_ROWS), ignore=DECODER_IGNORE)


def text(body: Section, outer: Section) -> TextConfig:
    """The decoder's config; use_sliding_window gives all layers a window."""
    windowed = body.boolean("use_sliding_window", False)
    read = read_text(body, outer, sliding="given" if windowed else "none", qk_norm="head")
    shared = body.integer("shared_expert_intermediate_size", 0)
    experts = read_experts(
        body, norm_topk_prob=body.boolean("norm_topk_prob", False), shared_width=shared, shared_gate=shared > 0
    )
    return with_experts(read, experts, sparse_layers(body, len(read.layers)))


def sparse_layers(body: Section, count: int) -> set[int]:
    """The layers with experts: every decoder_sparse_step-th layer, except mlp_only_layers."""
    step, dense = body.size("decoder_sparse_step", 1), body.items("mlp_only_layers", ())
    return {number for number in range(count) if (number + 1) % step == 0 and number not in dense}


FAMILY = Family(name="Qwen3 MoE", architectures=("Qwen3MoeForCausalLM",), inside=True, model=Qwen3MoE, text=text)
