"""Qwen3-VL with experts (30B-A3B, 235B-A22B): a layer's experts are one transposed tensor, gate's columns first."""

from __future__ import annotations

from engine.base.model_config import TextConfig
from engine.checkpoint.experts import read_experts, with_experts
from engine.checkpoint.section import Section
from engine.encoders.qwen_vl.config import read_vision3
from engine.encoders.qwen_vl.names import QWEN3
from engine.models.base.family import Family
from engine.models.media import qwen3_vl
from engine.models.media.qwen2_vl import seeing
from engine.models.text.qwen3_moe import sparse_layers
from engine.models.text.sparse import as_stored
from engine.weights.table import Row, Table

ROWS = (
    Row(("layers.*.mlp.gate",), "layers.*.experts.router"),
    Row(("layers.*.mlp.experts",), "layers.*.experts.gate_up", "rows"),
    Row(("layers.*.mlp.experts",), "layers.*.experts.down", "columns"),
)


class Qwen3VLMoe(qwen3_vl.Qwen3VL):
    """Text, image and video in; text out."""

    WEIGHTS = seeing(QWEN3, *ROWS)

    def weight_table(self) -> Table:
        return as_stored(super().weight_table(), self.config.text)


def text(body: Section, outer: Section) -> TextConfig:
    """The decoder's config; the weights of a token's experts sum to one."""
    read = qwen3_vl.text(body, outer)
    experts = read_experts(body, norm_topk_prob=True, layout="turned")
    return with_experts(read, experts, sparse_layers(body, len(read.layers)))


FAMILY = Family(
    name="Qwen3-VL MoE",
    architectures=("Qwen3VLMoeForConditionalGeneration",),
    model=Qwen3VLMoe,
    text=text,
    towers={"vision": read_vision3},
    processor="qwen3_vl:Qwen3VL",
)
