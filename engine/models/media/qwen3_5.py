"""Qwen3.5, 3.6 and 3.8: Qwen3-VL's tower without deepstack, and a decoder with interleaved position axes."""

from __future__ import annotations

from dataclasses import replace

from engine.base.model_config import TextConfig
from engine.checkpoint.section import Section
from engine.encoders.qwen_vl.config import VisionConfig, read_vision3
from engine.encoders.qwen_vl.names import QWEN3
from engine.models.base.family import Family
from engine.models.media.qwen2_vl import Qwen2VL, seeing
from engine.models.text import qwen3_5_text
from engine.models.text.qwen3_5_text import APART, DELTA_ROWS, PREDICTORS
from engine.weights.table import Row, Table


def table(*more: Row) -> Table:
    """The table for WEIGHTS; `more`: further rows of the decoder."""
    found = seeing(QWEN3, *DELTA_ROWS, APART, *more)
    return replace(found, ignore=(*found.ignore, PREDICTORS))


class Qwen3_5VL(Qwen2VL):
    """Text, image and video in; text out."""

    WEIGHTS = table()


def tied(found: TextConfig, body: Section, outer: Section) -> TextConfig:
    """Sets tie_embeddings; older files have tie_word_embeddings only in the decoder's section."""
    said = outer.values.get("tie_word_embeddings")
    return replace(found, tie_embeddings=body.boolean("tie_word_embeddings", False)) if said is None else found


def text(body: Section, outer: Section) -> TextConfig:
    """The configuration of the decoder."""
    return tied(qwen3_5_text.read(body, outer), body, outer)


def vision(section: Section) -> VisionConfig:
    """The configuration of the tower; without deepstack_visual_indexes, no decoder layer takes tower features."""
    return read_vision3(Section({"deepstack_visual_indexes": [], **section.values}, section.path, section.outer))


FAMILY = Family(
    name="Qwen3.5",
    architectures=("Qwen3_5ForConditionalGeneration",),
    model=Qwen3_5VL,
    text=text,
    towers={"vision": vision},
    processor="qwen3_vl:Qwen3VL",
)
