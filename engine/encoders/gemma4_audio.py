"""The audio tower of Gemma 4: mel frames -> rows for the decoder, 25 per second.

Thread: device. In: input_features [frames, mels]. Out: ceil(frames / 4) rows. Two convolutions with stride 2 make the
rows, a causal conformer follows. A row attends to itself and to the rows before it, `span` rows in all, and
each distance has a learned vector. Inputs and outputs of linear layers are clamped to bounds in the checkpoint.
Items of several requests run together, each padded to whole spans. The tower runs eagerly.

    [frames, mels] -> 2 convolutions -> layers (feed, attend, convolve, feed) -> product -> norm -> product
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from engine.base.errors import ConfigError, RequestError
from engine.base.request import Modality
from engine.checkpoint.section import MAX_LAYERS, Section
from engine.encoders.gemma4 import Clipped, bounded
from engine.encoders.tower import Features, LayeredTower, Pieces, Shapes, joined
from engine.kernels.activation import BY_NAME, pointwise
from engine.kernels.norm import rms_norm
from engine.layers.bare import Bare
from engine.layers.linear import Linear
from engine.layers.norm import LayerNorm, RMSNorm
from engine.weights.table import Row

EPS = 1e-6  # epsilon of the norms for which config.json has no value
FRAMES = 4  # frames per row
LONGEST = 10_000.0  # longest timescale of the sinusoids of distances


@dataclass(frozen=True, slots=True)
class Gemma4AudioConfig:
    """The tower's numbers."""

    modalities: ClassVar[tuple[Modality, ...]] = ("audio",)
    row_parts: ClassVar[int] = 1

    num_layers: int
    hidden_size: int
    num_heads: int
    channels: tuple[int, int]  # output channels of the two strided convolutions
    kernel: int  # rows that a layer's convolution reads
    span: int  # rows that a row sees, including itself
    softcap: float
    activation: str
    share: float  # factor of a feed-forward's output before it is added
    most: float  # rows are clamped to +-most
    eps: float
    clipped: bool
    out_size: int
    row_width: int

    @property
    def mels(self) -> int:
        return self.channels[0]  # as trained: as many channels as mels

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


def read_audio(section: Section) -> Gemma4AudioConfig:
    """The tower's numbers, checked."""
    assert section.outer is not None, "a tower's section lies in another one"
    act = str(section.values.get("hidden_act") or "silu")
    if act not in BY_NAME:
        raise ConfigError(f"{section.path}: hidden_act={act!r}; supported are {', '.join(BY_NAME)}")
    span, past = section.size("attention_chunk_size", 12), section.integer("attention_context_left", 13)
    ahead = section.integer("attention_context_right", 0)
    if past != span + 1 or ahead:
        raise ConfigError(
            f"{section.path}: attention_context_left={past} and attention_context_right={ahead}; supported are "
            f"attention_chunk_size + 1 ({span + 1}) and 0"
        )
    hidden, heads = section.size("hidden_size", 1024), section.size("num_attention_heads", 8)
    channels = section.items("subsampling_conv_channels", (128, 32))
    whole = len(channels) == 2 and all(isinstance(count, int) and count > 0 for count in channels)
    if hidden % heads or not whole or channels[0] % FRAMES:
        raise ConfigError(
            f"{section.path}: hidden_size={hidden} must be a multiple of num_attention_heads={heads}, and "
            f"subsampling_conv_channels={list(channels)} two numbers, the first a multiple of {FRAMES}"
        )
    return Gemma4AudioConfig(
        num_layers=section.integer("num_hidden_layers", 12, least=1, most=MAX_LAYERS),
        hidden_size=hidden,
        num_heads=heads,
        channels=(int(channels[0]), int(channels[1])),
        kernel=section.size("conv_kernel_size", 5),
        span=span,
        softcap=section.number("attention_logit_cap", 50.0),
        activation=act,
        share=section.number("residual_weight", 0.5),
        most=section.number("gradient_clipping", 1e10),
        eps=section.number("rms_norm_eps", 1e-6),
        clipped=section.boolean("use_clipped_linears", True),
        out_size=section.size("output_proj_dims", 1536),
        row_width=section.outer.section("text_config").size("hidden_size"),
    )


class Feed:
    """x += share * norm(down(act(up(norm(x))))), with clamped values."""

    def __init__(self, config: Gemma4AudioConfig, most: float) -> None:
        size = config.hidden_size
        self.share, self.most, self.activation = config.share, most, BY_NAME[config.activation]
        self.norm, self.behind = RMSNorm(size, EPS), RMSNorm(size, EPS)
        self.up = Clipped(config.clipped, size, 4 * size)
        self.down = Clipped(config.clipped, 4 * size, size)

    def __call__(self, x: Tensor) -> None:
        made = self.down(pointwise(self.up(self.norm(x.clamp(-self.most, self.most))), self.activation))
        x.add_(self.behind(made.clamp_(-self.most, self.most)), alpha=self.share)


@dataclass(frozen=True, slots=True)
class Spans:
    """Tables that all layers of a run share."""

    lengths: list[int]  # padded rows of each item, a multiple of span
    distances: Tensor  # [span, hidden]: embedding of the distances 0, 1, ... between a row and the rows it sees
    of: Tensor  # int64 [span, 2 * span]: distances from a span's rows to the rows of the previous span and its own
    hidden: Tensor  # bool [spans, 1, span, 2 * span]: True where a row does not see the other row


class Attention:
    """Scores are softcap(q . (k + vector of the distance)), in float32."""

    def __init__(self, config: Gemma4AudioConfig) -> None:
        size, head_dim = config.hidden_size, config.head_dim
        self.config = config
        self.q, self.k, self.v, self.out = (Clipped(config.clipped, size, size) for _ in range(4))
        self.far = Linear(size, size)
        self.scale = Bare("per_dim_scale", head_dim)
        self.q_scale, self.k_scale = head_dim**-0.5 / math.log(2), math.log(1 + math.e) / math.log(2)

    def __call__(self, x: Tensor, spans: Spans) -> Tensor:
        """x [rows, hidden] -> the same shape."""
        span, heads, head_dim = self.config.span, self.config.num_heads, self.config.head_dim
        q, k, v = (part(x).float().view(-1, span, heads, head_dim).transpose(1, 2) for part in (self.q, self.k, self.v))
        q = q * (self.q_scale * functional.softplus(self.scale.value.float()))  # [spans, heads, span, head_dim]
        k, v = (_with_before(part) for part in (k * self.k_scale, v))  # [spans, heads, 2 * span, head_dim]
        far = self.far(spans.distances).float().view(span, heads, head_dim).permute(1, 2, 0)
        of = spans.of.expand(len(q), heads, -1, -1)
        scores = (q @ k.transpose(2, 3)).add_((q @ far).gather(-1, of))
        scores = scores.div_(self.config.softcap).tanh_().mul_(self.config.softcap).masked_fill_(spans.hidden, -1e9)
        attended = torch.softmax(scores, -1) @ v
        return self.out(attended.transpose(1, 2).reshape(len(x), -1).to(x.dtype))


def _with_before(parts: Tensor) -> Tensor:
    """[spans, heads, span, head_dim] -> [spans, heads, 2 * span, head_dim]: the previous span, then the span itself."""
    return torch.cat([functional.pad(parts[:-1], (0, 0, 0, 0, 0, 0, 1, 0)), parts], 2)


class Convolution:
    """x += end(act(norm(convolution(glu(start(norm(x)))))))."""

    def __init__(self, config: Gemma4AudioConfig, most: float) -> None:
        size = config.hidden_size
        self.most, self.activation, self.kernel = most, BY_NAME[config.activation], config.kernel
        self.norm, self.behind = RMSNorm(size, config.eps), RMSNorm(size, config.eps)
        self.start = Clipped(config.clipped, size, 2 * size)
        self.depth = Bare("weight", size, 1, config.kernel)
        self.end = Clipped(config.clipped, size, size)

    def __call__(self, x: Tensor, lengths: Sequence[int]) -> None:
        gated = functional.glu(self.start(self.norm(x)), -1)
        made = joined([self._convolved(part) for part in gated.split(list(lengths))])
        made = self.behind(made.clamp_(-self.most, self.most))
        x.add_(self.end(pointwise(made, self.activation)))

    def _convolved(self, rows: Tensor) -> Tensor:
        """A depthwise causal convolution."""
        padded = functional.pad(rows.T, (self.kernel - 1, 0))
        return functional.conv1d(padded[None], self.depth.value, groups=rows.shape[1])[0].T.contiguous()


class Gemma4AudioLayer:
    """A conformer layer: feed-forward, attention, convolution, feed-forward, norm."""

    def __init__(self, config: Gemma4AudioConfig, most: float) -> None:
        self.most = most
        self.feed1, self.feed2 = Feed(config, most), Feed(config, most)
        self.attention = Attention(config)
        self.convolution = Convolution(config, most)
        self.norm, self.behind, self.last = (RMSNorm(config.hidden_size, EPS) for _ in range(3))

    def __call__(self, x: Tensor, spans: Spans) -> Tensor:
        """Changes x [rows, hidden] in place and returns the normed result."""
        self.feed1(x)
        attended = self.attention(self.norm(x.clamp(-self.most, self.most)), spans)
        x += self.behind(attended.clamp_(-self.most, self.most))
        self.convolution(x, spans.lengths)
        self.feed2(x)
        return self.last(x.clamp_(-self.most, self.most))


class Halving:
    """A 3 x 3 convolution with stride 2, a norm over the channels, and a ReLU."""

    def __init__(self, inside: int, outside: int, eps: float) -> None:
        self.conv = Bare("weight", outside, inside, 3, 3)
        self.norm = LayerNorm(outside, eps, bias=False)

    def __call__(self, x: Tensor) -> Tensor:
        """[1, inside, frames, bins] -> [1, outside, half the frames, half the bins]."""
        x = functional.conv2d(x, self.conv.value, stride=2, padding=1).permute(0, 2, 3, 1).contiguous()
        return self.norm(x).relu_().permute(0, 3, 1, 2)


class Gemma4AudioTower(LayeredTower):
    """Mel frames -> rows of the decoder's width."""

    config: Gemma4AudioConfig

    def __init__(self, config: Gemma4AudioConfig, dtype: torch.dtype, device: str) -> None:
        super().__init__(config, dtype, device)
        first, second = config.channels
        self.halving1, self.halving2 = Halving(1, first, config.eps), Halving(first, second, config.eps)
        self.first = Linear(first // FRAMES * second, config.hidden_size)
        most = min(config.most, torch.finfo(dtype).max)
        self.layers = [Gemma4AudioLayer(config, most) for _ in range(config.num_layers)]
        self.last = Linear(config.hidden_size, config.out_size, bias=True)
        self.ones = torch.ones(config.out_size, device=device)  # weights of a norm without weights
        self.projection = Linear(config.out_size, config.row_width)
        self._distances = distances(config.span, config.hidden_size).to(device, dtype)
        row, seen = torch.arange(config.span, device=device), torch.arange(2 * config.span, device=device)
        self._away = row[:, None] + config.span - seen  # distance; below zero: the other row is later

    def weight(self, features: Shapes) -> int:
        """Rows."""
        return -(-len(features["input_features"]) // FRAMES)

    def example(self, modality: Modality, rows: int) -> Features:
        """Silence."""
        return {"input_features": torch.zeros(rows * FRAMES, self.config.mels, device=self.device, dtype=self.dtype)}

    def pieces(self, items: Sequence[Features]) -> Pieces:
        """Each item has `input_features` [frames, mels]."""
        span = self.config.span
        subsampled = [self._subsampled(features["input_features"]) for features in items]
        counts = [len(rows) for rows in subsampled]
        x = joined([functional.pad(rows, (0, 0, 0, -len(rows) % span)) for rows in subsampled])
        spans = self._spans([-(-count // span) * span for count in counts])
        for layer in self.layers:
            x = layer(x, spans)
            yield len(x) / len(self.layers)
        rows = self.projection(rms_norm(self.last(x), self.ones, self.config.eps))
        return [own[:count].clone() for own, count in zip(rows.split(spans.lengths), counts)]

    def _subsampled(self, frames: Tensor) -> Tensor:
        """[frames, mels] -> [rows, hidden]."""
        mels = self.config.mels
        if frames.dim() != 2 or frames.shape[1] != mels or not len(frames):
            raise RequestError(f"input_features {list(frames.shape)}: at least 1 frame of {mels} numbers is needed")
        x = self.halving2(self.halving1(frames.to(self.device, self.dtype)[None, None]))
        return self.first(x[0].permute(1, 2, 0).flatten(1).contiguous())

    def _spans(self, lengths: list[int]) -> Spans:
        span, away = self.config.span, self._away
        places = joined([torch.arange(length, device=away.device) for length in lengths]).view(-1, span, 1)
        hidden = (away < 0) | (away >= span) | (away > places)
        return Spans(lengths, self._distances, away.clamp(0, span - 1), hidden[:, None])


def distances(count: int, size: int) -> Tensor:
    """float32 [count, size]: sines and cosines of the distances 0 to count - 1."""
    half = size // 2
    steps = torch.exp(torch.arange(half) * (-math.log(LONGEST) / max(half - 1, 1)))
    angles = torch.arange(count)[:, None] * steps
    return torch.cat([angles.sin(), angles.cos()], -1)


LAYER, TARGET = "audio_tower.layers.*.", "audio.layers.*."
ROWS = (
    *(
        Row((f"audio_tower.subsample_conv_projection.layer{number}.{part}",), f"audio.halving{number + 1}.{part}")
        for number in (0, 1)
        for part in ("conv", "norm")
    ),
    Row(("audio_tower.subsample_conv_projection.input_proj_linear",), "audio.first"),
    *bounded(
        LAYER,
        TARGET,
        {
            **{f"attention.{name}": f"self_attn.{name}_proj" for name in ("q", "k", "v")},
            **{
                f"feed{n}.{part}": f"feed_forward{n}.ffw_layer_{k}"
                for n in (1, 2)
                for k, part in ((1, "up"), (2, "down"))
            },
            "attention.out": "self_attn.post",
            "convolution.start": "lconv1d.linear_start",
            "convolution.end": "lconv1d.linear_end",
        },
    ),
    *(
        Row((LAYER + module,), TARGET + part)
        for part, module in {
            **{f"feed{n}.norm": f"feed_forward{n}.pre_layer_norm" for n in (1, 2)},
            **{f"feed{n}.behind": f"feed_forward{n}.post_layer_norm" for n in (1, 2)},
            "attention.far": "self_attn.relative_k_proj",
            "attention.scale": "self_attn",
            "convolution.depth": "lconv1d.depthwise_conv1d",
            "convolution.norm": "lconv1d.pre_layer_norm",
            "convolution.behind": "lconv1d.conv_norm",
            "norm": "norm_pre_attn",
            "behind": "norm_post_attn",
            "last": "norm_out",
        }.items()
    ),
    Row(("audio_tower.output_proj",), "audio.last"),
    Row(("embed_audio.embedding_projection",), "audio.projection"),
)
