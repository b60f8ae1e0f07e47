"""LoRA adapters that are part of a checkpoint; each applies to requests with its modality, or with its task.

    y = W x + B (s(adapter of x) * A x)      A, B: matrices of all adapters of a layer; s: each column's scale, or 0
    row = E[id] + B (s(adapter of id) * A[id])      for an embedding table

Owner: the model. In: the number of each token's adapter, which is step data like the token's position, so that graphs
are the same for all rows. Out: the Weight of a layer. For a row without an adapter zeros are added, so the result has
the bits of W x. On a CPU the host knows whether any token of a step has an adapter; if none has, only W x is computed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from engine.base.dealing import Axis
from engine.kernels.activation import Activation, glu
from engine.kernels.gemm.epilogue import Unscaled
from engine.kernels.gemm.pack import Placement, pack
from engine.kernels.gemm.weight import Weight
from engine.kernels.norm import rms_norm
from engine.layers.linear import Linear
from engine.quant.base import weight_dtype
from engine.weights.table import Wanted


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter, and the names of its tensors below a linear layer's name."""

    name: str  # the modality or the task whose requests use the adapter
    modules: Collection[str]  # last components of the names of the matrices that the adapter changes
    rank: int
    scale: float
    halves: tuple[str, str] = ("lora_A.weight", "lora_B.weight")
    table_halves: tuple[str, str] = ("lora_embedding_A", "lora_embedding_B")  # names below an embedding table's name


class TokenAdapters(Protocol):
    """The adapters of the tokens of the current forward. Owner: the thread that launches forwards."""

    def begin(self, numbers: Tensor | None, named: bool = True) -> None:
        """Begins a forward; numbers int32 [T]: each token's adapter, 0: none. numbers None: no token has an adapter.
        `named`: a token may have an adapter by name."""

    def keep(self, index: Tensor) -> None:
        """Restricts the rest of the forward to the tokens of `index`, int64 [S]."""


class Delta(ABC):
    """The adapters of one layer."""

    __slots__ = ()
    takes_unscaled: ClassVar[bool] = False  # x may be prescaled for a norm (gemm/epilogue)

    @property
    @abstractmethod
    def acts(self) -> bool:
        """Whether a row of the current forward may have an adapter."""

    @property
    def apart(self) -> bool:
        """Whether products are not fused: because a row may have an adapter, or because bits must not depend on it."""
        return self.acts

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes of the adapters' matrices."""

    def lowered(self, x: Tensor | Unscaled) -> Tensor | None:
        """A x, launched before the layer's own product, which reads its weights meanwhile. None: no row has an
        adapter, or `add_to` computes A x."""
        return None

    @abstractmethod
    def add_to(self, y: Tensor, x: Tensor | Unscaled, low: Tensor | None) -> None:
        """Adds the adapters' terms of x [..., in_features] to y [..., out_features], in place; low: of `lowered`."""

    def gated(self, halves: Tensor, x: Tensor | Unscaled, low: Tensor | None, activation: Activation) -> Tensor:
        """activate(gate, up) of halves [..., out_features] with the adapters' terms; may overwrite `halves`."""
        if self.acts:
            self.add_to(halves, x, low)
        return glu(halves, activation)

    def add_then_norm(self, y: Tensor, x: Tensor, low: Tensor | None, gain: Tensor, eps: float) -> Unscaled | None:
        """`add_to`, if the next product reads rms_norm(y, gain, eps); see Weight.add_then_norm."""
        if self.acts:
            self.add_to(y, x, low)
        return None


class Chosen:
    """The fixed adapter of each token; a TokenAdapters."""

    __slots__ = ("_numbers", "_shares", "_tables", "further", "scales")

    def __init__(self, scales: Sequence[float]) -> None:
        self.scales = scales
        self.further = 0  # numbers behind those of the fixed adapters; they have no fixed adapter
        self._numbers: Tensor | None = None
        self._tables: dict[tuple[int, ...], Tensor] = {}
        self._shares: dict[tuple[int, ...], Tensor] = {}

    def begin(self, numbers: Tensor | None, named: bool = True) -> None:
        self._numbers = numbers
        self._shares.clear()

    @property
    def acts(self) -> bool:
        """Whether a token of the current forward may have an adapter."""
        return self._numbers is not None

    def keep(self, index: Tensor) -> None:
        if self._numbers is not None:
            self.begin(self._numbers.index_select(0, index))

    def prepare(self, widths: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
        """Makes the scale table [adapter, column] for layers with adapters of these widths; called before forwards."""
        if widths not in self._tables:
            table = torch.zeros(len(widths) + 1 + self.further, sum(widths))
            first = 0
            for number, (width, scale) in enumerate(zip(widths, self.scales), 1):
                table[number, first : first + width] = scale
                first += width
            self._tables[widths] = table.to(device, dtype)

    def shares(self, widths: tuple[int, ...]) -> Tensor | None:
        """[T, sum of widths]: the factors of each token's columns; None: all zero."""
        if self._numbers is None:
            return None
        if widths not in self._shares:
            self._shares[widths] = self._tables[widths].index_select(0, self._numbers)
        return self._shares[widths]


class Site(Delta):
    """The A and B matrices of all adapters of one layer; a separate part with the layer's names in the checkpoint."""

    __slots__ = ("adapters", "chosen", "down", "linear", "ranks", "up", "widths")

    down: Weight
    up: Weight

    def __init__(self, linear: Linear, names: Sequence[str], adapters: Sequence[Adapter], chosen: Chosen) -> None:
        self.linear = linear
        self.adapters = adapters
        self.chosen = chosen
        last = [name.rpartition(".")[2] for name in names]
        self.ranks = [[each.rank if name in each.modules else 0 for name in last] for each in adapters]
        self.widths = tuple(sum(ranks) for ranks in self.ranks)

    def expects(self) -> dict[str, tuple[Wanted | None, ...]]:
        wanted: dict[str, tuple[Wanted | None, ...]] = {}
        for adapter, ranks in zip(self.adapters, self.ranks):
            a, b = adapter.halves
            wanted[a] = tuple(Wanted((rank, self.linear.in_features)) if rank else None for rank in ranks)
            sizes = zip(self.linear.out_features, ranks)
            wanted[b] = tuple(Wanted((rows, rank)) if rank else None for rows, rank in sizes)
        return {kind: pieces for kind, pieces in wanted.items() if any(pieces)}

    def fill(self, pieces: dict[str, list[Tensor | None]], placement: Placement) -> None:
        downs: list[Tensor] = []
        up = torch.zeros(sum(self.linear.out_features), sum(self.widths))
        column = 0
        for adapter in self.adapters:
            row = 0
            halves = (pieces.get(half, [None] * len(self.linear.out_features)) for half in adapter.halves)
            for number, (rows, a, b) in enumerate(zip(self.linear.out_features, *halves)):
                if a is not None and b is not None:
                    downs.append(a)
                    rows_in_order = b if self.linear.arrange is None else self.linear.arrange(number, b)
                    up[row : row + rows, column : column + len(a)] = rows_in_order.float()
                    column += len(a)
                row += rows
        dtype = weight_dtype(downs[0].dtype, placement)
        self.down = pack(torch.cat([a.to(placement.device, dtype) for a in downs]), None, placement)
        self.up = pack(up.to(placement.device, dtype), None, placement)
        self.chosen.prepare(self.widths, placement.dtype, placement.device)

    def around(self, base: Weight) -> Weight:
        """The layer's weight with adapters."""
        return AdaptedWeight(base, self)

    def axes(self, kind: str, piece: int) -> tuple[Axis | None, ...]:
        """How ranks share a tensor: A has the matrix's columns, B has its rows."""
        if kind in [each.halves[0] for each in self.adapters]:
            return None, self.linear.columns
        rows = self.linear.rows
        return None if rows is None else rows[piece], None

    @property
    def acts(self) -> bool:
        return self.chosen.acts

    @property
    def num_bytes(self) -> int:
        return self.down.num_bytes + self.up.num_bytes

    def add_to(self, y: Tensor, x: Tensor | Unscaled, low: Tensor | None) -> None:
        shares = self.chosen.shares(self.widths)
        assert shares is not None, "no token has an adapter"
        assert isinstance(x, Tensor), "rows are not prescaled here"
        self.up.linear(self.down.linear(x).mul_(shares), y, y)


class OwnAndNamed:
    """The fixed adapters, numbers 1 to `count`, and adapters by name, whose numbers follow; a TokenAdapters."""

    __slots__ = ("count", "named", "own")

    def __init__(self, own: Chosen, named: TokenAdapters, count: int, places: int) -> None:
        self.own, self.named, self.count = own, named, count
        own.further = places

    def begin(self, numbers: Tensor | None, named: bool = True) -> None:
        self.named.begin(numbers if named else None)
        if numbers is not None and not numbers.is_cuda and not ((numbers > 0) & (numbers <= self.count)).any():
            numbers = None
        self.own.begin(numbers)

    def keep(self, index: Tensor) -> None:
        self.own.keep(index)
        self.named.keep(index)


class OwnAndPlaced:
    """A layer's fixed adapters, whose matrices the checkpoint holds, and its places."""

    __slots__ = ("expects", "fill", "own", "placed")

    def __init__(self, own: Site, placed: Delta) -> None:
        self.own, self.placed = own, placed
        self.expects, self.fill = own.expects, own.fill

    def around(self, base: Weight) -> Weight:
        """The layer's weight with adapters."""
        return AdaptedWeight(self.own.around(base), self.placed)


class TableSite:
    """The A and B matrices of all adapters of an embedding table; a separate part with the table's name."""

    __slots__ = ("changing", "chosen", "down", "num_rows", "up", "width", "widths")

    down: Tensor  # [num_rows, sum of ranks]
    up: Weight

    def __init__(self, name: str, num_rows: int, width: int, adapters: Sequence[Adapter], chosen: Chosen) -> None:
        """`name`: the last component of the table's name; `adapters`: the model's."""
        self.num_rows, self.width, self.chosen = num_rows, width, chosen
        self.changing = [each for each in adapters if name in each.modules]
        self.widths = tuple(each.rank if name in each.modules else 0 for each in adapters)

    def add_to(self, x: Tensor, ids: Tensor) -> None:
        """Adds the adapters' terms to the table's rows x [T, width], in place; ids [T] int64."""
        shares = self.chosen.shares(self.widths)
        if shares is not None:
            self.up.linear(functional.embedding(ids, self.down).to(x.dtype).mul_(shares), x, x)

    def expects(self) -> dict[str, tuple[Wanted | None, ...]]:
        wanted: dict[str, tuple[Wanted | None, ...]] = {}
        for adapter in self.changing:
            a, b = adapter.table_halves
            wanted[a] = (Wanted((adapter.rank, self.num_rows)),)
            wanted[b] = (Wanted((self.width, adapter.rank)),)
        return wanted

    def fill(self, pieces: dict[str, list[Tensor | None]], placement: Placement) -> None:
        downs, ups = (
            [piece for each in self.changing for piece in pieces[each.table_halves[half]] if piece is not None]
            for half in (0, 1)
        )
        dtype = weight_dtype(downs[0].dtype, placement)
        self.down = torch.cat([a.to(placement.device, dtype) for a in downs]).t().contiguous()
        self.up = pack(torch.cat([b.to(placement.device, dtype) for b in ups], 1), None, placement)
        self.chosen.prepare(self.widths, placement.dtype, placement.device)


@dataclass(frozen=True, slots=True, eq=False)
class AdaptedWeight(Weight):
    """A weight of any form with adapters. In a forward without adapters every product is the form's own."""

    base: Weight
    site: Delta

    @property
    def plain(self) -> Weight | None:
        return None if self.site.apart else self.base.plain

    @property
    def takes_halves(self) -> bool:
        return self.base.takes_halves and not self.site.apart

    @property
    def num_bytes(self) -> int:
        return self.base.num_bytes + self.site.num_bytes

    @property
    def sums_in_two(self) -> bool:
        return self.base.sums_in_two

    def dense(self) -> Tensor:
        """W, without adapters."""
        return self.base.dense()

    def dense_bias(self) -> Tensor | None:
        return self.base.dense_bias()

    def linear(self, x: Tensor, out: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        low = self.site.lowered(x)
        y = self.base.linear(x, out, residual)
        if self.site.acts:
            self.site.add_to(y, x, low)
        return y

    def gated(self, x: Tensor, activation: Activation) -> Tensor:
        if self.site.apart:
            low = self.site.lowered(x)
            return self.site.gated(self.base.linear(x), x, low, activation)
        return self.base.gated(x, activation)

    def of_halves(
        self, halves: Tensor, activation: Activation, out: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor:
        if self.site.apart:
            return self.linear(glu(halves, activation), out, residual)
        return self.base.of_halves(halves, activation, out, residual)

    def add_then_norm(self, residual: Tensor, x: Tensor, gain: Tensor, eps: float) -> Unscaled | None:
        if self.site.apart:
            low = self.site.lowered(x)
            self.base.linear(x, residual, residual)
            return self.site.add_then_norm(residual, x, low, gain, eps)
        return self.base.add_then_norm(residual, x, gain, eps)

    def of_normed(
        self, residual: Tensor, gain: Tensor, eps: float, prescaled: Unscaled | None, activation: Activation | None
    ) -> Tensor:
        if not self.site.apart:
            return self.base.of_normed(residual, gain, eps, prescaled, activation)
        x: Tensor | Unscaled
        if prescaled is not None and self.site.takes_unscaled:
            x, low = prescaled, self.site.lowered(prescaled)
            y = self.base.of_normed(residual, gain, eps, prescaled, None)
        else:
            x = rms_norm(residual, gain, eps)
            low = self.site.lowered(x)
            y = self.base.linear(x)
        if activation is not None:
            return self.site.gated(y, x, low, activation)
        if self.site.acts:
            self.site.add_to(y, x, low)
        return y
