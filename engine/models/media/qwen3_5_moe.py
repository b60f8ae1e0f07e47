"""Qwen3.5 and 3.6 with experts and a vision tower (35B-A3B, 122B-A10B, 397B-A17B)."""

from __future__ import annotations

from engine.base.model_config import TextConfig
from engine.checkpoint.section import Section
from engine.models.base.family import Family
from engine.models.media.qwen3_5 import Qwen3_5VL, table, tied, vision
from engine.models.text.qwen3_5_moe_text import MOE_ROWS, sparse
from engine.models.text.qwen3_5_text import read
from engine.models.text.sparse import as_stored
from engine.weights.table import Table


class Qwen3_5MoEVL(Qwen3_5VL):
    """Text, image and video in; text out."""

    WEIGHTS = table(*MOE_ROWS)

    def weight_table(self) -> Table:
        return as_stored(super().weight_table(), self.config.text)


def text(body: Section, outer: Section) -> TextConfig:
    """The configuration of the decoder."""
    return tied(sparse(read(body, outer), body), body, outer)


FAMILY = Family(
    name="Qwen3.5 MoE",
    architectures=("Qwen3_5MoeForConditionalGeneration",),
    model=Qwen3_5MoEVL,
    text=text,
    towers={"vision": vision},
    processor="qwen3_vl:Qwen3VL",
)
