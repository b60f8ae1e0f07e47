"""Voxtral Realtime's tower: a causal encoder of log-mel frames; eight frames become one row, for 80 ms of audio.

Thread: device. No row depends on later audio: the convolutions are padded only at the beginning, and a row attends to
a window of rows up to itself. Items of several requests run together, each as a separate segment. The computation
follows transformers' voxtral_realtime (VoxtralRealtimeEncoder, VoxtralRealtimeMultiModalProjector).

    mel [8 n] -> conv, conv/2 [4 n] -> layers, rotated -> norm -> 4 side by side [n] -> product, act, product
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from engine.base.errors import ConfigError, RequestError
from engine.base.model_config import RopeConfig
from engine.base.request import Modality
from engine.checkpoint.rope import FULL, RopeDefaults, read_rope
from engine.checkpoint.section import MAX_LAYERS, Section
from engine.checkpoint.text import complete
from engine.encoders.sound import KERNEL
from engine.encoders.tower import Features, LayeredTower, Pieces, Shapes, apart, bounds_of, joined, layer_by_layer
from engine.kernels.activation import BY_NAME, Activation, gelu, pointwise
from engine.kernels.attention.dense import dense_attention
from engine.kernels.rotate import apply_rope
from engine.layers.linear import GatedLinear, Linear
from engine.layers.norm import RMSNorm
from engine.layers.rope import Rope, RopeTable
from engine.weights.table import Row

CONVOLVED = 2  # frames per row of the encoder
# Defaults of transformers' class, which files may leave out.
UNSAID = {
    "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_mel_bins": 128, "sliding_window": 750, "head_dim": 64, "hidden_act": "silu", "rms_norm_eps": 1e-5,
}  # fmt: skip
LAYER = "audio_tower.layers.*."
ATTENTION = LAYER + "self_attn."
ROWS = (
    Row(("audio_tower.embedder.conv1",), "audio.conv1"),
    Row(("audio_tower.embedder.conv2",), "audio.conv2"),
    Row(("audio_tower.norm",), "audio.norm"),
    Row((LAYER + "self_attn_layer_norm",), "audio.layers.*.attention_norm"),
    Row((ATTENTION + "q_proj", ATTENTION + "k_proj", ATTENTION + "v_proj"), "audio.layers.*.qkv"),
    Row((ATTENTION + "o_proj",), "audio.layers.*.out"),
    Row((LAYER + "final_layer_norm",), "audio.layers.*.mlp_norm"),
    Row((LAYER + "mlp.gate_proj", LAYER + "mlp.up_proj"), "audio.layers.*.gate_up"),
    Row((LAYER + "mlp.down_proj",), "audio.layers.*.down"),
    Row(("multi_modal_projector.linear_1",), "audio.proj1"),
    Row(("multi_modal_projector.linear_2",), "audio.proj2"),
)


@dataclass(frozen=True, slots=True)
class CausalAudioConfig:
    """The configuration of the encoder, and of the projector after it."""

    modalities: ClassVar[tuple[Modality, ...]] = ("audio",)
    row_parts: ClassVar[int] = 1

    num_mel_bins: int
    num_layers: int
    num_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    window: int  # encoder rows that a row sees, including itself
    eps: float
    rope: RopeConfig
    activation: Activation  # the MLP's activation
    stack: int  # encoder rows per output row
    output_dim: int  # width of the decoder
    projector_activation: Activation

    @property
    def row_width(self) -> int:
        return self.output_dim


def read_audio(section: Section) -> CausalAudioConfig:
    """The tower's numbers, checked."""
    section, outer = Section({**UNSAID, **section.values}, section.path, section.outer), section.outer
    assert outer is not None, "a tower's section lies in another one"
    acts = str(section.values["hidden_act"]), str(outer.values.get("projector_hidden_act") or "gelu")
    if not set(acts) <= set(BY_NAME):
        raise ConfigError(
            f"{section.path}: hidden_act={acts[0]!r}, projector_hidden_act={acts[1]!r}; supported are "
            f"{', '.join(BY_NAME)}"
        )
    stack, frames = outer.size("downsample_factor", 4), outer.size("audio_length_per_tok", 8)
    if frames != CONVOLVED * stack:
        raise ConfigError(
            f"{outer.path}: audio_length_per_tok={frames} must be {CONVOLVED} * downsample_factor={stack}, as "
            "the encoder halves the frames"
        )
    heads = section.size("num_attention_heads")
    if section.size("num_key_value_heads", heads) != heads:
        raise ConfigError(f"{section.path}: num_key_value_heads must be num_attention_heads={heads}")
    head_dim = section.size("head_dim")
    return CausalAudioConfig(
        num_mel_bins=section.size("num_mel_bins"),
        num_layers=section.integer("num_hidden_layers", least=1, most=MAX_LAYERS),
        num_heads=heads,
        head_dim=head_dim,
        hidden_size=section.size("hidden_size"),
        intermediate_size=section.size("intermediate_size"),
        window=section.size("sliding_window"),
        eps=section.number("rms_norm_eps"),
        rope=read_rope(section, FULL, head_dim, RopeDefaults(10_000.0)),
        activation=BY_NAME[acts[0]],
        stack=stack,
        output_dim=complete(outer.section("text_config")).size("hidden_size"),
        projector_activation=BY_NAME[acts[1]],
    )


class CausalAudioLayer:
    """Causal attention in a window, and a gated MLP; keys have no bias."""

    __slots__ = ("attention_norm", "down", "gate_up", "head_dim", "mlp_norm", "num_heads", "out", "qkv", "window")

    def __init__(self, config: CausalAudioConfig) -> None:
        size, self.num_heads, self.head_dim = config.hidden_size, config.num_heads, config.head_dim
        width, self.window = self.num_heads * self.head_dim, config.window
        self.attention_norm, self.mlp_norm = RMSNorm(size, config.eps), RMSNorm(size, config.eps)
        self.qkv = Linear(size, width, width, width, bias=(True, False, True))
        self.out = Linear(width, size, bias=True)
        self.gate_up = GatedLinear(size, config.intermediate_size, False, config.activation)
        self.down = Linear(config.intermediate_size, size, bias=True)

    def __call__(self, x: Tensor, bounds: Tensor, rope: Rope) -> None:
        """Adds to x [rows, hidden], segment after segment."""
        heads = self.qkv(self.attention_norm(x)).view(len(x), 3 * self.num_heads, self.head_dim)
        turned = apply_rope(heads[:, : 2 * self.num_heads], rope.cos, rope.sin)
        q, k, v = turned[:, : self.num_heads], turned[:, self.num_heads :], heads[:, 2 * self.num_heads :]
        attended = dense_attention(q, k, v, bounds, self.head_dim**-0.5, causal=True, window=self.window)
        self.out.add_to(x, attended)
        self.down.add_to(x, self.gate_up(self.mlp_norm(x)))


class CausalAudioTower(LayeredTower):
    """`input_features` [num_mel_bins, frames] of each item -> a row of the decoder's width for each 80 ms."""

    config: CausalAudioConfig

    def __init__(self, config: CausalAudioConfig, dtype: torch.dtype, device: str) -> None:
        super().__init__(config, dtype, device)
        size, mels = config.hidden_size, config.num_mel_bins
        self.conv1 = Linear(mels * KERNEL, size, bias=True, fold=(mels, KERNEL))
        self.conv2 = Linear(size * KERNEL, size, bias=True, fold=(size, KERNEL))
        self.layers = [CausalAudioLayer(config) for _ in range(config.num_layers)]
        self.norm = RMSNorm(size, config.eps)
        self.proj1 = Linear(config.stack * size, config.output_dim)
        self.proj2 = Linear(config.output_dim, config.output_dim)
        self._rope = RopeTable(config.rope, device, 1)

    def weight(self, features: Shapes) -> int:
        return int(features["input_features"].shape[-1]) // CONVOLVED

    def pieces(self, items: Sequence[Features]) -> Pieces:
        begun = [self._begun(features["input_features"]) for features in items]
        lengths = [len(x) for x in begun]
        x = joined(begun)
        positions = joined([torch.arange(length, device=x.device) for length in lengths])
        yield from layer_by_layer(self.layers, x, bounds_of(lengths, x.device), self._rope(positions))
        stacked = self.norm(x).view(len(x) // self.config.stack, -1)
        rows = self.proj2(pointwise(self.proj1(stacked), self.config.projector_activation))
        return apart(rows, [length // self.config.stack for length in lengths])

    def _begun(self, mel: Tensor) -> Tensor:
        """The rows of an item before the first layer, [frames / 2, hidden]."""
        mels, each = self.config.num_mel_bins, CONVOLVED * self.config.stack
        if mel.dim() != 2 or len(mel) != mels or mel.shape[1] < each or mel.shape[1] % each:
            raise RequestError(f"input_features {list(mel.shape)}: {mels} mel bins and {each} frames a row are needed")
        frames = mel.to(self.device, self.dtype).T
        return gelu(self.conv2(unroll(gelu(self.conv1(unroll(frames, 1))), CONVOLVED)))

    def example(self, modality: Modality, rows: int) -> Features:
        shape = (self.config.num_mel_bins, CONVOLVED * self.config.stack * rows)
        return {"input_features": torch.zeros(shape, device=self.device, dtype=self.dtype)}


def unroll(x: Tensor, stride: int) -> Tensor:
    """[length, channels] -> [length / stride, channels * KERNEL]; all padding zeros come before the audio."""
    windows = functional.pad(x, (0, 0, KERNEL - stride, 0)).unfold(0, KERNEL, stride)
    return windows.reshape(len(windows), -1)
