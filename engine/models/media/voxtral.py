"""Voxtral (Mini 3B, Small 24B): a Llama decoder that takes audio of any length, in windows of thirty seconds."""

from __future__ import annotations

from engine.encoders.windows import VOXTRAL_ROWS, WindowsTower, read_voxtral
from engine.models.base.family import Family
from engine.models.media.hearing import hearing
from engine.models.media.seeing import text

FAMILY = Family(
    name="Voxtral",
    architectures=("VoxtralForConditionalGeneration",),
    model=hearing(WindowsTower, VOXTRAL_ROWS),
    text=text,
    towers={"audio": read_voxtral},
    processor="windows:Voxtral",
)
