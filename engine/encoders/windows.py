"""Audio towers that split audio into windows: Voxtral's, GLM-ASR's and Audio Flamingo's.

Thread: device. Each window attends to itself only. After the encoder, neighbouring rows are concatenated and pass two
linear layers. Voxtral adds learned positions and outputs the rows of the silence after the audio. GLM-ASR rotates
queries and keys and drops the rows of silence. Audio Flamingo's encoder does not attend to the silence, and averages
neighbours.

    mel [windows, 3000] -> each: conv, conv/2 [1500] -> layers -> norm -> 4 side by side [375] -> product, act, product
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.base.errors import ConfigError, RequestError
from engine.base.request import Modality
from engine.checkpoint.section import Section
from engine.checkpoint.text import complete
from engine.encoders import sound, whisper
from engine.encoders.tower import Features
from engine.encoders.whisper import WhisperAudioConfig, WhisperTower, Window
from engine.kernels.activation import BY_NAME, Activation, pointwise
from engine.layers.linear import Linear
from engine.weights.table import Row

ENCODER_WORDS = {  # these families' keys -> Whisper's keys
    "hidden_size": "d_model",
    "num_hidden_layers": "encoder_layers",
    "num_attention_heads": "encoder_attention_heads",
    "intermediate_size": "encoder_ffn_dim",
}
# Defaults of transformers' class, which files may leave out.
UNSAID = {
    "hidden_size": 1280, "num_hidden_layers": 32, "num_attention_heads": 20, "intermediate_size": 5120,
    "num_mel_bins": 128,
}  # fmt: skip
PROJECTOR = (
    Row(("multi_modal_projector.linear_1",), "audio.proj1"),
    Row(("multi_modal_projector.linear_2",), "audio.proj2"),
)
VOXTRAL_ROWS = (*whisper.rows("audio", "audio_tower"), *PROJECTOR)
GLM_ASR_ROWS = (
    *sound.rows(
        "audio", "audio_tower",
        sound.LayerNames("input_layernorm", "self_attn.o_proj", "post_attention_layernorm", "mlp.fc1", "mlp.fc2"),
        conv1="conv1", conv2="conv2", norm="norm",
    ),
    *PROJECTOR,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class WindowsConfig(WhisperAudioConfig):
    """The configuration of the encoder, and of the projector after it."""

    output_dim: int  # width of the decoder
    stack: int  # encoder rows per output row
    projector_width: int
    projector_bias: bool
    activation: Activation
    rotary_dim: int = 0  # leading dimensions of a head that are rotated; 0: positions are learned
    rope_theta: float = 10_000.0

    @property
    def row_width(self) -> int:
        return self.output_dim

    @property
    def window_rows(self) -> int:
        """Rows of a whole window."""
        return self.num_positions // self.stack


def read_voxtral(section: Section) -> WindowsConfig:
    """Voxtral's tower."""
    return _read(section, projector_bias=False)


def read_glm_asr(section: Section) -> WindowsConfig:
    """GLM-ASR's tower; half of each head is rotated."""
    values = section.values
    renamed = {"hidden_act": "activation_function", "max_position_embeddings": "max_source_positions"}
    read = _read(section.renamed(renamed), projector_bias=True, wider=2)
    if values.get("num_key_value_heads") not in (None, read.num_heads):
        raise ConfigError(
            f"{section.path}: num_key_value_heads={values['num_key_value_heads']}; this tower is supported with as "
            f"many as num_attention_heads={read.num_heads}"
        )
    rope = section.section("rope_parameters") if values.get("rope_parameters") else section
    share = rope.number("partial_rotary_factor", 0.5)
    rotary_dim = int(read.hidden_size // read.num_heads * share)
    if rope.values.get("rope_type", "default") != "default" or not rotary_dim >= 2 or rotary_dim % 2:
        raise ConfigError(f"{rope.path}: supported is rope_type 'default' with an even number of rotated dimensions")
    return dataclasses.replace(read, rotary_dim=rotary_dim, rope_theta=rope.number("rope_theta", 10_000.0))


def read_flamingo(section: Section) -> WindowsConfig:
    """Audio Flamingo's tower."""
    assert section.outer is not None, "a tower's section lies in another one"
    return _read(section, projector_bias=section.outer.boolean("projector_bias", True), averaged=2)


def _read(section: Section, projector_bias: bool, wider: int = 1, averaged: int = 0) -> WindowsConfig:
    """`wider`: the projector's inner width as a multiple of the decoder's; `averaged`: rows averaged to one row; 0:
    rows are concatenated."""
    section = Section({**UNSAID, **section.values}, section.path, section.outer)
    encoder = whisper.read_audio(section.renamed(ENCODER_WORDS))
    outer = section.outer
    assert outer is not None, "a tower's section lies in another one"
    act = str(outer.values.get("projector_hidden_act") or "gelu")
    if act not in BY_NAME:
        raise ConfigError(f"{outer.path}: projector_hidden_act={act!r}; supported are {', '.join(BY_NAME)}")
    stack, rest = (averaged, 0) if averaged else divmod(encoder.intermediate_size, encoder.hidden_size)
    if rest or encoder.num_positions % stack:
        raise ConfigError(
            f"{section.path}: rows of hidden_size={encoder.hidden_size} cannot be laid side by side to "
            f"intermediate_size={encoder.intermediate_size} in windows of {encoder.num_positions} rows"
        )
    width = complete(outer.section("text_config")).size("hidden_size")
    given: dict[str, Any] = {field.name: getattr(encoder, field.name) for field in dataclasses.fields(encoder)}
    return WindowsConfig(
        **given, output_dim=width, stack=stack, projector_width=width * wider, projector_bias=projector_bias,
        activation=BY_NAME[act],
    )  # fmt: skip


class WindowsTower(WhisperTower):
    """Windows of mel frames -> rows of the decoder's width."""

    config: WindowsConfig

    def __init__(self, config: WindowsConfig, dtype: torch.dtype, device: str) -> None:
        super().__init__(config, dtype, device)
        self.stack = config.stack
        if config.rotary_dim:
            self.positions = None
            pairs = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32)
            rates = config.rope_theta ** (-pairs / config.rotary_dim)
            angles = torch.arange(config.num_positions, dtype=torch.float32)[:, None] * rates
            self.turn = angles.cos().to(device), angles.sin().to(device)
        bias = config.projector_bias
        self.proj1 = Linear(config.stack * config.hidden_size, config.projector_width, bias=bias)
        self.proj2 = Linear(config.projector_width, config.output_dim, bias=bias)

    def windows(self, features: Features) -> list[Window]:
        """num_rows: total output rows of all windows; the rows of silence at the end may be left out."""
        config, mels, left = self.config, features["input_features"], int(features["num_rows"])
        each = config.window_rows
        most = len(mels) * each
        if mels.dim() != 3 or not most - each < left <= most:
            raise RequestError(f"num_rows={left}: input_features {list(mels.shape)} have {each} rows a window")
        counts = [min(each, left - before) * self.stack for before in range(0, most, each)]
        return [self.window(mel, config.num_positions, rows) for mel, rows in zip(mels, counts)]

    def projected(self, x: Tensor) -> Tensor:
        rows = x if self.averaged else x.reshape(len(x) // self.stack, -1)
        return self.proj2(pointwise(self.proj1(rows), self.config.activation))

    def example(self, modality: Modality, rows: int) -> Features:
        count = max(1, rows // self.config.window_rows)
        window = super().example(modality, rows)["input_features"]
        most = torch.tensor(min(rows, count * self.config.window_rows))
        return {"input_features": window.expand(count, *window.shape), "num_rows": most}


class AveragedTower(WindowsTower):
    """A WindowsTower that computes rows of the audio only, without silence, and averages neighbours."""

    averaged = True

    def __init__(self, config: WindowsConfig, dtype: torch.dtype, device: str) -> None:
        super().__init__(config, dtype, device)
        self.proj1 = Linear(config.hidden_size, config.projector_width, bias=config.projector_bias)

    def windows(self, features: Features) -> list[Window]:
        """num_frames: how many frames of all windows begin inside the audio."""
        mels, left = features["input_features"], int(features["num_frames"])
        each = 2 * self.config.num_positions
        if mels.dim() != 3 or not (len(mels) - 1) * each + 3 <= left <= len(mels) * each:
            raise RequestError(
                f"num_frames={left}: input_features {list(mels.shape)} hold {each} frames a window, at least 3 of "
                "the last one inside the sound"
            )
        counts = [(min(each, left - before) + 1) // 2 for before in range(0, len(mels) * each, each)]
        return [self.window(mel, count, count // 2 * 2) for mel, count in zip(mels, counts)]

    def example(self, modality: Modality, rows: int) -> Features:
        made = super().example(modality, rows)
        return {"input_features": made["input_features"], "num_frames": 4 * made["num_rows"]}
