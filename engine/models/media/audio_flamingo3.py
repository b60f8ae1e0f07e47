"""Audio Flamingo 3: a Qwen2 decoder that takes speech, sounds and music of any length, in windows of thirty seconds."""

from __future__ import annotations

from engine.encoders.windows import VOXTRAL_ROWS, AveragedTower, read_flamingo
from engine.models.base.family import Family
from engine.models.media.seeing import text
from engine.models.media.with_audio import with_audio

FAMILY = Family(
    name="Audio Flamingo 3",
    architectures=("AudioFlamingo3ForConditionalGeneration",),
    model=with_audio(AveragedTower, VOXTRAL_ROWS),
    text=text,
    towers={"audio": read_flamingo},
    processor="windows:AudioFlamingo",
)
