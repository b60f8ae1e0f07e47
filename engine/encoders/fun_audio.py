"""FunAudioChat's tower: Qwen2.5-Omni's encoder, five rows of which become one; five rows for the decoder per second.

Thread: device. The model adds to each row a vector computed from five codes of a speech tokenizer. If the answer is
text, the published code uses the code for nothing throughout, so the same vector is added to all rows.

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
    """The configuration of the encoder, and of the groups after it."""

    group: int  # encoder rows per output row
    codes: int  # number of codes of the speech tokenizer
    nothing: int  # the code for nothing


def read_audio(section: Section) -> FunAudioConfig:
    """The tower's configuration, checked."""
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
        """Each item has input_features [num_mel_bins, frames] and num_rows, its output rows -> [num_rows,
        output_dim]."""
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
    """Weight rows of a tower at the model's attribute `audio`."""
    names = {"embed_tokens": "codes", "output_matching": "of_codes", "continual_output_matching": "of_sound"}
    return (
        *qwen_omni_audio.rows("audio", "continuous_audio_tower"),
        *(Row((f"audio_tower.{name}",), f"audio.{part}") for name, part in names.items()),
    )


# The speech generator's tensors, and unused tensors of the encoder.
UNREAD = ("audio_invert_tower.*", "continuous_audio_tower.audio_bos_eos_token.*", "*.positional_embedding")
