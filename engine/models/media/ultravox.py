"""Ultravox (0.4 to 0.6): a Llama decoder that takes audio of any length.

The published checkpoints hold the projector and often the encoder. text_model_id and audio_model_id name the other
parts, which server/start/joined.py adds. The vocabulary has no audio token, so its last reserved token is used.
"""

from __future__ import annotations

import torch

from engine.base.errors import ConfigError
from engine.base.model_config import ModelConfig, TextConfig
from engine.checkpoint.section import Section
from engine.checkpoint.text import complete
from engine.encoders.ultravox import UltravoxTower, read_audio, rows
from engine.models.base.decoder import Decoder
from engine.models.base.family import Family
from engine.models.media import seeing
from engine.models.media.with_audio import with_audio

UNREAD = ("decoder.*", "proj_out.weight")  # unused tensors of a complete Whisper
TOWERS = {  # whether the encoder comes from the repository of a complete Whisper -> Family.model
    False: with_audio(UltravoxTower, rows("audio_tower")),
    True: with_audio(UltravoxTower, rows("encoder"), ignore=UNREAD),
}


def text(body: Section, outer: Section) -> TextConfig:
    """Llama's config, from a joined configuration."""
    if "text_config" not in outer.values:
        raise ConfigError(
            f"{outer.path}: text_model_id={outer.values.get('text_model_id')!r} names the decoder, whose configuration "
            "is not here; name the model or its folder with --model, which joins both"
        )
    kind = body.values.get("model_type", "llama")
    if kind != "llama":
        raise ConfigError(f"{body.path}: model_type={kind!r}; Ultravox is supported with 'llama'")
    return seeing.text(body, outer)


def model(config: ModelConfig, dtype: torch.dtype, device: str) -> Decoder:
    """The decoder and the tower, chosen by where the encoder's weights are."""
    return TOWERS[config.raw.get("joined_audio_model_id") is not None](config, dtype, device)


def media_token_ids(section: Section) -> dict[str, int]:
    """The placeholder: the last token of Llama 3's vocabulary, which is reserved and in no text."""
    if "text_config" not in section.values:
        return {}
    return {"audio": complete(section.section("text_config")).size("vocab_size") - 1}


FAMILY = Family(
    name="Ultravox",
    architectures=("UltravoxModel",),
    model=model,
    text=text,
    towers={"audio": read_audio},
    processor="ultravox:Ultravox",
    media_token_ids=media_token_ids,
)
