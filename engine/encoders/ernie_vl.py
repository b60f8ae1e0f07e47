"""The vision tower of ERNIE 4.5 VL: patches of a picture, or of a film's frames -> rows for the decoder.

Thread: device. In: patches in blocks of 2 x 2, frame after frame, and their grid; a film has an even number of frames.
Out: a row per block, for films a row per block of a pair of frames. The layers, rotations and graphs are those of
Qwen2-VL's tower, whose merger makes the block's first two products. Then the resampler joins the blocks at the same
place of two frames, or a picture's block with itself:

    block = norm(merged)       row = RMSNorm(W norm(fc2 gelu(fc1 [block of frame 2k, block of frame 2k + 1])))
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from engine.base.errors import ConfigError, RequestError
from engine.base.request import Modality
from engine.checkpoint.section import Section
from engine.encoders.qwen_vl.config import VisionConfig, read_vision2
from engine.encoders.qwen_vl.names import Names, rows
from engine.encoders.qwen_vl.tower import QwenVisionTower
from engine.encoders.tower import Features, Pieces
from engine.kernels.activation import gelu
from engine.layers.linear import Linear
from engine.layers.norm import LayerNorm, RMSNorm
from engine.weights.table import Row

FRAMES = 2  # frames of a row
EPS = 1e-6
VISION, CONNECTOR = "vision_model", "resampler_model."
SPATIAL, TEMPORAL = CONNECTOR + "spatial_linear.", CONNECTOR + "temporal_linear."
OWN = ("vision.merger.norm", "vision.merger.inner", "vision.merger.outer")  # in the connector of the checkpoint
ROWS = (
    *(row for row in rows("vision", VISION, Names(up=("mlp.fc1",), down="mlp.fc2")) if row.target not in OWN),
    Row((VISION + ".ln",), "vision.merger.norm"),
    Row((SPATIAL + "0",), "vision.merger.inner"),
    Row((SPATIAL + "2",), "vision.merger.outer"),
    Row((SPATIAL + "3",), "vision.spatial_norm"),
    Row((TEMPORAL + "0",), "vision.temporal_in"),
    Row((TEMPORAL + "2",), "vision.temporal_out"),
    Row((TEMPORAL + "3",), "vision.temporal_norm"),
    Row((CONNECTOR + "mlp",), "vision.project"),
    Row((CONNECTOR + "after_norm",), "vision.after_norm"),
)


@dataclass(frozen=True, slots=True)
class ErnieVisionConfig(VisionConfig):
    """The tower's numbers."""

    row_eps: float = 1e-5  # of the norm of the rows: the decoder's


def read_vision(section: Section) -> ErnieVisionConfig:
    """The tower's numbers, checked; rows have the decoder's width."""
    assert section.outer is not None, "a tower's section lies in another one"
    size, eps = section.size("hidden_size", 1280), section.number("rms_norm_eps", EPS)
    frames = section.integer("temporal_merge_size", FRAMES)
    if (frames, eps) != (FRAMES, EPS):
        raise ConfigError(
            f"{section.path}: temporal_merge_size={frames} and rms_norm_eps={eps}; this tower is supported with "
            f"{FRAMES} and {EPS}"
        )
    body = section.outer.section("text_config")
    given = {**section.values, "embed_dim": size, "temporal_patch_size": 1, "hidden_size": body.size("hidden_size")}
    read = read_vision2(Section(given, section.path, section.outer))
    inner, row_eps = section.size("intermediate_size", 4 * size), body.number("rms_norm_eps", 1e-5)
    return ErnieVisionConfig(**{**asdict(read), "intermediate_size": inner, "row_eps": row_eps})


class ErnieVisionTower(QwenVisionTower):
    """Patches -> rows of the decoder's width."""

    def __init__(self, config: ErnieVisionConfig, dtype: torch.dtype, device: str) -> None:
        block = config.hidden_size * config.merge_size**2
        super().__init__(replace(config, out_hidden_size=block), dtype, device)
        self.patch_embed.fold = (self.patch_embed.in_features,)  # a linear layer in the checkpoint, too
        self.out_width = config.out_hidden_size
        self.spatial_norm = LayerNorm(block, EPS)
        self.temporal_in = Linear(FRAMES * block, block, bias=True)
        self.temporal_out = Linear(block, block, bias=True)
        self.temporal_norm = LayerNorm(block, EPS)
        self.project = Linear(block, self.out_width, bias=True)
        self.after_norm = RMSNorm(self.out_width, config.row_eps)

    @property
    def row_width(self) -> int:
        return self.out_width

    def pieces(self, items: Sequence[Features]) -> Pieces:
        grids = [features["grid_thw"].reshape(-1).tolist() for features in items]
        for times, height, width in grids:
            if times != 1 and times % FRAMES:
                raise RequestError(f"the grid {times} x {height} x {width} must have 1 frame, or pairs of frames")
        blocks = yield from super().pieces(items)
        return [self.resampled(own, times) for own, (times, _, _) in zip(blocks, grids)]

    def resampled(self, blocks: Tensor, times: int) -> Tensor:
        """The merger's rows of one item [times * blocks of a frame, width] -> rows of the decoder's width."""
        x = self.spatial_norm(blocks).view(times, -1, blocks.shape[1])
        pairs = torch.cat([x[::FRAMES], x[1::FRAMES] if times > 1 else x], dim=2).flatten(0, 1)
        x = self.temporal_out(gelu(self.temporal_in(pairs)))
        return self.after_norm(self.project(self.temporal_norm(x)))

    def example(self, modality: Modality, rows: int) -> Features:
        """A black picture, or a film of up to 8 pairs of frames, about as high as wide, of at most `rows` rows."""
        pairs = 1 if modality == "image" else min(8, max(1, rows // 4))
        height, merge = math.isqrt(rows // pairs), self.config.merge_size
        times = 1 if modality == "image" else FRAMES * pairs
        return self.black((times, height * merge, rows // pairs // height * merge), shrunk=height == 2)
