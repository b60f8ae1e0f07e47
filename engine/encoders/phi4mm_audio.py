"""Phi-4-multimodal's audio tower: log-mel frames -> rows of the decoder's width, one per eight frames, rounded up.

Thread: device. Three convolutions each halve time and frequency; the rows pass conformer layers in segments of 500
rows (forty seconds). Rows attend to the rows of their segment, with a learned bias per head and distance. As in the
published code, rows also attend to the zeros that pad the last segment of a longer audio. Segments of all items share
the matrix products.

    [T, 80] -> (x - mean) / std -> 3 times conv/2 -> product -> layers (feed, attend, convolve, feed) -> two products

A request that also has a picture uses the picture's adapter and a different pair of last linear layers.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from engine.base.errors import ConfigError, RequestError
from engine.base.request import ADAPTER, Modality
from engine.checkpoint.section import MAX_LAYERS, Section
from engine.encoders.qwen3_audio import halved, unroll
from engine.encoders.sound import EPS, KERNEL
from engine.encoders.tower import Features, LayeredTower, Pieces, Shapes, joined
from engine.kernels.activation import Activation, gelu, pointwise
from engine.layers.bare import Bare
from engine.layers.linear import Linear
from engine.layers.norm import LayerNorm
from engine.weights.table import Row

SEGMENT = 500  # rows
SHRINK = 8  # frames per row
# The only supported values, which are the released file's; also the defaults for missing keys.
ONLY: dict[str, Any] = {
    "input_layer": "nemo_conv", "time_reduction": SHRINK, "chunk_size": -1, "causal": True, "batch_norm": False,
    "activation": "swish", "conv_activation": "swish", "conv_glu_type": "swish", "bias_in_glu": True,
    "ext_pw_kernel_size": 1, "cnn_layer_norm": True, "nemo_activation": "relu", "downsample_rate": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Phi4AudioConfig:
    """The tower."""

    modalities: ClassVar[tuple[Modality, ...]] = ("audio",)
    row_parts: ClassVar[int] = 1

    num_mels: int
    channels: int  # channels of the convolutions over time and frequency
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    wide: int  # width between the linear layers of a layer's convolution
    multiplier: int  # output channels per input channel of the depthwise convolution
    deep: int  # width after the pointwise convolution
    kernel: int
    farthest: int  # larger distances are clamped to this distance
    output_dim: int

    @property
    def row_width(self) -> int:
        return self.output_dim


RENAMED = {  # transformers' key -> released key
    "hidden_size": "attention_dim",
    "intermediate_size": "linear_units",
    "num_attention_heads": "attention_heads",
    "depthwise_separable_out_channel": "depthwise_seperable_out_channel",
}


def read_transformers(section: Section) -> Phi4AudioConfig:
    """Reads transformers' audio_config."""
    values = dict(section.renamed(RENAMED).values)
    values["nemo_conv_settings"] = {"conv_channels": values.get("nemo_conv_channels")}
    values["relative_attention_bias_args"] = {
        "t5_bias_max_distance": section.size("bias_max_distance", 1000),
        "t5_bias_symmetric": values.get("bias_symmetric"),
    }
    return read_audio(Section({"config": values}, section.path, section.outer))


def read_audio(section: Section) -> Phi4AudioConfig:
    """The tower's numbers, checked; `section` is audio_processor."""
    outer = section.outer
    assert outer is not None, "a tower's section lies in another one"
    body = section.section("config")
    for key, needed in ONLY.items():
        given = body.values.get(key, needed)
        if given != needed:
            raise ConfigError(f"{body.path}: {key}={given!r}; this tower is supported with {needed!r}")
    bias = body.section("relative_attention_bias_args")
    if bias.values.get("type", "t5") != "t5" or bias.boolean("t5_bias_symmetric", False):
        raise ConfigError(f"{bias.path}: supported is the type 't5' (positions with a sign)")
    hidden = body.size("attention_dim", 1024)
    config = Phi4AudioConfig(
        num_mels=body.size("input_size", 80),
        channels=body.section("nemo_conv_settings").size("conv_channels", 1024),
        num_layers=body.integer("num_blocks", 24, least=1, most=MAX_LAYERS),
        hidden_size=hidden,
        intermediate_size=body.size("linear_units", 1536),
        num_heads=body.size("attention_heads", 16),
        wide=body.size("ext_pw_out_channel", 1024),
        multiplier=body.size("depthwise_multiplier", 1),
        deep=body.size("depthwise_seperable_out_channel", 1024),  # as released
        kernel=body.size("kernel_size", 3),
        farthest=bias.size("t5_bias_max_distance", 500),
        output_dim=outer.size("hidden_size"),
    )
    if hidden % config.num_heads or config.wide != hidden or config.deep != config.wide:
        raise ConfigError(
            f"{body.path}: attention_dim={hidden} must be a multiple of attention_heads={config.num_heads}, and equal "
            f"to ext_pw_out_channel={config.wide} and depthwise_seperable_out_channel={config.deep}"
        )
    return config


class Feed:
    """x += down(up * silu(gate)) / 2, with up and gate computed from norm(x)."""

    def __init__(self, size: int, width: int) -> None:
        self.norm = LayerNorm(size, EPS)
        self.up_gate = Linear(size, 2 * width, bias=True)  # the gate comes second, unlike in decoders
        self.down = Linear(width, size, bias=True)

    def __call__(self, x: Tensor) -> None:
        up, gate = self.up_gate(self.norm(x)).chunk(2, dim=-1)
        x.add_(self.down(up * functional.silu(gate)), alpha=0.5)


class Depthwise:
    """The weights of a depthwise convolution."""

    def __init__(self, channels: int, *kernel: int, multiplier: int = 1) -> None:
        self.weight = Bare("weight", channels * multiplier, 1, *kernel)
        self.bias = Bare("bias", channels * multiplier)
        self.groups = channels


class Phi4AudioLayer:
    """A conformer layer: half feed-forward, attention, convolution, half feed-forward, norm."""

    def __init__(self, config: Phi4AudioConfig) -> None:
        size = config.hidden_size
        self.config = config
        self.feed_in, self.feed_out = (Feed(size, config.intermediate_size) for _ in range(2))
        self.attention_norm = LayerNorm(size, EPS)
        self.qkv = Linear(size, size, size, size, bias=True)
        self.out = Linear(size, size, bias=True)
        self.conv_norm = LayerNorm(size, EPS)
        self.expand = Linear(size, 2 * config.wide, bias=True, fold=(size, 1))
        self.bias1, self.bias2 = Bare("b1", 1, config.wide, 1), Bare("b2", 1, config.wide, 1)
        self.depth = Depthwise(config.wide, config.kernel, multiplier=config.multiplier)
        deeper = config.wide * config.multiplier
        self.gather = Linear(deeper, config.deep, bias=True, fold=(deeper, 1))
        self.last = Linear(config.deep, size, bias=True, fold=(config.deep, 1))
        self.norm = LayerNorm(size, EPS)

    def __call__(self, x: Tensor, biases: Sequence[Tensor]) -> Tensor:
        """Changes x, the concatenated segments; biases [1, heads, rows, rows] are added to each segment's scores."""
        lengths = [bias.shape[-1] for bias in biases]
        self.feed_in(x)
        qkv = self.qkv(self.attention_norm(x)).split(lengths)
        self.out.add_to(x, joined([self._attended(own, bias) for own, bias in zip(qkv, biases)]))
        expand = self.expand(self.conv_norm(x)).split(lengths)
        self.last.add_to(x, joined([self._convolved(own) for own in expand]))
        self.feed_out(x)
        return self.norm(x)

    def _attended(self, qkv: Tensor, bias: Tensor) -> Tensor:
        heads = qkv.view(1, len(qkv), 3, self.config.num_heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = heads.unbind()
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return out[0].transpose(0, 1).reshape(len(qkv), -1)

    def _convolved(self, expand: Tensor) -> Tensor:
        """[rows, 2 * wide] -> [rows, deep]; causal."""
        value, gate = expand.chunk(2, dim=-1)
        gated = (value + self.bias1.value[0, :, 0]) * functional.silu(gate + self.bias2.value[0, :, 0])
        padded = functional.pad(gated.T, (self.config.kernel - 1, 0))[None]
        depth = self.depth
        deep = functional.conv1d(padded, depth.weight.value, depth.bias.value, groups=depth.groups)[0].T
        return pointwise(self.gather(deep.contiguous()), Activation.SILU)


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows `first` to `last` of an audio, padded with zeros to `length`."""

    frames: Tensor  # standardised frames of the whole audio
    first: int
    last: int
    length: int
    with_picture: bool  # the request also has a picture


class Phi4AudioTower(LayeredTower):
    """Mel frames of a sound -> rows of the decoder's width."""

    config: Phi4AudioConfig

    def __init__(self, config: Phi4AudioConfig, dtype: torch.dtype, device: str, pictures: int = 0) -> None:
        """`pictures`: the number of the adapter for requests with a picture; 0: there is none."""
        super().__init__(config, dtype, device)
        self.pictures = pictures
        size, channels = config.hidden_size, config.channels
        self.mean, self.inverse = Bare("global_mean", config.num_mels), Bare("global_invstd", config.num_mels)
        self.conv = Linear(KERNEL**2, channels, bias=True, fold=(1, KERNEL, KERNEL))
        self.depths = [Depthwise(channels, KERNEL, KERNEL) for _ in range(2)]
        self.points = [Linear(channels, channels, bias=True, fold=(channels, 1, 1)) for _ in range(2)]
        self.conv_out = Linear(channels * halved(config.num_mels), size, bias=True)
        self.distances = Bare("weight", 2 * config.farthest, config.num_heads)
        self.layers = [Phi4AudioLayer(config) for _ in range(config.num_layers)]
        self.proj1 = Linear(size, config.output_dim, bias=True)
        self.proj2 = Linear(config.output_dim, config.output_dim, bias=True)
        self.projector1 = Linear(size, config.output_dim, bias=True) if pictures else None
        self.projector2 = Linear(config.output_dim, config.output_dim, bias=True) if pictures else None

    def example(self, modality: Modality, rows: int) -> Features:
        """Silence."""
        shape = (rows * SHRINK, self.config.num_mels)
        return {"input_features": torch.zeros(shape, device=self.device, dtype=self.dtype)}

    def weight(self, features: Shapes) -> int:
        return -(-len(features["input_features"]) // SHRINK)

    def pieces(self, items: Sequence[Features]) -> Pieces:
        """Each item has input_features [frames, num_mels] -> [rows, output_dim]; runs as many segments at once as
        fit."""
        segments, counts = list[Segment](), []
        for features in items:
            own = self._segments(features)
            counts.append(len(own))
            segments += own
        rows, at_once = list[Tensor](), max(1, self.together // SEGMENT)
        for first in range(0, len(segments), at_once):
            rows += yield from self._rows_of(segments[first : first + at_once])
        lines = iter(rows)
        return [torch.cat([next(lines) for _ in range(count)]) for count in counts]

    def _segments(self, features: Features) -> list[Segment]:
        """The segments of one audio."""
        frames = features["input_features"]
        with_picture = bool(self.pictures) and ADAPTER in features and int(features[ADAPTER]) == self.pictures
        if frames.dim() != 2 or frames.shape[1] != self.config.num_mels or not len(frames):
            raise RequestError(
                f"input_features {list(frames.shape)}: at least 1 frame of {self.config.num_mels} mel bins is needed"
            )
        frames = (frames.to(self.device, self.dtype) - self.mean.value) * self.inverse.value
        total = -(-len(frames) // SHRINK)
        bounds = [(first, min(total, first + SEGMENT)) for first in range(0, total, SEGMENT)]
        return [Segment(frames, first, last, min(total, SEGMENT), with_picture) for first, last in bounds]

    def _rows_of(self, segments: Sequence[Segment]) -> Generator[float, None, Sequence[Tensor]]:
        """The rows of each segment."""
        begun = [self._convolved(each.frames, each.first, each.last) for each in segments]
        x = joined([functional.pad(own, (0, 0, 0, each.length - len(own))) for own, each in zip(begun, segments)])
        known = {length: self._bias(length) for length in {each.length for each in segments}}
        biases = [known[each.length] for each in segments]
        for layer in self.layers:
            x = layer(x, biases)
            yield len(x) / len(self.layers)
        counts = [len(own) for own in begun]
        cut = [own[:count] for own, count in zip(x.split([each.length for each in segments]), counts)]
        if len({each.with_picture for each in segments}) == 1:
            return self._projected(joined(cut), segments[0].with_picture).split(counts)
        return [self._projected(own, each.with_picture) for own, each in zip(cut, segments)]

    def _projected(self, x: Tensor, with_picture: bool) -> Tensor:
        """Applies the projector; audio in a request with a picture has a separate projector."""
        if with_picture and self.projector1 is not None and self.projector2 is not None:
            return self.projector2(gelu(self.projector1(x)))
        return self.proj2(gelu(self.proj1(x)))

    def _convolved(self, frames: Tensor, first: int, last: int) -> Tensor:
        """Rows from `first` to `last`; the row before `first` is computed too, so the convolutions see no cut."""
        before = min(first, 1)
        x = frames[SHRINK * (first - before) : SHRINK * last][None, :, :, None]  # [1, frames, mels, 1]
        x = pointwise(self.conv(unroll(x)), Activation.RELU)
        for depth, point in zip(self.depths, self.points):
            x = x.permute(0, 3, 1, 2)
            x = functional.conv2d(x, depth.weight.value, depth.bias.value, stride=2, padding=1, groups=depth.groups)
            x = pointwise(point(x.permute(0, 2, 3, 1).contiguous()), Activation.RELU)
        return self.conv_out(x[0].transpose(1, 2).flatten(1))[before:]

    def _bias(self, rows: int) -> Tensor:
        """The bias of the scores, [1, heads, rows, rows]."""
        most, place = self.config.farthest, torch.arange(rows, device=self.device)
        far = (place - place[:, None]).clamp(-most, most - 1) + most
        return self.distances.value[far].permute(2, 0, 1)[None]


def rows() -> tuple[Row, ...]:
    """Weight rows, in the released layout, of a tower at the model's attribute `audio`."""
    outside = "embed_tokens_extend.audio_embed."
    encoder = outside + "encoder."
    layer, target = encoder + "encoders.*.", "audio.layers.*."
    attention = layer + "self_attn.linear_"
    feeds = [
        Row((f"{layer}feed_forward_{side}.{name}",), f"{target}feed_{side}.{part}")
        for side in ("in", "out")
        for name, part in (("layer_norm", "norm"), ("net.0.linear", "up_gate"), ("net.2", "down"))
    ]
    halves = [
        row
        for number, (depth, point) in enumerate(((2, 3), (5, 6)))
        for row in (
            Row((f"{encoder}embed.conv.{depth}",), f"audio.depths.{number}.weight"),
            Row((f"{encoder}embed.conv.{depth}",), f"audio.depths.{number}.bias"),
            Row((f"{encoder}embed.conv.{point}",), f"audio.points.{number}"),
        )
    ]
    return (
        Row((encoder + "encoder_embedding",), "audio.mean"),
        Row((encoder + "encoder_embedding",), "audio.inverse"),
        Row((encoder + "embed.conv.0",), "audio.conv"),
        *halves,
        Row((encoder + "embed.out",), "audio.conv_out"),
        Row((encoder + "relative_attention_bias_layer.bias_values",), "audio.distances"),
        *feeds,
        Row((layer + "layer_norm_att",), target + "attention_norm"),
        Row((attention + "q", attention + "k", attention + "v"), target + "qkv"),
        Row((attention + "out",), target + "out"),
        Row((layer + "conv.layer_norm",), target + "conv_norm"),
        Row((layer + "conv.glu.ext_pw_conv_1d",), target + "expand"),
        Row((layer + "conv.glu",), target + "bias1"),
        Row((layer + "conv.glu",), target + "bias2"),
        Row((layer + "conv.dw_sep_conv_1d.dw_conv",), target + "depth.weight"),
        Row((layer + "conv.dw_sep_conv_1d.dw_conv",), target + "depth.bias"),
        Row((layer + "conv.dw_sep_conv_1d.pw_conv",), target + "gather"),
        Row((layer + "conv.ext_pw_conv_1d",), target + "last"),
        Row((layer + "layer_norm",), target + "norm"),
        Row((outside + "audio_projection.speech.0",), "audio.proj1"),
        Row((outside + "audio_projection.speech.2",), "audio.proj2"),
        Row((outside + "audio_projection.vision.0",), "audio.projector1"),
        Row((outside + "audio_projection.vision.2",), "audio.projector2"),
    )
