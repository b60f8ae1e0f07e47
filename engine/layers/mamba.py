"""Mamba2 and Mamba1: state spaces in place of attention.

Thread: device. In: the normalised residual stream [T, hidden], the step's StateMeta, the layer's pages (written). Out:
[T, inner], gated; the decoder layer applies the output product. Mamba2 has one input product, z | x | B | C | dt.
Mamba1 has the input product x | z and, after the convolution, two small products for time steps, B and C.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.attention.state_meta import StateMeta
from engine.base.dealing import Section
from engine.cache.spec import LayerCache
from engine.kernels.gemm.pack import Placement
from engine.kernels.norm import rms_norm
from engine.kernels.parallel.dealt_norm import Parts, dealt_squares, normalise_dealt
from engine.kernels.state.selective import SelectiveInputs, SelectiveShape, SelectiveWeights
from engine.kernels.state.selective_rule import selective_conv, selective_scan
from engine.kernels.state.ssd import SsdShape, SsdWeights
from engine.kernels.state.ssd_rule import ssd
from engine.layers.linear import Linear
from engine.layers.norm import Normed, RMSNorm
from engine.layers.rope import Rope
from engine.layers.state import FOLD, ConvTaps, Numbers, StateForm, StateMixer
from engine.layers.stream import Exchange
from engine.weights.table import Wanted


@dataclass(frozen=True, slots=True, eq=False)
class DealtGroups:
    """The gated norm over groups of channels, of which each rank has a part of one: the ranks exchange their sums of
    squares."""

    exchange: Exchange
    parts: Parts  # the groups of all ranks
    gates_last: bool  # the norm's result is gated; else its input is, by the kernels

    def __call__(self, y: Tensor, z: Tensor, norm: RMSNorm) -> None:
        """y [T, channels of this rank], in place; z: the gates."""
        sums = self.exchange.total(dealt_squares(y, self.parts))
        normalise_dealt(y, sums, (norm.weight,), self.parts, norm.eps, z if self.gates_last else None)


class Mamba2(StateMixer):
    """`product`: in_proj. `norm` is None if the shape's norm is "none"."""

    __slots__ = ("conv", "dealt_norm", "norm", "numbers", "o", "product")

    shape: SsdShape
    dealt_norm: DealtGroups | None  # replaces the kernels' norm, if a rank has a part of a group

    def __init__(
        self, width: int, shape: SsdShape, form: StateForm, dtype: torch.dtype, bias: bool, conv_bias: bool
    ) -> None:
        assert shape.heads % shape.groups == 0, "heads share B and C evenly"
        super().__init__(shape, form, dtype)
        heads = shape.heads
        channels, both = Section(heads, shape.head_dim), Section(shape.groups, shape.state_size)  # of x; of B and of C
        self.product = Linear(width, shape.columns[-1], bias=bias)
        self.product.rows = ((channels, channels, both, both, Section(heads)),)
        self.conv = ConvTaps((channels, both, both), shape.taps, conv_bias)
        self.numbers = Numbers(heads, A_log=(heads,), dt_bias=(heads,), D=(heads,))
        self.norm = self.dealt_norm = None
        if shape.norm != "none":
            self.norm = RMSNorm(shape.inner, shape.eps)
            self.norm.rows = ((channels,),)
        self.o = Linear(shape.inner, width, bias=bias)
        self.o.columns = (channels,)

    @property
    def weights(self) -> SsdWeights:
        """The weights as the kernels take them."""
        conv, numbers = self.conv, self.numbers
        gain = None if self.norm is None or self.dealt_norm is not None else self.norm.weight
        return SsdWeights(conv.weight, conv.bias, numbers["A_log"], numbers["dt_bias"], numbers["D"], gain)

    def deal_norm(self, dealt: DealtGroups) -> None:
        """Replaces the kernels' norm, over the channels of a group of which this rank has a part."""
        self.dealt_norm, self.shape = dealt, replace(self.shape, norm="bare" if dealt.gates_last else "none")

    def __call__(self, x: Normed, rope: Rope, meta: StateMeta, cache: LayerCache) -> Tensor:
        """Returns [T, inner]; writes the tail and the runs of the step."""
        projected = self.product.of_normed(x)
        made = ssd(projected, self.weights, self.shape, self._pages(cache), meta)
        if self.dealt_norm is not None:
            assert self.norm is not None
            self.dealt_norm(made, projected[:, : self.shape.inner], self.norm)
        return made

    def store(self, x: Normed, rope: Rope, meta: StateMeta, cache: LayerCache) -> Tensor:
        """Computes the whole recurrence, because the recurrence costs little compared with the product."""
        return self(x, rope, meta, cache)


class TimeSteps(Linear):
    """dt_proj: a product without its bias; the rule adds `bias` in float32."""

    __slots__ = ("bias",)

    has_own_bias = True
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

    __slots__ = ("_gains", "conv", "exchange", "mixed", "norms", "numbers", "o", "plain", "product", "rank", "steps")

    shape: SelectiveShape
    exchange: Exchange | None  # sums what the ranks' channels give to time steps, B and C; None: one rank has all
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
        channels = (Section(shape.inner),)
        self.product = Linear(width, 2 * shape.inner, bias=bias)
        self.product.rows = (channels * 2,)
        self.conv = ConvTaps(channels, shape.taps, conv_bias)
        self.mixed, self.exchange = Linear(shape.inner, rank + 2 * shape.state_size), None
        self.steps = TimeSteps(rank, shape.inner)
        self.steps.rows = (channels,)
        self.norms = tuple(RMSNorm(size, eps) for size in self._sizes) if norms else ()
        self.numbers = Numbers(shape.inner, A_log=(shape.inner, shape.state_size), D=(shape.inner,))
        self.o = Linear(shape.inner, width, bias=bias)
        self.mixed.columns = self.o.columns = channels
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
        mixed = self.mixed(active)
        if self.exchange is not None:
            mixed = self.exchange.total(mixed)
        steps, b, c = self._normed(mixed.split(self._sizes, 1))
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
