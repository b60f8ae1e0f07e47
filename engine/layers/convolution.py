"""GatedConvolution: a short convolution along the sequence, which replaces attention (LFM2).

Thread: device. In: the residual stream [T, hidden] through the norm before the layer, the step's AttentionMeta, this
layer's cache (written). Out: [T, width]; the layer has the output projection. The cache is a window of the last
tokens, so blocks, prefixes and preemption work as for sliding-window attention.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.attention.meta import AttentionMeta
from engine.base.dealing import Section
from engine.base.mixers import ConvolutionConfig
from engine.cache.spec import CacheSpec, LayerCache
from engine.cache.window import TapsSpec
from engine.kernels.convolution import gated_convolution
from engine.kernels.gemm.pack import Placement
from engine.layers.linear import Linear
from engine.layers.norm import Normed
from engine.layers.rope import Rope
from engine.weights.table import Wanted


class Taps:
    """The weights of the convolution: each column's factors for a token and the tokens before it."""

    __slots__ = ("bias", "count", "has_bias", "rows", "weight", "width")

    weight: Tensor  # [count, width] float32; index 0 is the token's own factor
    bias: Tensor | None  # [width] float32

    def __init__(self, config: ConvolutionConfig) -> None:
        self.width, self.count, self.has_bias = config.width, config.conv_l_cache, config.bias
        self.rows = ((Section(config.width),),)  # how ranks share the factors

    def expects(self) -> dict[str, tuple[Wanted | None, ...]]:
        wanted: dict[str, tuple[Wanted | None, ...]] = {"weight": (Wanted((self.width, 1, self.count)),)}
        return {**wanted, "bias": (Wanted((self.width,)),)} if self.has_bias else wanted

    def fill(self, pieces: dict[str, list[Tensor | None]], placement: Placement) -> None:
        ((weight,), (bias,)) = pieces["weight"], pieces.get("bias", [None])
        assert weight is not None
        self.weight = weight.to(placement.device, torch.float32)[:, 0].flip(1).t().contiguous()
        self.bias = None if bias is None else bias.to(placement.device, torch.float32, copy=True)


class GatedConvolution:
    """The convolution; `product` makes b, c and x (two gates and the input), `o` is the layer's output projection."""

    __slots__ = ("o", "product", "taps", "width")

    def __init__(self, hidden: int, config: ConvolutionConfig) -> None:
        self.width = width = config.width
        columns = Section(width)
        self.product = Linear(hidden, 3 * width, bias=config.bias)
        self.product.rows = ((columns,) * 3,)
        self.taps = Taps(config)
        self.o = Linear(width, hidden, bias=config.bias)
        self.o.columns = (columns,)

    def cache_spec(self, dtype: torch.dtype) -> CacheSpec:
        """The cache of a layer of a model in `dtype`."""
        return TapsSpec(self.width, dtype, self.taps.count)

    def __call__(self, x: Normed, rope: Rope, meta: AttentionMeta, cache: LayerCache) -> Tensor:
        """Returns [T, width], and stores the values that later tokens read."""
        (pages,) = cache
        return gated_convolution(self.product.of_normed(x), self.taps.weight, self.taps.bias, pages, meta)

    def store(self, x: Normed, rope: Rope, meta: AttentionMeta, cache: LayerCache) -> Tensor:
        """Runs the whole convolution, because it costs little compared to the projection."""
        return self(x, rope, meta, cache)
