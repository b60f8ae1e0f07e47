"""GLM-ASR (Nano): a Llama decoder that transcribes audio in windows of thirty seconds."""

from __future__ import annotations

from engine.base.model_config import TextConfig
from engine.checkpoint.section import Section
from engine.encoders.windows import GLM_ASR_ROWS, WindowsTower, read_glm_asr
from engine.models.base.family import Family
from engine.models.media import seeing
from engine.models.media.with_audio import with_audio


def text(body: Section, outer: Section) -> TextConfig:
    """The decoder's config. Embedding and head are tied unless the outer object says otherwise; the decoder's section
    has Llama's default false, which does not count."""
    tied = outer.boolean("tie_word_embeddings", True)
    return seeing.text(body, Section({**outer.values, "tie_word_embeddings": tied}, outer.path))


FAMILY = Family(
    name="GLM-ASR",
    architectures=("GlmAsrForConditionalGeneration",),
    model=with_audio(WindowsTower, GLM_ASR_ROWS),
    text=text,
    towers={"audio": read_glm_asr},
    processor="windows:GlmAsr",
)
