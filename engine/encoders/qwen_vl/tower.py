"""The vision tower of Qwen2-VL, 2.5-VL, 2.5-Omni and 3-VL: patches of one picture or video -> rows for the decoder.

Thread: device. In: patches as the processor orders them (frames, then merge blocks of 2 x 2 patches, row by row), or
pixels, which the tower cuts into patches; and the grid (frames, height, width in patches). Out: one row per merge
block, in the same order. The tower reorders blocks so that each attention window is contiguous. Layers in `full_layers`
attend over a whole frame, other layers inside a window. Tables that depend only on the grid (tables.py) are cached for
the latest grids. Items of several requests run together as one sequence of patches; frames do not see each other. On
an accelerator all but large pictures use the graphs of graphs.py. With deepstack a row has further parts, computed from
the patches after the layers in `deep_layers`; the decoder adds them to its residual stream after its first layers.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from engine.base.errors import RequestError
from engine.base.request import Modality
from engine.encoders.qwen_vl.blocks import Merger, VisionBlock
from engine.encoders.qwen_vl.config import VisionConfig
from engine.encoders.qwen_vl.graphs import BUDGETS, TowerGraphs
from engine.encoders.qwen_vl.tables import Grid, GridParts, GridTables, exact_room, grid_parts, grid_tables, needs
from engine.encoders.recent import Recent
from engine.encoders.tower import Features, Pieces, Record, Shapes, through
from engine.kernels.image import PatchLayout, pixels_to_patches
from engine.layers.embed import Positions
from engine.layers.linear import Linear

MAX_TABLE_ROWS = 65_536  # patches whose tables are cached: about 100 bytes each per 16 dimensions of a head


class QwenVisionTower:
    """Patches -> rows of the decoder's width."""

    together = BUDGETS[-1]  # patches per run: the size of the largest graph

    def __init__(self, config: VisionConfig, dtype: torch.dtype, device: str) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        size = config.hidden_size
        kernel = (config.in_channels, config.temporal_patch_size, config.patch_size, config.patch_size)
        self.layout = PatchLayout(config.patch_size, config.merge_size, config.temporal_patch_size, dtype)
        self.patch_embed = Linear(torch.Size(kernel).numel(), size, bias=config.patch_bias, fold=kernel)
        self.positions = Positions(config.position_side**2, size) if config.position_side else None
        self.blocks = [VisionBlock(config, index in config.full_layers) for index in range(config.num_layers)]
        self.merger = Merger(config, apart=True)
        self.deep_mergers = [Merger(config, apart=False) for _ in config.deep_layers]
        self.tables: Recent[tuple[Grid, ...], GridTables] = Recent(MAX_TABLE_ROWS)
        self._parts: Recent[Grid, GridParts] = Recent(MAX_TABLE_ROWS)
        # The graphs' fixed buffers are allocated now, so that the memory profile counts them.
        numbers = self.patch_embed.in_features
        self.graphs = None if device == "cpu" else TowerGraphs(config, numbers, self.compute, dtype, device)

    @property
    def modalities(self) -> tuple[Modality, ...]:
        return self.config.modalities

    @property
    def row_width(self) -> int:
        return self.config.row_width

    def encode(self, features: Features) -> Tensor:
        return self.encode_together([features])[0]

    def weight(self, features: Shapes) -> int:
        return int(features["grid_thw"].prod())

    def encode_together(self, items: Sequence[Features]) -> list[Tensor]:
        return through(self.pieces(items))

    def pieces(self, items: Sequence[Features]) -> Pieces:
        """Runs the items; a run through a graph does not pause."""
        patches = [self._patches(features) for features in items]
        return self._run(patches, [features["grid_thw"] for features in items])

    def _patches(self, features: Features) -> Tensor:
        """The patches [patches, channels*temporal*patch*patch]: the processor's `pixel_values`, or made here from
        decoded `pixels` [frames, H, W, 3 or 4], the resampling tables `columns` and `rows`, and `normal` (mean and
        scale).
        """
        if "pixel_values" in features:
            return features["pixel_values"]
        normal = features["normal"].tolist()  # a few numbers, on the host
        return pixels_to_patches(features["pixels"], features["columns"], features["rows"], normal, self.layout)

    def example(self, modality: Modality, rows: int) -> Features:
        """A black picture, or a video of up to 16 frame pairs, about as high as wide, as large as fits into `rows`."""
        t = 1 if modality == "image" else min(16, max(1, rows // 4))
        h = math.isqrt(rows // t)
        merge = self.config.merge_size
        return self.black((t, h * merge, rows // t // h * merge), shrunk=h == 2)

    def black(self, grid: Grid, shrunk: bool) -> Features:
        """Features of a black picture or video; `shrunk`: scaled from twice the height, which runs the axes in another
        order."""
        t, h, w = grid
        height, width = h * self.config.patch_size, w * self.config.patch_size
        frames = (t * self.config.temporal_patch_size, height * (1 + shrunk), width, 3)
        pixels = torch.zeros(frames, dtype=torch.uint8, device=self.device)
        columns, rows = (torch.zeros(2, side, dtype=torch.int32, device=self.device) for side in (width, height))
        normal = torch.ones(6)
        return {"pixels": pixels, "columns": columns, "rows": rows, "normal": normal, "grid_thw": torch.tensor([grid])}

    def __call__(self, items: Sequence[Tensor], grids_thw: Sequence[Tensor]) -> list[Tensor]:
        """Each item's patches [t*h*w, channels*temporal*patch*patch] and grid [1, 3] -> rows [t*h*w / merge^2, width].

        Items that ran together still get separate tensors, so that the memory of each is freed independently.
        """
        return through(self._run(items, grids_thw))

    def _run(self, items: Sequence[Tensor], grids_thw: Sequence[Tensor]) -> Pieces:
        grids = tuple(self._grid(patches, grid_thw) for patches, grid_thw in zip(items, grids_thw))
        tables = self.tables.get(grids)
        if tables is None:
            tables = self._tables_of(grids)
            self.tables.put(grids, tables, tables.room.patches)
        lengths = [len(patches) // self.config.merge_size**2 for patches in items]
        if self.graphs is not None and tables.room.graphed:
            patches = [patches.to(self.device, self.dtype) for patches in items]
            return [rows.clone() for rows in self.graphs.run(patches, tables).split(lengths)]
        joined = (items[0] if len(items) == 1 else torch.cat(list(items))).to(self.device, self.dtype)
        rows = yield from self._layers(joined, tables)
        return [rows] if len(items) == 1 else [own.clone() for own in rows.split(lengths)]

    def picture_bytes(self, rows: int) -> int:
        return 0 if self.device == "cpu" else 3 * rows * (self.config.patch_size * self.config.merge_size) ** 2

    def record(self, record: Record) -> None:
        """Records the graphs, and drops the cached tables, which have no room of a graph."""
        if self.graphs is not None:
            self.graphs.record(record)
            self.tables = Recent(MAX_TABLE_ROWS)

    def _tables_of(self, grids: tuple[Grid, ...]) -> GridTables:
        parts = [self._parts_of(grid) for grid in grids]
        room = None if self.graphs is None else self.graphs.room(*needs(parts))
        return grid_tables(parts, room or exact_room(parts, self.config), self.device)

    def _parts_of(self, grid: Grid) -> GridParts:
        parts = self._parts.get(grid)
        if parts is None:
            parts = grid_parts(grid, self.config)
            self._parts.put(grid, parts, parts.patches)
        return parts

    def compute(self, patches: Tensor, tables: GridTables) -> Tensor:
        """patches [n, numbers] of the tower's dtype, n as in the tables -> rows [n / merge^2, width]."""
        return through(self._layers(patches, tables))

    def _layers(self, patches: Tensor, tables: GridTables) -> Generator[float, None, Tensor]:
        unit = self.config.merge_size**2
        x = self.patch_embed(patches)  # [patches, hidden]
        if self.positions is not None:
            x += self._interpolated(self.positions.table, tables).to(x.dtype)
        x = x.view(-1, unit, x.shape[-1])[tables.order].view_as(x)
        room = self.blocks[0].proj.room(x)  # [patches, hidden, padded on an accelerator]
        deep, mergers = [], iter(self.deep_mergers)
        for number, block in enumerate(self.blocks):
            block(x, tables, room)
            if number in self.config.deep_layers:
                deep.append(next(mergers)(x))
            yield len(x) / len(self.blocks)
        rows = self.merger(x)  # [blocks, out_hidden_size]
        return (torch.cat([rows, *deep], dim=1) if deep else rows)[tables.restore]

    def _interpolated(self, table: Tensor, tables: GridTables) -> Tensor:
        """The position of each patch, a weighted sum of learned positions: [patches, hidden] float32."""
        total = functional.embedding(tables.places[:, 0], table) * tables.shares[:, :1]
        for tap in range(1, tables.places.shape[1]):
            total += functional.embedding(tables.places[:, tap], table) * tables.shares[:, tap, None]
        return total

    def _grid(self, patches: Tensor, grid_thw: Tensor) -> Grid:
        t, h, w = (int(size) for size in grid_thw.reshape(-1))
        merge, numbers = self.config.merge_size, self.patch_embed.in_features
        if min(t, h, w) < 1 or h % merge or w % merge or tuple(patches.shape) != (t * h * w, numbers):
            raise RequestError(
                f"pixel_values {list(patches.shape)} do not fit the grid {t} x {h} x {w}: {t * h * w} patches of "
                f"{numbers} numbers are needed, with height and width multiples of {merge}"
            )
        return t, h, w
