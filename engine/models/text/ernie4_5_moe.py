"""ERNIE 4.5 with experts: neighbouring dimensions rotated in pairs, softmax scores with a correction, a shared MLP."""

from __future__ import annotations

from engine.base.model_config import TextConfig
from engine.checkpoint.experts import read_experts, with_experts
from engine.checkpoint.rope import RopeDefaults
from engine.checkpoint.section import Section
from engine.checkpoint.text import read_text, refuse
from engine.models.base.family import Family
from engine.models.text.llama import DECODER_IGNORE, DECODER_ROWS, Llama
from engine.models.text.sparse import sparse_rows
from engine.weights.table import Table


class Ernie45MoE(Llama):
    """Llama's layers with experts; multi-token-prediction parts in the files are not read."""

    WEIGHTS = Table(
        (*DECODER_ROWS, *sparse_rows(correction="moe_statics")), ignore=(*DECODER_IGNORE, "mtp_*", "layers.*.mtp_*")
    )


def text(body: Section, outer: Section) -> TextConfig:
    """The decoder's config; experts are in a range of layers, at a fixed interval."""
    refuse(body, use_bias=False)
    read = read_text(body, outer, rope=RopeDefaults(500_000.0, interleaved=True), tied=True, eps=1e-5)
    count = len(read.layers)
    last = body.values.get("moe_layer_end_index")
    end = count - 1 if last in (None, -1) else body.integer("moe_layer_end_index")
    every = body.size("moe_layer_interval", 1)
    numbers = [n for n in range(body.integer("moe_layer_start_index", 1), end + 1) if (n + 1) % every == 0]
    experts = read_experts(
        body,
        chosen="moe_k",
        correction=True,
        correction_line=True,
        norm_topk_prob=True,
        least_sum=body.number("moe_norm_min", 1e-12),
        shared_width=body.size("moe_intermediate_size") * body.integer("moe_num_shared_experts", 2),
    )
    return with_experts(read, experts, numbers)


FAMILY = Family(name="ERNIE 4.5 MoE", architectures=("Ernie4_5_MoeForCausalLM",), model=Ernie45MoE, text=text)
