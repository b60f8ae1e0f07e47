"""LFM2 with experts (8B-A1B): sigmoid scores with a correction, and first layers without experts."""

from __future__ import annotations

from engine.base.model_config import TextConfig
from engine.checkpoint.experts import read_experts, with_experts
from engine.checkpoint.section import Section
from engine.layers.moe import PerExpert
from engine.models.base.decoder import DecoderLayer
from engine.models.base.family import Family
from engine.models.text.lfm2 import BLOCK, LFM2_ROWS, read_layers
from engine.models.text.llama import DECODER_IGNORE, Llama
from engine.models.text.sparse import sparse_rows
from engine.weights.table import Table


class Lfm2MoE(Llama):
    """Llama's layers with experts; the correction's tensor is called expert_bias."""

    WEIGHTS = Table((*LFM2_ROWS, *sparse_rows(BLOCK, names=("w1", "w3", "w2"), correction="")), ignore=DECODER_IGNORE)

    def layer(self, number: int) -> DecoderLayer:
        made = super().layer(number)
        if made.experts is not None and made.experts.correction is not None:
            made.experts.correction = PerExpert("expert_bias", made.experts.routing.num_experts)
        return made


def text(body: Section, outer: Section) -> TextConfig:
    """The decoder."""
    read = read_layers(body, outer, body.size("intermediate_size", 7168))
    experts = read_experts(
        body,
        score="sigmoid",
        correction=body.boolean("use_expert_bias", True),
        norm_topk_prob=body.boolean("norm_topk_prob", True),
        eps=1e-6,
        scale=body.number("routed_scaling_factor", 1.0),
    )
    return with_experts(read, experts, range(body.integer("num_dense_layers", 2), len(read.layers)))


FAMILY = Family(name="LFM2 MoE", architectures=("Lfm2MoeForCausalLM",), inside=True, model=Lfm2MoE, text=text)
