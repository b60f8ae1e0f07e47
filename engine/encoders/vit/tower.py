"""VitTower: the patches of a picture -> rows for the decoder, by a plain vision transformer and a projector.

Thread: device. In: patches row by row, of consecutive tiles of one size, or of one picture of any size with its grid;
in families with newlines also the order of the projector's rows and the newline. Out: rows. Each tile attends to
itself only, so pictures of several requests run together. The tower runs eagerly.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from engine.base.errors import RequestError
from engine.base.request import Modality
from engine.encoders.recent import Recent
from engine.encoders.tower import Features, PatchTower, Pieces, apart, bounds_of, joined, layer_by_layer
from engine.encoders.vit.config import VitConfig
from engine.encoders.vit.names import NAMES
from engine.encoders.vit.parts import Ending, Projector, Rotations, Run, VitLayer, vit_norm
from engine.layers.bare import Bare
from engine.layers.linear import Linear

MAX_TABLE_ROWS = 65_536  # patches whose rotations are cached
Grid = tuple[int, int]


class VitTower(PatchTower):
    """Patches -> rows of the decoder's width."""

    config: VitConfig

    def __init__(self, config: VitConfig, dtype: torch.dtype, device: str, ending: Ending | None = None) -> None:
        """`ending` replaces the projector after the layers."""
        super().__init__(config, dtype, device)
        size, names = config.hidden_size, NAMES[config.kind]
        kernel = (config.in_channels, config.patch_size, config.patch_size)
        stretched = config.learned_side and not config.bucketed
        fold = () if stretched else kernel  # a linear layer in that case, else a convolution
        self.patch_embed = Linear(torch.Size(kernel).numel(), size, bias=config.patch_bias, fold=fold)
        once = (1,) * names.batch
        self.class_token = Bare(names.class_kind, *once, size) if config.class_token else None
        side = config.side or config.learned_side
        self.positions = Bare(names.position_kind, *once[:1], side**2 + config.class_token, size) if side else None
        self._places = buckets(config.side).to(device) if config.bucketed and config.side else None
        self.pre_norm = vit_norm(config) if config.pre_norm else None
        self.layers = [VitLayer(config) for _ in range(config.num_layers)]
        self.post_norm = vit_norm(config) if config.post_norm else None
        self.projector: Ending = ending or Projector(config)
        self.newline = Bare("image_newline", config.row_width) if config.projector.newline else None
        self._rotations: Recent[Grid, Rotations] = Recent(MAX_TABLE_ROWS)
        self._stretched: Recent[Grid, Tensor] = Recent(MAX_TABLE_ROWS)

    def pieces(self, items: Sequence[Features]) -> Pieces:
        """Each item has `pixel_values` [patches, numbers] and `grid` [2], the grid of each of its tiles.

        With a newline, also `places` and `shares` [rows, taps]: an output row is a weighted sum of the rows at
        `places`. The newline's place is after all rows.
        """
        grids = [self._grid(features) for features in items]
        runs = [(len(each["pixel_values"]) // (grid[0] * grid[1]), *grid) for each, grid in zip(items, grids)]
        patches = joined([features["pixel_values"].to(self.device, self.dtype) for features in items])
        lengths = [self._num_rows(features) for features in items]
        if len(set(grids)) == 1:  # all items' tiles have one size, so they form one run
            runs = [(sum(tiles for tiles, _, _ in runs), *grids[0])]
        rows = yield from self._rows_of(patches, runs)
        if self.newline is None:
            return apart(rows, lengths)
        return [self._in_order(own, self.newline.value, features) for own, features in zip(rows.split(lengths), items)]

    def _num_rows(self, features: Features) -> int:
        return len(features["pixel_values"]) // self.config.projector.shrink**2

    def _in_order(self, rows: Tensor, newline: Tensor, features: Features) -> Tensor:
        """The rows of one item in the decoder's order, as a new tensor."""
        rows = torch.cat([rows, newline[None]])
        places, shares = features["places"].to(self.device), features["shares"].to(self.device)
        if places.shape[1] == 1:
            return rows[places[:, 0]]
        taps = [rows[places[:, tap]] * shares[:, tap, None] for tap in range(places.shape[1])]
        return ((taps[0] + taps[1]) + (taps[2] + taps[3])).to(rows.dtype)

    def example(self, modality: Modality, rows: int) -> Features:
        """Blank tiles, at least one; or a blank picture, about as high as wide."""
        merge, side = self.config.projector.shrink, self.config.side
        if side:
            height = width = side
            each = (modality == "video" and self.config.frame_rows) or (side // merge) ** 2
            tiles = max(1, rows // each)
            rows = tiles * each
        else:
            height, tiles = math.isqrt(rows), 1
            width = rows // height * merge
            height *= merge
        patches = torch.zeros(tiles * height * width, self.patch_embed.in_features, device=self.device)
        share = torch.zeros(rows, 4 if self.newline is not None else 0, device=self.device)
        return {"pixel_values": patches, "grid": torch.tensor([height, width]), "places": share.long(), "shares": share}

    def _rows_of(self, patches: Tensor, runs: Sequence[Run]) -> Generator[float, None, Tensor]:
        """patches [sum of tiles * height * width, numbers] of the tower's dtype -> [rows, row_width]."""
        x = yield from self._run_layers(patches, runs)
        return self.projector(x, runs)

    def _run_layers(self, patches: Tensor, runs: Sequence[Run]) -> Generator[float, None, Tensor]:
        """patches as in `_rows_of` -> the layers' rows [patches, hidden].

        Tiles with a class token all have the same size, the tower's picture size.
        """
        x = self._placed(self.patch_embed(patches), runs)
        if self.pre_norm is not None:
            x = self.pre_norm(x)
        extra = int(self.class_token is not None)
        bounds = bounds_of([height * width + extra for tiles, height, width in runs for _ in range(tiles)], x.device)
        turn = self._turn(runs) if self.positions is None else None
        yield from layer_by_layer(self.layers, x, bounds, turn)
        return x if self.post_norm is None else self.post_norm(x)

    def _placed(self, x: Tensor, runs: Sequence[Run]) -> Tensor:
        """x [patches, hidden] with positions added, and with the class token before each tile."""
        if self.positions is None:
            return x
        size = self.config.hidden_size
        if self.config.learned_side:
            return x + joined([self._places_of((height, width)) for tiles, height, width in runs for _ in range(tiles)])
        x = x.view(-1, self.config.side**2, size)
        if self.class_token is not None:
            token = self.class_token.value.view(1, 1, -1).expand(len(x), 1, -1)
            x = torch.cat([token, x], dim=1)
        places = self.positions.value.view(-1, size)
        return (x + (places if self._places is None else places[self._places])).view(-1, size)

    def _places_of(self, grid: Grid) -> Tensor:
        """The learned positions, interpolated to a picture's grid: [height * width, hidden]."""
        known = self._stretched.get(grid)
        if known is None:
            assert self.positions is not None
            side, size = self.config.learned_side, self.config.hidden_size
            if self.config.bucketed:
                return self.positions.value.view(-1, size)[buckets_of(grid, side).to(self.device)]
            learned = self.positions.value.view(1, side, side, size).permute(0, 3, 1, 2).float()
            resized = interpolate(learned, size=grid, mode="bilinear", align_corners=False, antialias=True)
            known = resized[0].permute(1, 2, 0).reshape(-1, size).to(self.dtype)
            self._stretched.put(grid, known, len(known))
        return known

    def _turn(self, runs: Sequence[Run]) -> Rotations:
        """cos, sin [patches, head_dim / 2] of pictures of different sizes."""
        turns = [self._turn_of((height, width)) for tiles, height, width in runs for _ in range(tiles)]
        cos, sin = zip(*turns)
        return joined(cos), joined(sin)

    def _turn_of(self, grid: Grid) -> Rotations:
        """cos, sin [height * width, head_dim / 2]: half of the pairs are rotated by the row, half by the column."""
        known = self._rotations.get(grid)
        if known is None:
            head = self.config.hidden_size // self.config.num_heads
            pairs = torch.arange(0, head, 2, dtype=torch.float32)
            inv_freq = 1.0 / self.config.rope_theta ** (pairs / head)
            row, column = torch.meshgrid(*(torch.arange(side) for side in grid), indexing="ij")
            angle = torch.cat([row.reshape(-1, 1) * inv_freq[0::2], column.reshape(-1, 1) * inv_freq[1::2]], dim=1).to(
                self.device
            )
            known = angle.cos(), angle.sin()
            self._rotations.put(grid, known, len(angle))
        return known

    def _grid(self, features: Features) -> Grid:
        height, width = (int(size) for size in features["grid"].reshape(-1))
        patches, numbers, merge = features["pixel_values"], self.patch_embed.in_features, self.config.projector.merge
        whole = min(height, width) > 0 and not len(patches) % (height * width) and patches.shape[1] == numbers
        fits = {height, width} == {self.config.side} if self.config.side else not (height % merge or width % merge)
        if not whole or not fits or not len(patches):
            raise RequestError(
                f"pixel_values {list(patches.shape)}: {numbers} numbers a patch, tiles of {height} x {width} patches "
                f"with sides of {self.config.side or f'multiples of {merge}'} are needed"
            )
        return height, width


def buckets(side: int) -> Tensor:
    """The position index of each patch, int64 [side^2], from its fraction of the side, with the rounding of
    training."""
    bounds = torch.arange(1 / side, 1.0, 1 / side)
    shares = (torch.arange(side, dtype=torch.float32) * (1.0 / torch.tensor(side))).clamp(max=1.0 - 1e-6)
    place = torch.bucketize(shares, bounds, right=True)
    return (place[:, None] * side + place).view(-1)


def buckets_of(grid: Grid, side: int) -> Tensor:
    """The index of each patch's position in a square of `side`, int64 [height * width], for pictures of any shape.

    By its fraction of the picture's sides, with the rounding of modeling_navit_siglip.py in MiniCPM-V.
    """
    bounds = torch.arange(1 / side, 1.0, 1 / side)
    row, column = (
        torch.bucketize(torch.arange(0, 1 - 1e-6, float(1 / torch.tensor(length))), bounds, right=True)[:length]
        for length in grid
    )
    return (row[:, None] * side + column).view(-1)
