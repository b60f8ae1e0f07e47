"""Qwen2.5-VL: Qwen2-VL with windows, RMSNorms and a gated MLP in the tower."""

from __future__ import annotations

from functools import partial

from engine.encoders.qwen_vl.config import read_vision
from engine.encoders.qwen_vl.names import QWEN2_5
from engine.models.base.family import Family
from engine.models.media.qwen2_vl import Qwen2VL, seeing, text


class Qwen25VL(Qwen2VL):
    """Text, image and video in; text out."""

    WEIGHTS = seeing(QWEN2_5)


FAMILY = Family(
    name="Qwen2.5-VL",
    architectures=("Qwen2_5_VLForConditionalGeneration",),
    model=Qwen25VL,
    text=text,
    towers={"vision": partial(read_vision, joined_qkv=True)},
    processor="qwen_vl:QwenVL",
)
