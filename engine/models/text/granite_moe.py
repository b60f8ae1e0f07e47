"""Granite 3 with experts (1B-A400M, 3B-A800M): Granite's multipliers, and one tensor for all experts of a layer."""

from __future__ import annotations

from engine.base.model_config import TextConfig
from engine.checkpoint.experts import read_experts, with_experts
from engine.checkpoint.section import Section
from engine.models.base.family import Family
from engine.models.text import granite
from engine.models.text.llama import DECODER_IGNORE, DECODER_ROWS, Llama
from engine.models.text.mixtral import BLOCK
from engine.models.text.sparse import as_stored
from engine.weights.table import Row, Table


class GraniteMoE(Llama):
    """Llama's layers with experts. The model's softmax over the chosen logits equals norm_topk_prob of a full
    softmax."""

    WEIGHTS = Table(
        (
            *DECODER_ROWS,
            Row((BLOCK + "router.layer",), "layers.*.experts.router"),
            Row((BLOCK + "input_linear",), "layers.*.experts.gate_up", "rows"),
            Row((BLOCK + "output_linear",), "layers.*.experts.down", "columns"),
        ),
        ignore=DECODER_IGNORE,
    )

    def weight_table(self) -> Table:
        return as_stored(super().weight_table(), self.config.text, BLOCK + "experts")


def text(body: Section, outer: Section) -> TextConfig:
    """Every layer has experts."""
    experts = read_experts(body, width="intermediate_size", norm_topk_prob=True, layout="joined")
    return with_experts(granite.text(body, outer), experts)


FAMILY = Family(name="Granite MoE", architectures=("GraniteMoeForCausalLM",), model=GraniteMoE, text=text)
