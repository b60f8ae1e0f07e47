"""FunAudioChat (8B): a Qwen3 decoder that takes audio of up to five minutes, and answers with text only."""

from __future__ import annotations

from engine.encoders.fun_audio import UNREAD, FunAudioTower, read_audio, rows
from engine.models.base.family import Family
from engine.models.media.seeing import text
from engine.models.media.with_audio import with_audio

FAMILY = Family(
    name="FunAudioChat",
    architectures=("FunAudioChatForConditionalGeneration",),
    model=with_audio(FunAudioTower, rows(), ignore=UNREAD),
    text=text,
    towers={"audio": read_audio},
    processor="fun_audio:FunAudio",
)
