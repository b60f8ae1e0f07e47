"""MiniCPM-V's vision tower: SigLIP for pictures of any shape, whose views learned queries summarise.

Thread: device. In: the patches of a picture's views, row by row: the whole, then its slices, which have one size. Out:
as many rows per view as there are queries. Views attend to themselves only, so pictures of several requests run
together. The position of a patch is an index into a square, by its fraction of the sides. The queries attend to the
layers' rows; keys, and not values, have the sines and cosines of column and row, as in resampler.py of
https://huggingface.co/openbmb/MiniCPM-V-4_5; earlier versions of vLLM added them to the values. It runs eagerly.

    x = norm(W x);  y = attention of norm(queries), keys x + position, values x;  rows = norm(y) P
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn import functional

from engine.base.errors import RequestError
from engine.base.request import Modality
from engine.encoders.recent import Recent
from engine.encoders.tower import Features, Pieces, apart, joined
from engine.encoders.vit.config import VitConfig
from engine.encoders.vit.parts import JoinedProjections, Run, Turned
from engine.encoders.vit.tower import VitTower
from engine.layers.bare import Bare
from engine.layers.linear import Linear
from engine.layers.norm import LayerNorm

EPS, HEAD = 1e-6, 128  # of the norms; the width of a head
MAX_TABLE_ROWS = 65_536  # patches whose positions are cached
SIDE = 32  # patches along a side of an example's views, as in 448 pixels


@dataclass(frozen=True, slots=True)
class ResampledConfig(VitConfig):
    """The configuration of the tower and of its queries."""

    queries: int = 64  # rows per view

    @classmethod
    def of(cls, tower: VitConfig, queries: int) -> ResampledConfig:
        return cls(**{field.name: getattr(tower, field.name) for field in fields(tower)}, queries=queries)


class Resampler:
    """The ending of the tower: the rows of views -> `queries` rows per view."""

    def __init__(self, config: ResampledConfig, dtype: torch.dtype, device: str) -> None:
        width = config.row_width
        self.dtype, self.device = dtype, device
        self.count, self.width, self.num_heads = config.queries, width, width // HEAD
        self.query = Bare("query", self.count, width)
        self.reduce = Linear(config.hidden_size, width)
        self.projections = JoinedProjections(width)
        self.out = Linear(width, width, bias=True)
        self.query_norm, self.norm, self.post_norm = (LayerNorm(width, EPS) for _ in range(3))
        self.project = Turned("proj", width, width)
        self._places: Recent[tuple[int, int], Tensor] = Recent(MAX_TABLE_ROWS)

    def __call__(self, x: Tensor, runs: Sequence[Run]) -> Tensor:
        """x [patches of all views, hidden] -> [views * queries, width]."""
        x = self.norm(self.reduce(x))
        queries = self.projections(self.query_norm(self.query.value), 0).view(self.count, self.num_heads, HEAD)
        lengths = [tiles * height * width for tiles, height, width in runs]
        rows = [self._attended(queries, part, run) for part, run in zip(x.split(lengths), runs)]
        return self.project(self.post_norm(self.out(joined(rows))))

    def _attended(self, queries: Tensor, x: Tensor, run: Run) -> Tensor:
        """x [tiles * height * width, width] -> [tiles * queries, width]."""
        tiles, height, width = run
        x = x.view(tiles, height * width, self.width)
        shape = tiles, height * width, self.num_heads, HEAD
        keys = self.projections(x + self._places_of((height, width)), 1).view(shape).transpose(1, 2)
        values = self.projections(x, 2).view(shape).transpose(1, 2)
        asked = queries.transpose(0, 1).expand(tiles, -1, -1, -1)
        found = functional.scaled_dot_product_attention(asked, keys, values)
        return found.transpose(1, 2).reshape(tiles * self.count, self.width)

    def _places_of(self, grid: tuple[int, int]) -> Tensor:
        known = self._places.get(grid)
        if known is None:
            known = waves(grid, self.width).to(self.device, self.dtype)
            self._places.put(grid, known, len(known))
        return known


class ResampledTower(VitTower):
    """Views of pictures -> rows of the decoder's width."""

    config: ResampledConfig

    def __init__(self, config: ResampledConfig, dtype: torch.dtype, device: str) -> None:
        super().__init__(config, dtype, device, Resampler(config, dtype, device))

    def pieces(self, items: Sequence[Features]) -> Pieces:
        """Each item has `pixel_values` [patches, numbers]; `grid` [2], of the whole; and `slices` [4]: rows and columns
        of slices, and the grid of each; zeros: there are none.
        """
        views = [self._views(features) for features in items]
        patches = joined([features["pixel_values"].to(self.device, self.dtype) for features in items])
        rows = yield from self._rows_of(patches, [run for own in views for run in own])
        count = self.config.queries
        return apart(rows, [count * sum(tiles for tiles, _, _ in own) for own in views])

    def _views(self, features: Features) -> list[Run]:
        patches, numbers = features["pixel_values"], self.patch_embed.in_features
        height, width = features["grid"].tolist()
        rows, columns, *each = features["slices"].tolist()
        views = [(1, height, width), (rows * columns, *each)][: 1 + bool(rows * columns)]
        fits = all(min(view) > 0 for view in views)
        needed = sum(tiles * height * width for tiles, height, width in views)
        if not fits or tuple(patches.shape) != (needed, numbers):
            raise RequestError(
                f"pixel_values {list(patches.shape)} do not fit views of {views} (number, height, width): {needed} "
                f"patches of {numbers} numbers are needed"
            )
        return views

    def example(self, modality: Modality, rows: int) -> Features:
        """A blank picture with as many slices as fit into `rows`, and at least the view of the whole."""
        slices = max(1, rows // self.config.queries) - 1
        shape = (1, slices, SIDE, SIDE) if slices else (0, 0, 0, 0)
        patches = torch.zeros((1 + slices) * SIDE**2, self.patch_embed.in_features, device=self.device)
        return {"pixel_values": patches, "grid": torch.tensor([SIDE, SIDE]), "slices": torch.tensor(shape)}


def waves(grid: tuple[int, int], width: int) -> Tensor:
    """Sines and cosines of each patch's column, then of its row: float32 [height * width, width]."""
    quarter = width // 4
    frequency = 1.0 / 10_000 ** (torch.arange(quarter, dtype=torch.float32) / quarter)
    row, column = torch.meshgrid(*(torch.arange(side, dtype=torch.float32) for side in grid), indexing="ij")
    angles = [axis.reshape(-1, 1) * frequency for axis in (column, row)]
    return torch.cat([piece for angle in angles for piece in (angle.sin(), angle.cos())], dim=1)
