"""MiniMax-M2: norms over whole queries and keys, part of each head rotated, sigmoid scores with a correction."""

from __future__ import annotations

from dataclasses import replace

from engine.base.model_config import TextConfig
from engine.checkpoint.experts import read_experts, with_experts
from engine.checkpoint.rope import RopeDefaults
from engine.checkpoint.section import Section
from engine.checkpoint.text import read_text, refuse
from engine.models.base.family import Family
from engine.models.text.llama import DECODER_IGNORE, DECODER_ROWS, Llama
from engine.models.text.mixtral import BLOCK
from engine.models.text.sparse import sparse_rows
from engine.weights.table import Table


class MiniMaxM2(Llama):
    """Llama's layers with experts, with Mixtral's names; the correction is next to the experts."""

    WEIGHTS = Table(
        (*DECODER_ROWS, *sparse_rows(BLOCK, names=("w1", "w3", "w2"), correction="")), ignore=DECODER_IGNORE
    )


def text(body: Section, outer: Section) -> TextConfig:
    """The decoder's config. Every layer has experts; `rotary_dim` is the number of rotated dimensions. Files may hold
    multi-token-prediction modules after the last layer."""
    refuse(body, scoring_func="sigmoid", qk_norm_type="per_layer", use_routing_bias=True)
    width = body.size("head_dim", 128)
    partial = body.size("rotary_dim", width) / width
    rope = RopeDefaults(5_000_000.0, partial)
    read = read_text(body, outer, head_dim=128, rope=rope, qk_norm="projection")
    experts = read_experts(body, width="intermediate_size", score="sigmoid", correction=True, norm_topk_prob=True)
    return with_experts(replace(read, num_nextn_predict_layers=body.integer("num_mtp_modules", 0)), experts)


FAMILY = Family(name="MiniMax-M2", architectures=("MiniMaxM2ForCausalLM",), model=MiniMaxM2, text=text)
