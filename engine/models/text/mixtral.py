"""Mixtral: Mistral with experts in every layer, named `block_sparse_moe.experts.N.w1`, `w3`, `w2`."""

from __future__ import annotations

from engine.base.model_config import TextConfig
from engine.checkpoint.experts import read_experts, with_experts
from engine.checkpoint.rope import RopeDefaults
from engine.checkpoint.section import Section
from engine.checkpoint.text import read_text
from engine.models.base.family import Family
from engine.models.text.llama import DECODER_IGNORE, DECODER_ROWS, Llama
from engine.models.text.sparse import sparse_rows
from engine.weights.table import Table

ROPE = RopeDefaults(1_000_000.0)
BLOCK = "layers.*.block_sparse_moe."


class Mixtral(Llama):
    """w1 is gate, w3 up and w2 down."""

    WEIGHTS = Table((*DECODER_ROWS, *sparse_rows(BLOCK, names=("w1", "w3", "w2"))), ignore=DECODER_IGNORE)


def text(body: Section, outer: Section) -> TextConfig:
    """The decoder's config; the weights of a token's experts sum to one."""
    read = read_text(body, outer, sliding="given", rope=ROPE, eps=1e-5)
    return with_experts(read, read_experts(body, width="intermediate_size", norm_topk_prob=True))


FAMILY = Family(name="Mixtral", architectures=("MixtralForCausalLM",), model=Mixtral, text=text)
