"""GLM-4 (glm-4-9b-chat-hf): Llama that rotates half of each head in neighbouring pairs; gate and up are one matrix."""

from __future__ import annotations

from dataclasses import replace

from engine.base.model_config import TextConfig
from engine.checkpoint.rope import RopeDefaults
from engine.checkpoint.section import Section
from engine.checkpoint.text import read_text
from engine.models.base.family import Family
from engine.models.text.llama import DECODER_IGNORE, DECODER_ROWS, Llama
from engine.weights.table import Table

ROWS = tuple(
    replace(row, names=("layers.*.mlp.gate_up_proj",)) if row.target == "layers.*.mlp.gate_up" else row
    for row in DECODER_ROWS
)
ROPE = RopeDefaults(partial=0.5, interleaved=True)


class Glm(Llama):
    """Llama's layers from other files."""

    WEIGHTS = Table(ROWS, ignore=DECODER_IGNORE)


def text(body: Section, outer: Section) -> TextConfig:
    """The decoder's config; queries, keys and values have biases, the output projection has none."""
    biased = body.boolean("attention_bias", True)
    return read_text(
        body, outer, head_dim=128, rope=ROPE, eps=1.5625e-7, qkv_bias=biased, o_bias=False, joined_mlp=True
    )


FAMILY = Family(name="GLM", architectures=("GlmForCausalLM",), model=Glm, text=text)
