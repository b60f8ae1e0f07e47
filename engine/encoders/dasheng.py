"""The audio tower of MiDashengLM (Dasheng): decibels of mel bins -> rows for the decoder.

Thread: device. A patch is four frames of all bins; a batch norm scales each bin. Patches attend only to patches of the
same ten seconds, and learned positions restart every ten seconds. After the layers, five neighbouring patches are
concatenated and pass two linear layers; a remainder of fewer than five is dropped.

    mel [4 T] -> norm -> patches [T] -> layers, ten seconds at a time -> norm -> 5 side by side [T / 5] -> two products

If the audio does not end at a patch boundary, the last patch ("late") reaches beyond the end. A late patch is computed
if a row needs it; it attends to the other patches, and no other patch attends to it. Names and formulas follow
modeling_midashenglm.py in https://huggingface.co/mispeech/midashenglm-7b, which is not executed, and
https://github.com/vllm-project/vllm/pull/23652.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from engine.base.errors import ConfigError, RequestError
from engine.base.request import Modality
from engine.checkpoint.section import MAX_LAYERS, Section
from engine.checkpoint.text import complete
from engine.encoders.granite_speech import BatchNorm
from engine.encoders.tower import Features, LayeredTower, Pieces, Shapes, apart, bounds_of, joined, layer_by_layer
from engine.kernels.activation import gelu
from engine.kernels.attention.dense import dense_attention
from engine.layers.bare import Bare
from engine.layers.linear import Linear
from engine.layers.norm import LayerNorm
from engine.weights.table import Row

EPS = 1e-6
FRAMES = 4  # frames of a patch; the published code supports only 4
Late = tuple[int, int, int]  # a late patch: its row, the first row and the end of the rows that it attends to


@dataclass(frozen=True, slots=True)
class DashengConfig:
    """The tower's numbers."""

    modalities: ClassVar[tuple[Modality, ...]] = ("audio",)
    row_parts: ClassVar[int] = 1

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_mel_bins: int
    chunk: int  # patches that attend to each other
    stack: int  # patches per output row
    qkv_bias: bool
    row_width: int


def read_audio(section: Section) -> DashengConfig:
    """The tower's configuration, checked; missing keys have the defaults of the published class."""
    hidden, heads, mels = section.size("embed_dim", 768), section.size("num_heads", 12), section.size("n_mels", 64)
    needed = [mels, FRAMES]
    for key in ("patch_size", "patch_stride"):
        if section.values.get(key) != needed:
            raise ConfigError(
                f"{section.path}: {key}={section.values.get(key)!r}; this tower is supported with {needed}"
            )
    for key, usual in (("input_channels", 1), ("init_values", None)):
        if section.values.get(key, usual) not in (usual, None):
            raise ConfigError(
                f"{section.path}: {key}={section.values[key]!r}; this tower is supported with {str(usual).lower()}"
            )
    if hidden % heads:
        raise ConfigError(f"{section.path}: embed_dim={hidden} must be a multiple of num_heads={heads}")
    outer = section.outer
    assert outer is not None, "a tower's section lies in another one"
    return DashengConfig(
        num_layers=section.integer("depth", 12, least=1, most=MAX_LAYERS),
        hidden_size=hidden,
        intermediate_size=int(hidden * section.number("mlp_ratio", 4.0)),
        num_heads=heads,
        num_mel_bins=mels,
        chunk=section.integer("target_length", 1012, least=FRAMES) // FRAMES,
        stack=outer.size("subsample_factor", 5),
        qkv_bias=section.boolean("qkv_bias", True),
        row_width=complete(outer.section("text_config")).size("hidden_size"),
    )


LAYER, TARGET = "audio_encoder.blocks.*.", "audio.layers.*."
ROWS = (
    Row(("audio_encoder.init_bn",), "audio.scaling"),
    Row(("audio_encoder.patch_embed.proj",), "audio.patch_embed"),
    Row(("audio_encoder",), "audio.times"),
    Row(("audio_encoder",), "audio.bins"),
    Row((LAYER + "norm1",), TARGET + "norm1"),
    Row((LAYER + "attn.qkv",), TARGET + "qkv"),
    Row((LAYER + "attn.proj",), TARGET + "out"),
    Row((LAYER + "norm2",), TARGET + "norm2"),
    Row((LAYER + "mlp.fc1",), TARGET + "up"),
    Row((LAYER + "mlp.fc2",), TARGET + "down"),
    Row(("audio_encoder.norm",), "audio.norm"),
    Row(("audio_projector.net.0",), "audio.project"),
    Row(("audio_projector.net.2",), "audio.project_out"),
)
UNREAD = ("audio_encoder.front_end.*", "audio_encoder.init_bn.num_batches_tracked")


class DashengLayer:
    """x += attention(norm(x)); x += mlp(norm(x))."""

    def __init__(self, config: DashengConfig) -> None:
        size, inner = config.hidden_size, config.intermediate_size
        self.num_heads = config.num_heads
        self.head_dim = size // config.num_heads
        self.norm1 = LayerNorm(size, EPS)
        self.norm2 = LayerNorm(size, EPS)
        self.qkv = Linear(size, 3 * size, bias=config.qkv_bias)
        self.out = Linear(size, size, bias=True)
        self.up = Linear(size, inner, bias=True)
        self.down = Linear(inner, size, bias=True)

    def __call__(self, x: Tensor, bounds: Tensor, late: Sequence[Late]) -> None:
        """Adds to x [patches, hidden]; `bounds`: where chunks begin; each late patch is a chunk of its own."""
        q, k, v = self.qkv(self.norm1(x)).view(len(x), 3, self.num_heads, self.head_dim).unbind(1)
        attended = dense_attention(q, k, v, bounds, self.head_dim**-0.5)
        for row, first, end in late:
            query, keys, values = (
                each.transpose(0, 1) for each in (q[row : row + 1], k[first:end], v[first:end])
            )  # [heads, patches, head_dim]
            attended[row] = functional.scaled_dot_product_attention(query, keys, values).reshape(-1)
        self.out.add_to(x, attended)
        self.down.add_to(x, gelu(self.up(self.norm2(x))))


class DashengTower(LayeredTower):
    """Mel frames of a sound -> rows of the decoder's width."""

    config: DashengConfig

    def __init__(self, config: DashengConfig, dtype: torch.dtype, device: str) -> None:
        super().__init__(config, dtype, device)
        size, kernel = config.hidden_size, (1, config.num_mel_bins, FRAMES)
        self.scaling = BatchNorm(config.num_mel_bins)
        self.patch_embed = Linear(torch.Size(kernel).numel(), size, bias=True, fold=kernel)
        self.times = Bare("time_pos_embed", 1, size, 1, config.chunk)
        self.bins = Bare("freq_pos_embed", 1, size, 1, 1)
        self.layers = [DashengLayer(config) for _ in range(config.num_layers)]
        self.norm = LayerNorm(size, EPS)
        self.project = Linear(config.stack * size, config.row_width, bias=True)
        self.project_out = Linear(config.row_width, config.row_width, bias=True)

    def weight(self, features: Shapes) -> int:
        return features["input_features"].shape[1] // FRAMES

    def example(self, modality: Modality, rows: int) -> Features:
        """Silence."""
        patches = rows * self.config.stack
        mel = torch.zeros(self.config.num_mel_bins, patches * FRAMES, device=self.device)
        return {"input_features": mel, "num_patches": torch.tensor(patches)}

    def pieces(self, items: Sequence[Features]) -> Pieces:
        """Each item has `input_features` [bins, frames], float32, and `num_patches`, the patches that end inside the
        audio."""
        stack, chunk = self.config.stack, self.config.chunk
        counts = [self._count(features) for features in items]  # (computed patches, patches that end inside the audio)
        x = joined([self._begun(features, count) for features, (count, _) in zip(items, counts)])
        lengths: list[int] = []
        late: list[Late] = []
        for count, inside in counts:
            first = sum(lengths)
            lengths += [min(chunk, inside - begun) for begun in range(0, inside, chunk)]
            if count > inside:
                late += [(first + inside, first + inside // chunk * chunk, first + inside)] if inside % chunk else []
                lengths.append(1)
        yield from layer_by_layer(self.layers, x, bounds_of(lengths, x.device), late)
        x = self.norm(x)
        starts = accumulate((count for count, _ in counts), initial=0)
        rows = [count // stack for count, _ in counts]
        rows_kept = joined([x[start : start + each * stack] for start, each in zip(starts, rows)])
        made = self.project_out(gelu(self.project(rows_kept.view(sum(rows), -1))))
        return apart(made, rows)

    def _count(self, features: Features) -> tuple[int, int]:
        """The number of computed patches, and how many of them end inside the audio."""
        mel, inside = features["input_features"], int(features["num_patches"])
        patches, stack = mel.shape[-1] // FRAMES, self.config.stack
        fits = mel.dim() == 2 and len(mel) == self.config.num_mel_bins and not mel.shape[-1] % FRAMES
        if not fits or patches < stack or not patches - 1 <= inside <= patches:
            raise RequestError(
                f"input_features {list(mel.shape)} with num_patches={inside}: {self.config.num_mel_bins} bins of "
                f"patches of {FRAMES} frames are needed, at least {stack} of them, all or all but one inside the sound"
            )
        return (inside if patches % stack else patches), inside

    def _begun(self, features: Features, count: int) -> Tensor:
        """The first `count` patches before the first layer, [count, hidden]."""
        mel = features["input_features"].to(self.device, torch.float32)[:, : count * FRAMES]
        scaled = self.scaling(mel.T).T.to(self.dtype)
        x = self.patch_embed(scaled.reshape(len(mel), count, FRAMES).transpose(0, 1).reshape(count, -1))
        times = self.times.value.view(x.shape[1], -1).T
        places = torch.arange(count, device=x.device) % self.config.chunk
        return x + times[places] + self.bins.value.view(-1)
