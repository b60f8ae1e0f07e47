"""GatedDelta: a gated delta rule in place of attention (Qwen3.5 and Qwen3-Next).

Thread: device. In: the normalised residual stream [T, hidden], the step's StateMeta, the layer's pages (written). Out:
[T, value heads * value_dim], normalised and gated; the decoder layer applies the output product. One product computes
q | k | v | z | b | a. Files of Qwen3-Next group the product's rows by key head; `in_order` sorts them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.attention.state_meta import StateMeta
from engine.base.dealing import Section
from engine.cache.spec import LayerCache
from engine.kernels.state.delta import DeltaShape, DeltaWeights
from engine.kernels.state.delta_rule import delta_rule
from engine.layers.linear import Linear
from engine.layers.norm import Normed, RMSNorm
from engine.layers.rope import Rope
from engine.layers.state import ConvTaps, Numbers, StateForm, StateMixer


class GatedDelta(StateMixer):
    """`product` joins in_proj_qkv, in_proj_z, in_proj_b, in_proj_a; grouped: in_proj_qkvz, in_proj_ba."""

    __slots__ = ("conv", "norm", "numbers", "o", "product")

    shape: DeltaShape

    def __init__(self, width: int, shape: DeltaShape, form: StateForm, dtype: torch.dtype, grouped: bool) -> None:
        assert shape.value_heads % shape.key_heads == 0, "value heads share key heads evenly"
        super().__init__(shape, form, dtype)
        heads, keys = shape.value_heads, Section(shape.key_heads, shape.key_dim)
        values, gates = Section(heads, shape.value_dim), Section(heads, shape.gate_width // heads)
        mixed = keys, keys, values  # q | k | v
        if grouped:
            shares, each = heads // shape.key_heads, (shape.conv_width + shape.value_width) // shape.key_heads
            self.product = Linear(width, shape.conv_width + shape.value_width, 2 * heads)
            self.product.rows = (Section(shape.key_heads, each),), (Section(shape.key_heads, 2 * shares),)
            self.product.arrange = lambda number, rows: in_order(shape, number, rows)
        else:
            self.product = Linear(width, shape.conv_width, shape.value_width, heads, shape.gate_width)
            self.product.rows = mixed, (values,), (Section(heads),), (gates,)
        self.conv = ConvTaps(mixed, shape.taps, bias=False)
        self.numbers = Numbers(heads, A_log=(heads,), dt_bias=(shape.gate_width,))
        self.norm = RMSNorm(shape.value_dim, shape.eps)
        self.o = Linear(shape.value_width, width)
        self.o.columns = (values,)

    @property
    def weights(self) -> DeltaWeights:
        """The weights as the kernels take them."""
        return DeltaWeights(self.conv.weight, self.numbers["A_log"], self.numbers["dt_bias"], self.norm.weight)

    def __call__(self, x: Normed, rope: Rope, meta: StateMeta, cache: LayerCache) -> Tensor:
        """Returns [T, value_width]; writes the tail and the runs of the step."""
        return delta_rule(self.product.of_normed(x), self.weights, self.shape, self._pages(cache), meta)

    def store(self, x: Normed, rope: Rope, meta: StateMeta, cache: LayerCache) -> Tensor:
        """Computes the whole rule, because the rule costs little compared with the product."""
        return self(x, rope, meta, cache)


def in_order(shape: DeltaShape, number: int, rows: Tensor) -> Tensor:
    """Sorts rows that key heads group, q | k | v | z (number 0) or b | a (number 1): all q first, then all k ..."""
    shares = shape.value_heads // shape.key_heads
    parts = [shape.key_dim, shape.key_dim, shares * shape.value_dim, shares * shape.value_dim]
    grouped = rows.unflatten(0, (shape.key_heads, -1)).split([shares, shares] if number else parts, 1)
    return torch.cat([part.flatten(0, 1) for part in grouped])
