"""Endings of a plain vision transformer that make one row per picture: CLIP's class token, SigLIP's attention.

Thread: device. In: the layers' rows of pictures. Out: one row per picture, as wide as the vectors of texts. The cost
of the tower (SingleRowTower) is counted in patches, and its rows are not tokens of a decoder.

    CLIP     projection(norm(class token))
    SigLIP   x = norm(x); y = attention of a learned query over x; y + mlp(norm(y))
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.base.request import Modality
from engine.encoders.tower import Features, joined
from engine.encoders.vit.config import VitConfig
from engine.encoders.vit.parts import JoinedProjections, Run
from engine.encoders.vit.tower import VitTower
from engine.kernels.activation import pointwise
from engine.layers.bare import Bare
from engine.layers.linear import Linear
from engine.layers.norm import LayerNorm


class SingleRowTower(VitTower):
    """A tower that makes one row per picture."""

    def _num_rows(self, features: Features) -> int:
        return 1

    def example(self, modality: Modality, rows: int) -> Features:
        """One blank picture, because an item is always one picture."""
        return super().example(modality, max(1, self.config.learned_side**2))


class ClassRow:
    """CLIP's ending; the projection has no bias."""

    def __init__(self, config: VitConfig) -> None:
        self.tokens = config.side**2 + 1
        self.norm = LayerNorm(config.hidden_size, config.eps)
        self.projection = Linear(config.hidden_size, config.row_width)

    def __call__(self, x: Tensor, runs: Sequence[Run]) -> Tensor:
        """x [pictures * (1 + patches), hidden] -> [pictures, row_width]."""
        return self.projection(self.norm(x[:: self.tokens].contiguous()))


class AttendedRow:
    """SigLIP's ending: a learned query attends to all patches of a picture."""

    def __init__(self, config: VitConfig) -> None:
        size = config.hidden_size
        self.activation = config.activation
        self.post_norm = LayerNorm(size, config.eps)
        self.probe = Bare("probe", 1, 1, size)
        self.attention = QueryAttention(size, config.num_heads)
        self.out = Linear(size, size, bias=True)
        self.norm = LayerNorm(size, config.eps)
        self.up = Linear(size, config.intermediate_size, bias=True)
        self.down = Linear(config.intermediate_size, size, bias=True)

    def __call__(self, x: Tensor, runs: Sequence[Run]) -> Tensor:
        """x [patches of all pictures, hidden] -> [pictures, hidden]."""
        lengths = [tiles * height * width for tiles, height, width in runs]
        parts = zip(self.post_norm(x).split(lengths), runs)
        query = self.probe.value.view(1, -1)
        y = self.out(joined([self.attention.attended(query, part.view(run[0], -1, x.shape[1])) for part, run in parts]))
        self.down.add_to(y, pointwise(self.up(self.norm(y)), self.activation))
        return y


class QueryAttention(JoinedProjections):
    """Attention of one query."""

    def __init__(self, size: int, num_heads: int) -> None:
        super().__init__(size)
        self.num_heads = num_heads

    def attended(self, query: Tensor, x: Tensor) -> Tensor:
        """query [1, size], x [pictures, patches, size] -> [pictures, size]; the softmax is float32."""
        size, heads = self.size, self.num_heads
        q = torch.nn.functional.linear(query, self.weight[:size], self.bias[:size]).view(heads, -1)
        both = torch.nn.functional.linear(x, self.weight[size:], self.bias[size:])
        k, v = both.view(*x.shape[:2], 2, heads, -1).unbind(2)  # [pictures, patches, heads, width] each
        scores = torch.einsum("hw,tphw->thp", q.float(), k.float()) * q.shape[1] ** -0.5
        return torch.einsum("thp,tphw->thw", scores.softmax(-1).to(v.dtype), v).reshape(len(x), size)
