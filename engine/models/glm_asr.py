"""GLM-ASR (Nano): a Llama decoder that writes down sounds, heard in windows of thirty seconds."""

from __future__ import annotations

from functools import partial

from engine.encoders.windows import GLM_ASR_ROWS, WindowsTower, read_glm_asr
from engine.models.family import Family
from engine.models.hearing import hearing
from engine.models.seeing import text

FAMILY = Family(
    name="GLM-ASR",
    model=hearing(WindowsTower, GLM_ASR_ROWS),
    text=partial(text, tied=True),
    towers={"audio": read_glm_asr},
    processor="windows:GlmAsr",
)
