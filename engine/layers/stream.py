"""Stream: the residual stream of one forward, to which the parts of a layer add their results.

Thread: device. In: the embeddings [T, hidden], which are then changed in place. Out: the stream, through a norm.

    x.add(Product(self.o, self.attention(x.normed(self.attention_norm), ...)))     x += o(attention(norm(x)))
    x.add(self.mlp(x.normed(self.mlp_norm)))                                       x += down(swiglu(norm(x)))

Neither line computes its last product. `add` defers the product until `normed` names the next norm, because one kernel
can add the product and compute most of that norm (Linear.add_then). At most one addend waits, and no memory is
allocated between its `add` and its product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.kernels.moe.capture import Capture
from engine.layers.adapted import TokenAdapters
from engine.layers.linear import Linear
from engine.layers.norm import Norm, Normed, RMSNorm


class Addend(Protocol):
    """A deferred addition to the stream; exactly one of the methods is called, and computes it."""

    def value(self) -> Tensor:
        """The value as a new tensor [T, hidden]."""

    def add_to(self, residual: Tensor) -> None:
        """Adds to residual [T, hidden], in place."""

    def add_then(self, residual: Tensor, norm: RMSNorm) -> Normed:
        """`add_to`, if the next reader of the stream is a linear layer of norm(residual)."""


@dataclass(slots=True, eq=False)
class Product:
    """rows W^T + b, an Addend."""

    linear: Linear
    rows: Tensor  # [T, in_features]

    def value(self) -> Tensor:
        return self.linear(self.rows)

    def add_to(self, residual: Tensor) -> None:
        self.linear.add_to(residual, self.rows)

    def add_then(self, residual: Tensor, norm: RMSNorm) -> Normed:
        return self.linear.add_then(norm, residual, self.rows)


@dataclass(slots=True, eq=False)
class Made:
    """Rows that are already computed, as an Addend; all ranks have the same rows."""

    made: Tensor  # [T, hidden]

    def value(self) -> Tensor:
        return self.made

    def add_to(self, residual: Tensor) -> None:
        residual += self.made

    def add_then(self, residual: Tensor, norm: RMSNorm) -> Normed:
        residual += self.made
        return Normed(norm, residual)


class Exchange(Protocol):
    """Sums the partial results of an engine's ranks. All ranks call the same methods in the same order."""

    def total(self, partial: Tensor) -> Tensor:
        """The sum of all ranks' partials [T, hidden], a new tensor."""

    def add_to(self, residual: Tensor, partial: Tensor) -> None:
        """residual += the sum, in place."""

    def add_then(self, residual: Tensor, partial: Tensor, norm: RMSNorm) -> Normed:
        """`add_to`, if the next reader of the stream is a linear layer of norm(residual)."""


@dataclass(slots=True, eq=False)
class Exchanged:
    """The sum over all ranks of one or more summands, an Addend. Summands of a rank meet before the exchange."""

    summands: list[Addend]
    exchange: Exchange

    def _partial(self) -> Tensor:
        partial = self.summands[0].value()
        for summand in self.summands[1:]:
            partial = partial + summand.value()
        return partial

    def value(self) -> Tensor:
        return self.exchange.total(self._partial())

    def add_to(self, residual: Tensor) -> None:
        self.exchange.add_to(residual, self._partial())

    def add_then(self, residual: Tensor, norm: RMSNorm) -> Normed:
        return self.exchange.add_then(residual, self._partial(), norm)


class Stream:
    """The rows of all tokens of a step; after `keep`, only of the sampled tokens."""

    __slots__ = ("_chosen", "_exchange", "_residual", "_sampled", "_waiting", "capture", "count", "per_layer_inputs")

    def __init__(
        self,
        residual: Tensor,
        count: Tensor | None = None,
        sampled: Tensor | None = None,
        capture: Capture | None = None,
        per_layer_inputs: Tensor | None = None,
        chosen: TokenAdapters | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        self._residual = residual
        self._exchange = exchange  # None: one rank, which has all columns of every product
        self._chosen = chosen  # the tokens' adapters; None: the model has none
        self.per_layer_inputs = per_layer_inputs  # [T, layers, n]; None: the model has none
        self.count = count  # int32 [1], on the device: rows from here on are padding; None: no padding
        self.capture = capture  # the buffer for the rows' experts; None: no capture
        self._sampled = sampled  # `count` after the stream is restricted to the sampled rows
        self._waiting: Addend | None = None

    def add(self, addend: Addend, through: Norm | None = None) -> None:
        """x += addend, or x += through(addend). With several ranks every addend but Made is a summand of each rank."""
        if self._exchange is not None and not isinstance(addend, Made):
            if isinstance(self._waiting, Exchanged) and through is None:  # parallel layers: one exchange for both
                self._waiting.summands.append(addend)
                return
            addend = Exchanged([addend], self._exchange)
        residual = self.rows()
        if through is None:
            self._waiting = addend
        else:
            residual += through(addend.value())

    def summed(self, addend: Addend) -> Tensor:
        """The addend's value, a new tensor [T, hidden]; with several ranks the sum of their values."""
        return addend.value() if self._exchange is None else self._exchange.total(addend.value())

    def rows(self) -> Tensor:
        """The stream itself, [T, hidden], with the waiting addend added."""
        if self._waiting is not None:
            self._waiting.add_to(self._residual)
            self._waiting = None
        return self._residual

    def normed(self, norm: Norm | None) -> Normed:
        """norm(x), or x if norm is None, for the next linear layer; valid until the stream changes."""
        if self._waiting is None or not isinstance(norm, RMSNorm):
            return Normed(norm, self.rows())
        waiting, self._waiting = self._waiting, None
        return waiting.add_then(self._residual, norm)

    def keep(self, index: Tensor | None, other: Tensor) -> Tensor:
        """Restricts the stream to the tokens of `index`, int64 [S], and returns their rows of `other` [T, n]; None: all
        tokens.

        The memory of all tokens' rows is freed, unless other code holds a reference to it.
        """
        if index is None:
            return other
        self.count = self._sampled
        if self.per_layer_inputs is not None:
            self.per_layer_inputs = self.per_layer_inputs.index_select(0, index)
        other, self._residual = other.index_select(0, index), self.rows().index_select(0, index)
        if self._chosen is not None:
            self._chosen.keep(index)
        return other
