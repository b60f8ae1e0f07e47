"""Granite Speech's tower: a conformer over mel frames, and learned queries that summarise each window of its rows.

Thread: device. In: input_features [T, 160], pairs of concatenated mel frames of 80 bins. Out: 3 rows of the decoder's
width per 15 frames, rounded up (window_size and downsample_rate in config.json). Conformer rows attend to the rows of
the same context_size frames, with a learned vector per distance. After the middle layer, predicted letter probabilities
are projected and added to the rows. Items of several requests share the matrix products, not contexts or convolutions.

    [T, 160] -> product -> layers (feed, attend, convolve, feed) -> windows [15] <- queries [3] -> product
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from engine.base.errors import ConfigError, RequestError
from engine.base.request import Modality
from engine.checkpoint.section import MAX_LAYERS, Section
from engine.checkpoint.text import complete
from engine.encoders.queries import Queries, QueriesConfig
from engine.encoders.tower import Features, LayeredTower, Pieces, Shapes, apart, joined
from engine.kernels.activation import Activation, pointwise
from engine.kernels.gemm.pack import Placement
from engine.layers.bare import Bare
from engine.layers.linear import Linear
from engine.layers.norm import LayerNorm
from engine.weights.table import Row, Wanted

EPS = 1e-5
AT_ONCE = 32  # contexts per attention call: bounds the memory of the scores


@dataclass(frozen=True, slots=True)
class GraniteSpeechConfig:
    """The configuration of the conformer, and of the queries after it."""

    modalities: ClassVar[tuple[Modality, ...]] = ("audio",)
    row_parts: ClassVar[int] = 1

    input_dim: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    head_dim: int
    letters: int  # number of letters that the middle layer predicts
    context: int  # rows that attend to each other
    distances: int  # largest distance with a vector, in each direction
    channels: int  # channels of the convolution
    kernel: int
    window: int  # rows that one set of queries summarises
    queries: QueriesConfig

    @property
    def row_width(self) -> int:
        return self.queries.output_dim

    def num_rows(self, frames: int) -> int:
        """The output rows for `frames` frames."""
        return -(-frames // self.window) * self.queries.count


def read_audio(section: Section) -> GraniteSpeechConfig:
    """The tower's numbers, checked; `section` is encoder_config."""
    outer = section.outer
    assert outer is not None, "a tower's section lies in another one"
    hidden, heads = section.size("hidden_dim", 1024), section.size("num_heads", 8)
    window, rate = outer.size("window_size", 15), outer.size("downsample_rate", 5)
    config = GraniteSpeechConfig(
        input_dim=section.size("input_dim", 160),
        num_layers=section.integer("num_layers", 10, least=2, most=MAX_LAYERS),
        hidden_size=hidden,
        intermediate_size=hidden * section.size("feedforward_mult", 4),
        num_heads=heads,
        head_dim=section.size("dim_head", hidden // heads),
        letters=section.size("output_dim", 42),
        context=section.size("context_size", 200),
        distances=section.size("max_pos_emb", 512),
        channels=hidden * section.size("conv_expansion_factor", 2),
        kernel=section.size("conv_kernel_size", 15),
        window=window,
        queries=QueriesConfig.read(
            outer.section("projector_config"), window // rate, complete(outer.section("text_config"))
        ),
    )
    if config.context > config.distances:
        raise ConfigError(f"{section.path}: context_size={config.context} is above max_pos_emb={config.distances}")
    if config.queries.input_dim != hidden or not config.queries.count:
        raise ConfigError(
            f"{outer.path}: window_size={window} and downsample_rate={rate} must give a query at least, and the "
            f"projector's encoder_hidden_size={config.queries.input_dim} must be the encoder's hidden_dim={hidden}"
        )
    return config


class BatchNorm:
    """(x - mean) / std * weight + bias with the mean and std of training, computed as x * scale + shift per channel."""

    __slots__ = ("scale", "shift", "size")

    scale: Tensor  # [size] float32
    shift: Tensor  # [size] float32

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.shift, x, self.scale).to(x.dtype)

    def expects(self) -> dict[str, tuple[Wanted | None, ...]]:
        return {kind: (Wanted((self.size,)),) for kind in ("weight", "bias", "running_mean", "running_var")}

    def fill(self, pieces: dict[str, list[Tensor | None]], placement: Placement) -> None:
        kinds = ("weight", "bias", "running_mean", "running_var")
        given = [piece for kind in kinds for piece in pieces[kind] if piece is not None]
        weight, bias, mean, variance = (piece.to(placement.device, torch.float32) for piece in given)
        self.scale = weight * (variance.clamp(min=0) + EPS).rsqrt()
        self.shift = bias - mean * self.scale


class Feed:
    """x += down(silu(up(norm(x)))) / 2."""

    def __init__(self, size: int, width: int) -> None:
        self.norm = LayerNorm(size, EPS)
        self.up = Linear(size, width, bias=True)
        self.down = Linear(width, size, bias=True)

    def __call__(self, x: Tensor) -> None:
        x.add_(self.down(pointwise(self.up(self.norm(x)), Activation.SILU)), alpha=0.5)


class ConformerLayer:
    """A conformer layer: half feed-forward, attention, convolution, half feed-forward, norm."""

    def __init__(self, config: GraniteSpeechConfig) -> None:
        size, inner = config.hidden_size, config.num_heads * config.head_dim
        self.config = config
        self.feed1, self.feed2 = (Feed(size, config.intermediate_size) for _ in range(2))
        self.attention_norm = LayerNorm(size, EPS)
        self.qkv = Linear(size, inner, 2 * inner)
        self.far = Bare("weight", 2 * config.distances + 1, config.head_dim)  # a vector per distance
        self.out = Linear(inner, size, bias=True)
        self.conv_norm = LayerNorm(size, EPS)
        self.expand = Linear(size, 2 * config.channels, bias=True, fold=(size, 1))
        self.depth = Bare("weight", config.channels, 1, config.kernel)
        self.batch_norm = BatchNorm(config.channels)
        self.gather = Linear(config.channels, size, bias=True, fold=(config.channels, 1))
        self.norm = LayerNorm(size, EPS)

    def __call__(self, x: Tensor, far: Tensor, lengths: Sequence[int]) -> Tensor:
        """Changes x [sum of lengths, hidden]; far [context, context] int64: the table row of each distance."""
        self.feed1(x)
        vectors = self.far.value[far]
        qkv = self.qkv(self.attention_norm(x)).split(lengths)
        self.out.add_to(x, joined([self._attended(own, vectors) for own in qkv]))
        expand = self.expand(self.conv_norm(x)).split(lengths)
        self.gather.add_to(x, joined([self._convolved(own) for own in expand]))
        self.feed2(x)
        return self.norm(x)

    def _attended(self, qkv: Tensor, far: Tensor) -> Tensor:
        """qkv [T, 3 * inner], far [context, context, head_dim] -> [T, inner]."""
        context, parts = self.config.context, []
        whole = len(qkv) // context * context
        for first in range(0, whole, AT_ONCE * context):
            parts.append(self._of_contexts(qkv[first : min(whole, first + AT_ONCE * context)], context, far))
        if rest := len(qkv) - whole:
            parts.append(self._of_contexts(qkv[whole:], rest, far))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _of_contexts(self, qkv: Tensor, length: int, far: Tensor) -> Tensor:
        """Attention in contexts of `length` rows; a score is scale * (q . k + q . vector of the distance)."""
        config = self.config
        heads = qkv.view(-1, length, 3, config.num_heads, config.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = heads.unbind()  # [contexts, heads, length, head_dim]
        scale = config.head_dim**-0.5
        bias = torch.einsum("bhcd,crd->bhcr", q, far[:length, :length]) * scale
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
        return out.transpose(1, 2).reshape(len(qkv), -1)

    def _convolved(self, expand: Tensor) -> Tensor:
        """[T, 2 * channels] -> [T, channels]: gate, depthwise convolution, batch norm, activation."""
        kernel = self.config.kernel
        rows = functional.pad(functional.glu(expand, -1).T, (kernel // 2, kernel // 2 - (kernel + 1) % 2))
        rows = functional.conv1d(rows[None], self.depth.value, groups=self.config.channels)[0].T
        return pointwise(self.batch_norm(rows), Activation.SILU)


class GraniteSpeechTower(LayeredTower):
    """Mel frames of a sound -> rows of the decoder's width."""

    config: GraniteSpeechConfig

    def __init__(self, config: GraniteSpeechConfig, dtype: torch.dtype, device: str) -> None:
        super().__init__(config, dtype, device)
        self.first = Linear(config.input_dim, config.hidden_size, bias=True)
        self.layers = [ConformerLayer(config) for _ in range(config.num_layers)]
        self.guess = Linear(config.hidden_size, config.letters, bias=True)
        self.guessed = Linear(config.letters, config.hidden_size, bias=True)
        self.queries = Queries(config.queries)
        rows = torch.arange(config.context)
        self.far = (rows[:, None] - rows + config.distances).to(device)

    def example(self, modality: Modality, rows: int) -> Features:
        """Silence of whole windows."""
        config = self.config
        frames = max(1, rows // config.queries.count) * config.window
        return {"input_features": torch.zeros(frames, config.input_dim, device=self.device, dtype=self.dtype)}

    def weight(self, features: Shapes) -> int:
        return len(features["input_features"])

    def pieces(self, items: Sequence[Features]) -> Pieces:
        """Each item has input_features [frames, input_dim] -> [rows, output_dim]."""
        config, frames = self.config, [self._frames(features["input_features"]) for features in items]
        lengths = [len(own) for own in frames]
        x = self.first(joined(frames))
        for number, layer in enumerate(self.layers, start=1):
            x = layer(x, self.far, lengths)
            if number == config.num_layers // 2:
                self.guessed.add_to(x, torch.softmax(self.guess(x), dim=-1))
            yield len(x) / len(self.layers)
        counts = [-(-length // config.window) for length in lengths]
        windows = [
            functional.pad(own, (0, 0, 0, count * config.window - len(own)))
            for own, count in zip(x.split(lengths), counts)
        ]
        rows = self.queries(joined(windows).view(sum(counts), config.window, -1))
        return apart(rows, [count * config.queries.count for count in counts])

    def _frames(self, frames: Tensor) -> Tensor:
        if frames.dim() != 2 or frames.shape[1] != self.config.input_dim or not len(frames):
            raise RequestError(
                f"input_features {list(frames.shape)}: at least 1 frame of {self.config.input_dim} numbers is needed"
            )
        return frames.to(self.device, self.dtype)


def rows() -> tuple[Row, ...]:
    """Weight rows of a tower at the model's attribute `audio`."""
    layer, target = "encoder.layers.*.", "audio.layers.*."
    feeds = [
        Row((f"{layer}ff{number}.{name}",), f"{target}feed{number}.{part}")
        for number in (1, 2)
        for name, part in (("pre_norm", "norm"), ("up_proj", "up"), ("down_proj", "down"))
    ]
    return (
        Row(("encoder.input_linear",), "audio.first"),
        *feeds,
        Row((layer + "attn.pre_norm",), target + "attention_norm"),
        Row((layer + "attn.to_q", layer + "attn.to_kv"), target + "qkv"),
        Row((layer + "attn.rel_pos_emb",), target + "far"),
        Row((layer + "attn.to_out",), target + "out"),
        Row((layer + "conv.norm",), target + "conv_norm"),
        Row((layer + "conv.up_conv",), target + "expand"),
        Row((layer + "conv.depth_conv.conv",), target + "depth"),
        Row((layer + "conv.batch_norm",), target + "batch_norm"),
        Row((layer + "conv.down_conv",), target + "gather"),
        Row((layer + "post_norm",), target + "norm"),
        Row(("encoder.out",), "audio.guess"),
        Row(("encoder.out_mid",), "audio.guessed"),
        *Queries.rows("audio.queries", "projector"),
    )


UNREAD = ("encoder.layers.*.conv.batch_norm.num_batches_tracked", "encoder.attention_dists")
