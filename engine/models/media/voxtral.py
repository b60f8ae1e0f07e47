"""Voxtral (Mini 3B, Small 24B): a Llama decoder that takes audio of any length, in windows of thirty seconds."""

from __future__ import annotations

from engine.encoders.windows import VOXTRAL_ROWS, WindowsTower, read_voxtral
from engine.models.base.family import Family
from engine.models.media.seeing import text
from engine.models.media.with_audio import with_audio

FAMILY = Family(
    name="Voxtral",
    architectures=("VoxtralForConditionalGeneration",),
    model=with_audio(WindowsTower, VOXTRAL_ROWS),
    text=text,
    towers={"audio": read_voxtral},
    processor="windows:Voxtral",
)
