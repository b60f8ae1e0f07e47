"""Which tile a product of experts takes: measured tables by card, form of the weight and shape.

The tables are measured offline and committed; `python -m tests.bench.gpu_moe_tiles` prints their lines. A shape is
looked up with the least class that holds the pairs of an expert. A shape without a line takes those of the nearest
shape of its form, and a card or a form without a table the form's rule; the log says either once. Users: the dispatch
tables of this folder.
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

SAME = 64  # pairs per expert for whose tile every product of an invariant form is cut
CLASSES = (0, 8, 16, 32, 48, 64, 128, math.inf)  # pairs of an expert; 0: few pairs, which are not sorted
Line = tuple[Tile, ...]  # by class


class Shape(NamedTuple):
    """A product."""

    experts: int
    width: int  # rows of an expert's matrix; of a gated product of gate's, and as many of up's
    depth: int
    gated: bool


def _line(*runs: tuple[int, Tile]) -> Line:
    """Tiles and for how many classes in turn each of them stands."""
    return tuple(tile for count, tile in runs for _ in range(count))


# Each is the fastest of those that an H100 measured, but for bfloat16's gate and up of up to 128 pairs, which are the
# rule's own, and for the splits, which were not measured yet.
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
    """The number of pairs for which a product is cut: 0 for pairs that are not sorted; an invariant form has one."""
    if invariant:
        return SAME * experts
    return 0 if pairs.order is None else pairs.count


def measured_tile(form: str, shape: Shape, each: float) -> Tile | None:
    """The tile for so many pairs of an expert, on this card; None: the form's rule says it."""
    line = line_of(target().arch, form, shape)
    return None if line is None else line[next(number for number, most in enumerate(CLASSES) if each <= most)]


def tile_for(form: str, shape: Shape, each: float, rule: Callable[[], Tile]) -> Tile:
    """The measured tile, or the rule's."""
    return measured_tile(form, shape, each) or rule()


@functools.cache
def line_of(arch: str, form: str, shape: Shape) -> Line | None:
    """The shape's tiles, or the nearest shape's; None: the form's rule says them."""
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
    """How unlike two shapes are, in doublings of a side."""
    return sum(abs(math.log2(mine / others)) for mine, others in zip(one[:3], other[:3]))
