"""Phi-4-multimodal in transformers' layout: other names, and adapters in separate folders.

`vision-lora` and `speech-lora` below the checkpoint's folder each hold an adapter in PEFT's format, which
engine/weights/files.py reads with the checkpoint. Without a folder, its modality is computed without an adapter, as
transformers does until an adapter is loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from engine.base.request import Modality
from engine.checkpoint.files import read_json
from engine.checkpoint.section import Section
from engine.encoders import phi4mm_audio, phi4mm_vision
from engine.layers.adapted import Adapter
from engine.models.base.family import Family
from engine.models.media.phi4mm import IDS, NAMES, Phi4MM, adapter
from engine.models.text.phi3 import text

log = logging.getLogger(__name__)


class Phi4Multimodal(Phi4MM):
    """The same model."""

    RENAMED: ClassVar[Mapping[str, str]] = {
        "net.0.linear": "gate_up_proj",
        "net.2": "down_proj",
        "self_attn.linear_out": "self_attn.o_proj",
        "self_attn.linear_q": "self_attn.q_proj",
        "self_attn.linear_k": "self_attn.k_proj",
        "self_attn.linear_v": "self_attn.v_proj",
        "audio_projection.speech.0": "up_proj_for_speech",
        "audio_projection.speech.2": "down_proj_for_speech",
        "audio_projection.vision.0": "up_proj_for_vision_speech",
        "audio_projection.vision.2": "down_proj_for_vision_speech",
        "img_projection.0": "img_projection_up",
        "img_projection.2": "img_projection_down",
    }
    MATRIX: ClassVar[str] = ""

    def adapters_of(self, media: list[Modality]) -> list[Adapter]:
        """The adapters of the existing folders; for a missing folder an adapter that changes nothing."""
        found: list[Adapter] = []
        for kind in media:
            path = f"{NAMES[kind]}-lora/adapter_config.json"
            values = read_json(Path(self.config.folder) / path, required=False)
            if values:
                found.append(adapter(Section(values, path), kind))
            else:
                log.warning("%s is absent: prompts with %s are computed without an adapter", path, kind)
                found.append(Adapter(kind, (), 0, 0.0))
        return found


def media_token_ids(section: Section) -> dict[str, int]:
    """The placeholder tokens of pictures and audio, from each tower's section."""
    return {
        kind: section.section(key).integer(f"{kind}_token_id", IDS[kind])
        for kind, key in (("image", "vision_config"), ("audio", "audio_config"))
        if section.values.get(key)
    }


FAMILY = Family(
    name="Phi-4-multimodal",
    architectures=("Phi4MultimodalForCausalLM",),
    model=Phi4Multimodal,
    text=text,
    towers={"vision": phi4mm_vision.read_vision, "audio": phi4mm_audio.read_transformers},
    processor="phi4mm:Phi4MM",
    media_token_ids=media_token_ids,
)
