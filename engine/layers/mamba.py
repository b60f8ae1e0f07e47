"""Mamba2 and Mamba1: state spaces in place of attention.

Thread: device. In: the normalised residual stream [T, hidden], the step's StateMeta, the layer's pages (written). Out:
[T, inner], gated; the decoder layer applies the output product. Mamba2 has one input product, z | x | B | C | dt.
Mamba1 has the input product x | z and, after the convolution, two small products for time steps, B and C.
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
from engine.layers.state import FOLD, ConvTaps, Numbers, StateForm, StateMixer
from engine.weights.table import Wanted


class Mamba2(StateMixer):
    """`product`: in_proj. `norm` is None if the shape's norm is "none"."""

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
        """The weights as the kernels take them."""
        conv, numbers, gain = self.conv, self.numbers, None if self.norm is None else self.norm.weight
        return SsdWeights(conv.weight, conv.bias, numbers["A_log"], numbers["dt_bias"], numbers["D"], gain)

    def __call__(self, x: Normed, rope: Rope, meta: StateMeta, cache: LayerCache) -> Tensor:
        """Returns [T, inner]; writes the tail and the runs of the step."""
        return ssd(self.product.of_normed(x), self.weights, self.shape, self._pages(cache), meta)

    def store(self, x: Normed, rope: Rope, meta: StateMeta, cache: LayerCache) -> Tensor:
        """Computes the whole recurrence, because the recurrence costs little compared with the product."""
        return self(x, rope, meta, cache)


class TimeSteps(Linear):
    """dt_proj: a product without its bias; the rule adds `bias` in float32."""

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
    """`product`: in_proj, `mixed`: x_proj, `steps`: dt_proj. Jamba and FalconMamba (plain) normalise dt, B and C."""

    __slots__ = ("_gains", "conv", "mixed", "norms", "numbers", "o", "plain", "product", "rank", "steps")

    shape: SelectiveShape
    exact_chunk = FOLD  # its recurrence is exact everywhere, position by position

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
        """`norms`: RMSNorms with weights and `eps`; `plain`: epsilon of norms without weights, None for no norms."""
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
        """Columns of the time steps' input, of B and of C in `mixed`."""
        return self.rank, self.shape.state_size, self.shape.state_size

    @property
    def weights(self) -> SelectiveWeights:
        """The weights as the kernels take them."""
        numbers, conv = self.numbers, self.conv
        return SelectiveWeights(conv.weight, conv.bias, numbers["A_log"], self.steps.bias, numbers["D"])

    def __call__(self, x: Normed, rope: Rope, meta: StateMeta, cache: LayerCache) -> Tensor:
        """Returns [T, inner]; writes the tail and the runs of the step."""
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
        """Computes the whole recurrence, because the recurrence costs little compared with the products."""
        return self(x, rope, meta, cache)
