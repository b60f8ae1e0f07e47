"""Mamba2 and Mamba1: state spaces in the place of attention.

Thread: device. In: the residual stream [T, hidden] through the norm before the layer, the step's StateMeta, the layer's
pages (written). Out: [T, inner], gated; the output product is the layer's. Mamba2 has one product, z | x | B | C | dt.
Mamba1 has x | z, and behind the convolution two small products, for the time steps, B and C.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.attention.state_meta import StateMeta
from engine.cache.spec import LayerCache
from engine.kernels.gemm.pack import Placement
from engine.kernels.norm import rms_norm
from engine.kernels.state.selective import SelectiveInputs, SelectiveShape, SelectiveWeights
from engine.kernels.state.selective_rule import selective_conv, selective_scan
from engine.kernels.state.ssd import SsdShape, SsdWeights
from engine.kernels.state.ssd_rule import ssd
from engine.layers.linear import Linear
from engine.layers.norm import Normed, RMSNorm
from engine.layers.rope import Rope
from engine.layers.state import ConvTaps, Numbers, StateForm, StateMixer
from engine.weights.table import Wanted


class Mamba2(StateMixer):
    """`product`: in_proj. `norm` exists unless the shape's order is "none"."""

    __slots__ = ("conv", "norm", "numbers", "o", "product")

    shape: SsdShape

    def __init__(
        self, width: int, shape: SsdShape, form: StateForm, dtype: torch.dtype, bias: bool, conv_bias: bool
    ) -> None:
        assert shape.heads % shape.groups == 0, "heads share B and C evenly"
        super().__init__(shape, form, dtype)
        self.product = Linear(width, shape.columns[-1], bias=bias)
        self.conv = ConvTaps(shape.conv_width, shape.taps, conv_bias)
        self.numbers = Numbers(A_log=(shape.heads,), dt_bias=(shape.heads,), D=(shape.heads,))
        self.norm = None if shape.norm == "none" else RMSNorm(shape.inner, shape.eps)
        self.o = Linear(shape.inner, width, bias=bias)

    @property
    def weights(self) -> SsdWeights:
        """What the kernels read."""
        conv, numbers, gain = self.conv, self.numbers, None if self.norm is None else self.norm.weight
        return SsdWeights(conv.weight, conv.bias, numbers["A_log"], numbers["dt_bias"], numbers["D"], gain)

    def __call__(self, x: Normed, rope: Rope, meta: StateMeta, cache: LayerCache) -> Tensor:
        """[T, inner]; the tail and the runs of the step are written."""
        return ssd(self.product.of_normed(x), self.weights, self.shape, self._pages(cache), meta)

    def store(self, x: Normed, rope: Rope, meta: StateMeta, cache: LayerCache) -> Tensor:
        """The whole recurrence: next to the product it costs little."""
        return self(x, rope, meta, cache)


class TimeSteps(Linear):
    """A product whose bias is added in float32, by the rule that reads it."""

    __slots__ = ("bias",)

    bias: Tensor  # [out_features] float32

    def expects(self) -> dict[str, tuple[Wanted | None, ...]]:
        return {**super().expects(), "bias": (Wanted((sum(self.out_features),), in_memory=torch.float32),)}

    def fill(self, pieces: dict[str, list[Tensor | None]], placement: Placement) -> None:
        (bias,) = pieces["bias"]
        assert bias is not None
        self.bias = bias.to(placement.device, torch.float32, copy=True)
        super().fill({kind: given for kind, given in pieces.items() if kind != "bias"}, placement)


class Mamba1(StateMixer):
    """`product`: in_proj, `mixed`: x_proj, `steps`: dt_proj. Norms of steps, B and C: Jamba's; plain: FalconMamba's."""

    __slots__ = ("_gains", "conv", "mixed", "norms", "numbers", "o", "plain", "product", "rank", "steps")

    shape: SelectiveShape

    def __init__(
        self,
        width: int,
        shape: SelectiveShape,
        rank: int,
        form: StateForm,
        dtype: torch.dtype,
        bias: bool,
        conv_bias: bool,
        norms: bool = False,
        plain: float | None = None,
        eps: float = 1e-6,
    ) -> None:
        """`norms`: RMSNorms with weights and `eps`; `plain`: the eps of norms without weights, None: none of these."""
        super().__init__(shape, form, dtype)
        self.rank, self.plain = rank, plain
        self.product = Linear(width, 2 * shape.inner, bias=bias)
        self.conv = ConvTaps(shape.inner, shape.taps, conv_bias)
        self.mixed = Linear(shape.inner, rank + 2 * shape.state_size)
        self.steps = TimeSteps(rank, shape.inner)
        self.norms = tuple(RMSNorm(size, eps) for size in self._sizes) if norms else ()
        self.numbers = Numbers(A_log=(shape.inner, shape.state_size), D=(shape.inner,))
        self.o = Linear(shape.inner, width, bias=bias)
        self._gains: list[Tensor] = []

    @property
    def _sizes(self) -> tuple[int, int, int]:
        """Of the steps' inputs, B and C."""
        return self.rank, self.shape.state_size, self.shape.state_size

    @property
    def weights(self) -> SelectiveWeights:
        """What the kernels read."""
        numbers, conv = self.numbers, self.conv
        return SelectiveWeights(conv.weight, conv.bias, numbers["A_log"], self.steps.bias, numbers["D"])

    def __call__(self, x: Normed, rope: Rope, meta: StateMeta, cache: LayerCache) -> Tensor:
        """[T, inner]; the tail and the runs of the step are written."""
        projected, pages = self.product.of_normed(x), self._pages(cache)
        active = selective_conv(projected, self.weights, self.shape, pages, meta)
        steps, b, c = self._normed(self.mixed(active).split(self._sizes, 1))
        given = SelectiveInputs(active, self.steps(steps.contiguous()), b, c, projected[:, self.shape.inner :])
        return selective_scan(given, projected, self.weights, self.shape, pages, meta)

    def _normed(self, parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if self.norms:
            return tuple(norm(part) for norm, part in zip(self.norms, parts))
        if self.plain is None:
            return parts
        if not self._gains:
            self._gains = [torch.ones(size, device=parts[0].device) for size in self._sizes]
        return tuple(rms_norm(part, gain, self.plain) for gain, part in zip(self._gains, parts))

    def store(self, x: Normed, rope: Rope, meta: StateMeta, cache: LayerCache) -> Tensor:
        """The whole recurrence: next to the products it costs little."""
        return self(x, rope, meta, cache)
