"""Tile choice for products of experts: measured tables by card, form of the weight and shape.

The tables are measured offline and committed; `python -m tests.bench.gpu_moe_tiles` prints their lines. The lookup uses
the shape and the least class that includes the number of pairs per expert. A shape without a line uses the line of the
nearest shape of its form. A card or form without a table uses the form's rule. Both cases are logged once.
Users: the dispatch tables of this folder.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from typing import NamedTuple

from engine.kernels.moe.grouped import Tile
from engine.kernels.moe.sort import Pairs
from engine.kernels.target import target

log = logging.getLogger("omniloop.engine")

SAME = 64  # pairs per expert that determine the tile of every product of an invariant form
CLASSES = (0, 8, 16, 32, 48, 64, 128, math.inf)  # pairs per expert; 0: few pairs, not sorted
Line = tuple[Tile, ...]  # one tile per class


class Shape(NamedTuple):
    """Shape of a product."""

    experts: int
    width: int  # rows of an expert's matrix; if gated, rows of gate (up has as many)
    depth: int
    gated: bool


def _line(*runs: tuple[int, Tile]) -> Line:
    """Build a line from (number of consecutive classes, tile) runs."""
    return tuple(tile for count, tile in runs for _ in range(count))


# Each tile is the fastest measured on an H100, with two exceptions: bfloat16's gate and up for up to 128 pairs use the
# rule's tiles, and splits were not measured yet.
LINES: dict[str, dict[str, dict[Shape, Line]]] = {
    "sm_90": {
        "bfloat16": {  # Qwen3-30B-A3B
            Shape(128, 768, 2048, gated=True): _line(
                (3, Tile(16, 32, 128, 4, 4)), (1, Tile(32, 32, 128, 4, 4)), (2, Tile(64, 64, 64, 4, 4)),
                (1, Tile(128, 64, 64, 4, 8)), (1, Tile(128, 128, 64, 4, 8, persistent=True)),
            ),
            Shape(128, 2048, 768, gated=False): _line(
                (1, Tile(16, 128, 128, 4, 4)), (2, Tile(16, 128, 128, 3, 4)), (3, Tile(64, 128, 64, 4, 4)),
                (2, Tile(128, 128, 64, 3, 4, persistent=True)),
            ),
        },
        "E4M3 by 128": {  # Qwen3-30B-A3B
            Shape(128, 768, 2048, gated=True): _line(
                (1, Tile(16, 64, 128, 3, 4)), (1, Tile(16, 64, 128, 6, 4)), (2, Tile(32, 64, 128, 3, 4)),
                (2, Tile(64, 64, 64, 3, 4, values=True)), (2, Tile(128, 128, 128, 3, 8, values=True)),
            ),
            Shape(128, 2048, 768, gated=False): _line(
                (1, Tile(16, 64, 128, 3, 4)), (1, Tile(16, 128, 128, 3, 4)), (1, Tile(32, 128, 128, 4, 4)),
                (1, Tile(64, 128, 128, 3, 4)), (2, Tile(64, 128, 64, 3, 4, values=True)),
                (1, Tile(128, 128, 64, 3, 4, values=True)), (1, Tile(128, 128, 128, 2, 4, values=True)),
            ),
        },
        "E4M3 by E4M3": {  # Qwen3-30B-A3B
            Shape(128, 768, 2048, gated=True): _line(
                (2, Tile(16, 128, 128, 3, 4)), (4, Tile(32, 128, 128, 3, 4, least=16)),
                (2, Tile(64, 128, 128, 3, 8, least=16)),
            ),
            Shape(128, 2048, 768, gated=False): _line(
                (3, Tile(16, 64, 128, 3, 4)), (5, Tile(64, 64, 128, 3, 4)),
            ),
        },
        "MXFP4": {  # gpt-oss-20b
            Shape(32, 2880, 2880, gated=True): _line(
                (1, Tile(16, 64, 64, 3, 4, splits=4)), (1, Tile(16, 64, 128, 3, 4, values=True)),
                (1, Tile(32, 64, 128, 3, 4, values=True)), (4, Tile(64, 64, 64, 3, 4, values=True)),
                (1, Tile(128, 64, 64, 3, 4, values=True)),
            ),
            Shape(32, 2880, 2880, gated=False): _line(
                (1, Tile(16, 128, 64, 3, 4, splits=5)), (1, Tile(16, 64, 128, 3, 4, values=True)),
                (1, Tile(32, 64, 128, 4, 4, values=True)), (1, Tile(64, 64, 128, 3, 4, values=True)),
                (1, Tile(64, 128, 64, 3, 4, values=True)), (1, Tile(128, 128, 64, 3, 4, values=True)),
                (1, Tile(64, 128, 64, 3, 4, values=True)), (1, Tile(128, 128, 64, 3, 4, values=True)),
            ),
        },
        "INT4 by 128": {  # Qwen3-30B-A3B
            Shape(128, 768, 2048, gated=True): _line(
                (1, Tile(16, 64, 128, 3, 4)), (1, Tile(16, 64, 128, 3, 4, values=True)),
                (1, Tile(32, 64, 128, 3, 4, values=True)), (3, Tile(64, 64, 64, 3, 4, values=True)),
                (2, Tile(128, 128, 128, 3, 8, values=True)),
            ),
            Shape(128, 2048, 768, gated=False): _line(
                (1, Tile(16, 64, 128, 3, 4)), (1, Tile(16, 128, 128, 3, 4, values=True)),
                (1, Tile(32, 128, 128, 4, 4, values=True)), (3, Tile(64, 128, 128, 3, 4, values=True)),
                (2, Tile(128, 128, 128, 3, 4, values=True)),
            ),
        },
    }
}  # fmt: skip


def count_of(pairs: Pairs, experts: int, invariant: bool) -> int:
    """Return the number of pairs that determines a product's tile: 0 for unsorted pairs; constant for invariant
    forms."""
    if invariant:
        return SAME * experts
    return 0 if pairs.order is None else round(pairs.count * pairs.share)


def measured_tile(form: str, shape: Shape, each: float) -> Tile | None:
    """Return this card's measured tile for `each` pairs per expert, or None: the form's rule decides."""
    line = line_of(target().arch, form, shape)
    return None if line is None else line[next(number for number, most in enumerate(CLASSES) if each <= most)]


def tile_for(form: str, shape: Shape, each: float, rule: Callable[[], Tile]) -> Tile:
    """Return the measured tile, or else the rule's."""
    return measured_tile(form, shape, each) or rule()


@functools.cache
def line_of(arch: str, form: str, shape: Shape) -> Line | None:
    """Return the tiles of the shape or of the nearest shape, or None: the form's rule decides."""
    lines = LINES.get(arch, {}).get(form, {})
    if shape in lines:
        return lines[shape]
    others = [other for other in lines if other.gated == shape.gated]
    nearest = min(others, key=functools.partial(_distance, shape), default=None)
    taken = "a rule says them" if nearest is None else f"those of {nearest[:3]} are taken"
    what = "gate and up" if shape.gated else "down"
    log.info(
        "experts %s of %s in %s have no measured tiles on %s: %s; `python -m tests.bench.gpu_moe_tiles` measures",
        shape[:3], what, form, arch, taken,
    )  # fmt: skip
    return None if nearest is None else lines[nearest]


def _distance(one: Shape, other: Shape) -> float:
    """Return the distance of two shapes: the sum of doublings by which their sides differ."""
    return sum(abs(math.log2(mine / others)) for mine, others in zip(one[:3], other[:3]))
