"""FunAudioChat's tower: the encoder of Qwen2.5-Omni, five of whose rows become one; five rows of the decoder a second.

Thread: device. To each row is added what the model makes of five codes of a speech tokenizer. Where the answer is text,
the published code puts the code for nothing in their places, so one vector is added to all rows.

    mel [T] -> Qwen2.5-Omni's encoder [25 a second] -> five averaged -> product + vector
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from engine.base.errors import ConfigError, RequestError
from engine.base.request import Modality
from engine.checkpoint.section import Section
from engine.encoders import qwen_omni_audio
from engine.encoders.qwen_omni_audio import AudioConfig, QwenOmniAudioTower
from engine.encoders.tower import Features, Pieces, apart, joined
from engine.layers.bare import Bare
from engine.layers.linear import Linear
from engine.weights.table import Row


@dataclass(frozen=True, slots=True)
class FunAudioConfig(AudioConfig):
    """The encoder, and the groups behind it."""

    group: int  # rows of the encoder that become one
    codes: int  # of the speech tokenizer
    nothing: int  # the code for nothing


def read_audio(section: Section) -> FunAudioConfig:
    """The tower's numbers, checked."""
    mode = section.values.get("continuous_features_mode", "add")
    if mode != "add":
        raise ConfigError(f"{section.path}: continuous_features_mode={mode!r}; FunAudioChat is supported with 'add'")
    encoder = qwen_omni_audio.read_audio(section)
    given: dict[str, Any] = {field.name: getattr(encoder, field.name) for field in dataclasses.fields(encoder)}
    codes = section.size("codebook_size")
    return FunAudioConfig(
        **given,
        group=section.size("group_size", 5),
        codes=codes,
        nothing=section.integer("pad_token_id", most=codes - 1),
    )


class FunAudioTower(QwenOmniAudioTower):
    """Mel frames -> rows of the decoder's width."""

    config: FunAudioConfig

    def __init__(self, config: FunAudioConfig, dtype: torch.dtype, device: str) -> None:
        super().__init__(config, dtype, device)
        size = config.output_dim
        self.codes = Bare("weight", config.codes, size)
        self.of_codes = Linear(size, size)
        self.of_sound = Linear(size, size)

    def pieces(self, items: Sequence[Features]) -> Pieces:
        """Each input_features [num_mel_bins, frames], num_rows: of the decoder -> [num_rows, output_dim]."""
        counts, group = [int(features["num_rows"]) for features in items], self.config.group
        averaged = []
        encoded = yield from super().pieces(items)
        for x, rows in zip(encoded, counts):
            length = rows * group
            if not -group < len(x) - length < group:
                raise RequestError(f"num_rows={rows}: {len(x)} rows in groups of {group} do not make as many")
            whole = functional.pad(x[:length], (0, 0, 0, max(0, length - len(x))))
            averaged.append(whole.view(rows, group, -1).mean(1))
        x = self.of_sound(joined(averaged))
        return apart(x + self.of_codes(self.codes.value[self.config.nothing : self.config.nothing + 1]), counts)

    def example(self, modality: Modality, rows: int) -> Features:
        made = super().example(modality, rows * self.config.group)
        return {**made, "num_rows": torch.tensor(rows)}


def rows() -> tuple[Row, ...]:
    """Weight rows of a tower that hangs at attribute `audio`."""
    names = {"embed_tokens": "codes", "output_matching": "of_codes", "continual_output_matching": "of_sound"}
    return (
        *qwen_omni_audio.rows("audio", "continuous_audio_tower"),
        *(Row((f"audio_tower.{name}",), f"audio.{part}") for name, part in names.items()),
    )


# The speech generator's tensors, and unused ones of the encoder.
UNREAD = ("audio_invert_tower.*", "continuous_audio_tower.audio_bos_eos_token.*", "*.positional_embedding")
