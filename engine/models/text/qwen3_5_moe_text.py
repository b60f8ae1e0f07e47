"""Qwen3.5 and 3.6 with experts (text): one tensor per layer or per expert; a shared expert with a gate."""

from __future__ import annotations

from engine.base.model_config import TextConfig
from engine.checkpoint.experts import read_experts, with_experts
from engine.checkpoint.section import Section
from engine.models.base.family import Family
from engine.models.text.llama import DECODER_IGNORE, DECODER_ROWS, Llama
from engine.models.text.qwen3_5_text import APART, DELTA_ROWS, PREDICTORS, one_axis, read
from engine.models.text.sparse import as_stored
from engine.weights.table import Row, Table

SHARED = "layers.*.mlp.shared_expert"
EXPERTS = "layers.*.mlp.experts"
MOE_ROWS = (
    Row(("layers.*.mlp.gate",), "layers.*.experts.router"),
    Row((EXPERTS,), "layers.*.experts.gate_up", "rows"),
    Row((EXPERTS,), "layers.*.experts.down", "columns"),
    Row((SHARED + ".gate_proj", SHARED + ".up_proj"), "layers.*.experts.shared.gate_up", "rows"),
    Row((SHARED + ".down_proj",), "layers.*.experts.shared.down", "columns"),
    Row((SHARED + "_gate",), "layers.*.experts.shared_gate"),
)


class Qwen3_5MoE(Llama):
    """Text only; the loader skips the tower of a checkpoint."""

    WEIGHTS = Table((*DECODER_ROWS, *DELTA_ROWS, APART, *MOE_ROWS), ignore=(*DECODER_IGNORE, PREDICTORS, "visual.*"))

    def weight_table(self) -> Table:
        return as_stored(super().weight_table(), self.config.text)


def sparse(found: TextConfig, body: Section) -> TextConfig:
    """The decoder with experts in every layer; the weights of a token's experts sum to one."""
    experts = read_experts(
        body,
        norm_topk_prob=True,
        layout="upright",
        shared_width=body.size("shared_expert_intermediate_size", 512),
        shared_gate=True,
    )
    return with_experts(found, experts)


def text(body: Section, outer: Section) -> TextConfig:
    """The configuration of the decoder."""
    return one_axis(sparse(read(body, outer), body))


FAMILY = Family(name="Qwen3.5 MoE", architectures=("Qwen3_5MoeForCausalLM",), inside=True, model=Qwen3_5MoE, text=text)
