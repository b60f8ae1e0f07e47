"""MiniCPM-V's vision tower: SigLIP for pictures of any shape, whose views learned queries summarise.

Thread: device. In: the patches of an item's views, row by row. The views of a picture are the whole, then its slices,
which have one size; those of a film are its frames. Out: as many rows as there are queries, per view of a picture or
per group of successive frames. Views attend to themselves only, so items of several requests run together. The position
of a patch is an index into a square, by its fraction of the sides. The queries attend to the layers' rows, of a group's
frames together; keys, and not values, have the sines and cosines of column and row, and of a frame's moment, as in
resampler.py of https://huggingface.co/openbmb/MiniCPM-V-4_5 (earlier versions of vLLM changed the values instead).
The tower runs eagerly.

    x = norm(W x);  y = attention of norm(queries), keys x + position (+ moment), values x;  rows = norm(y) P
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


@dataclass(frozen=True, slots=True, eq=False)
class Views:
    """Views of one size: of a picture, each with rows of its own; or the frames of one group of a film."""

    run: Run  # number, height, width, in patches
    moments: Tensor | None = None  # [number] float32: the moment of each frame, in tenths of a second

    @property
    def summaries(self) -> int:
        """How often the queries make rows."""
        return self.run[0] if self.moments is None else 1


class Resampler:
    """The ending of the tower: the rows of views -> `queries` rows per summary."""

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

    def __call__(self, x: Tensor, views: Sequence[Views]) -> Tensor:
        """x [patches of all views, hidden] -> [summaries * queries, width]."""
        x = self.norm(self.reduce(x))
        queries = self.projections(self.query_norm(self.query.value), 0).view(self.count, self.num_heads, HEAD)
        parts = x.split([torch.Size(each.run).numel() for each in views])
        rows = [self._attended(queries, part, each) for part, each in zip(parts, views)]
        return self.project(self.post_norm(self.out(joined(rows))))

    def _attended(self, queries: Tensor, x: Tensor, views: Views) -> Tensor:
        """x [views * height * width, width] -> [summaries * queries, width]."""
        number, height, width = views.run
        x = x.view(number, height * width, self.width)
        keyed = x + self._places_of((height, width))
        if views.moments is not None:
            keyed += waves_of(views.moments.to(self.device), self.width)[:, None].to(self.dtype)
        shape = views.summaries, -1, self.num_heads, HEAD
        keys = self.projections(keyed, 1).view(shape).transpose(1, 2)
        values = self.projections(x, 2).view(shape).transpose(1, 2)
        asked = queries.transpose(0, 1).expand(len(keys), -1, -1, -1)
        found = functional.scaled_dot_product_attention(asked, keys, values)
        return found.transpose(1, 2).reshape(-1, self.width)

    def _places_of(self, grid: tuple[int, int]) -> Tensor:
        known = self._places.get(grid)
        if known is None:
            known = waves(grid, self.width).to(self.device, self.dtype)
            self._places.put(grid, known, len(known))
        return known


class ResampledTower(VitTower):
    """Views of pictures, and frames of films -> rows of the decoder's width."""

    config: ResampledConfig
    projector: Resampler  # type: ignore[assignment]

    def __init__(self, config: ResampledConfig, dtype: torch.dtype, device: str) -> None:
        super().__init__(config, dtype, device, Resampler(config, dtype, device))  # type: ignore[arg-type]

    def pieces(self, items: Sequence[Features]) -> Pieces:
        """Each item has `pixel_values` [patches, numbers] and `grid` [2], of the whole or of each frame. A picture also
        has `slices` [4]: rows and columns of slices, and the grid of each; zeros: there are none. A film has `moments`
        [frames], in tenths of a second, and `together` [1]: successive frames of a group.
        """
        views = [self._views(features) for features in items]
        patches = joined([features["pixel_values"].to(self.device, self.dtype) for features in items])
        every = [each for own in views for each in own]
        x = yield from self._run_layers(patches, [each.run for each in every])
        count = self.config.queries
        return apart(self.projector(x, every), [count * sum(each.summaries for each in own) for own in views])

    def _views(self, features: Features) -> list[Views]:
        patches, numbers = features["pixel_values"], self.patch_embed.in_features
        height, width = features["grid"].tolist()
        if "moments" in features:
            groups = features["moments"].float().split(max(1, int(features["together"][0])))
            views = [Views((len(moments), height, width), moments) for moments in groups]
        else:
            rows, columns, *each = features["slices"].tolist()
            sizes = [(1, height, width), (rows * columns, *each)]
            views = [Views(size) for size in sizes[: 1 + bool(rows * columns)]]
        runs = [each.run for each in views]
        needed = sum(torch.Size(run).numel() for run in runs)
        if not all(min(run) > 0 for run in runs) or tuple(patches.shape) != (needed, numbers):
            raise RequestError(
                f"pixel_values {list(patches.shape)} do not fit views of {runs} (number, height, width): {needed} "
                f"patches of {numbers} numbers are needed"
            )
        return views

    def example(self, modality: Modality, rows: int) -> Features:
        """A blank picture with as many slices as fit into `rows`, and at least the view of the whole; a blank film has
        as many groups of one frame."""
        slices = max(1, rows // self.config.queries) - 1
        if modality == "video":
            frames = torch.zeros((1 + slices) * SIDE**2, self.patch_embed.in_features, device=self.device)
            moments = torch.arange(1 + slices)
            return {"pixel_values": frames, "grid": torch.tensor([SIDE, SIDE]), "moments": moments,
                    "together": torch.tensor([1])}  # fmt: skip
        shape = (1, slices, SIDE, SIDE) if slices else (0, 0, 0, 0)
        patches = torch.zeros((1 + slices) * SIDE**2, self.patch_embed.in_features, device=self.device)
        return {"pixel_values": patches, "grid": torch.tensor([SIDE, SIDE]), "slices": torch.tensor(shape)}


def waves(grid: tuple[int, int], width: int) -> Tensor:
    """Sines and cosines of each patch's column, then of its row: float32 [height * width, width]."""
    row, column = torch.meshgrid(*(torch.arange(side, dtype=torch.float32) for side in grid), indexing="ij")
    return torch.cat([waves_of(axis.reshape(-1), width // 2) for axis in (column, row)], dim=1)


def waves_of(places: Tensor, width: int) -> Tensor:
    """Sines, then cosines of places [n] float32: [n, width]."""
    half = width // 2
    frequency = 1.0 / 10_000 ** (torch.arange(half, dtype=torch.float32, device=places.device) / half)
    angle = places[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=1)
