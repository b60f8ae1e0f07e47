"""Choice of the kernel for a product, by card and shape: a kernel of this project or the vendor's library.

The tables are measured offline and committed; `python -m tests.bench.gpu_products` prints the choice for each shape.
One row: gemm/dense_row multiplies a weight [N, K] that is in ONE_ROW or small enough for the rule of `one_row`.
Few rows: a weight [N, K] is looked up with the least row class that includes the rows. None means the vendor's library,
as do cards and row classes without an entry. For a shape without an entry `_by_rule` chooses, up to 32 rows.
Up to 128 rows: gated products of the shapes in ONE_WAVE, whose tiles form one wave (gemm/gated_one_wave).
Many rows: gated products whose tiles fill the waves of gemm/gated_persistent sufficiently (LEAST_FILL).
"""

from __future__ import annotations

import functools

from engine.kernels.gemm.dense_row import RowCut
from engine.kernels.gemm.gated_one_wave import MAX_ROWS, SHARED_MEMORY, columns_of
from engine.kernels.gemm.gated_persistent import DESCRIBED
from engine.kernels.gemm.split_k import MAX_TILES, Split
from engine.kernels.target import Target, target

# Numbers of rows; one row costs as much as 16. They are powers of two, for which a start compiles kernels.
CLASSES = (16, 32, 64, 128, 256)
Choice = tuple[Split | None, ...]  # one per class

# Comments: microseconds of the vendor's product (with silu·mul if gated) -> of ours, H100, bfloat16, at 1, 32, 64 rows.
SHAPES: dict[str, dict[tuple[int, int, bool], Choice]] = {
    "sm_90": {
        # Qwen3-0.6B: q|k|v, o, gate|up, down; at 1, 32, 64; 128, 256 rows. From 64 rows on (o, down: always) ours
        # includes the fused norm; the vendor's includes the norm after o and down. Single products do not add up, so
        # from 65 rows on the choice follows the time of a layer without attention: at 72, 96, 128, 160, 192, 256 rows
        # 36 37 38 39 40 43 -> 28 28 28 33 33 34.
        (4096, 1024, False): (  # 5.4 5.8 5.8; 6.0 7.0 -> 5.0 5.4 6.2; 5.2 6.1
            Split(64, 256, 2, 3, 4), Split(64, 256, 2, 3, 4), Split(32, 128, 1, 6, 4),
            Split(64, 128, 1, 4, 4, 64), Split(64, 64, 1, 6, 4, 128),
        ),
        (1024, 2048, False): (  # 7.2 8.2 8.3; 8.3 9.1 -> 4.3 5.0 5.8; 6.5 .
            Split(64, 256, 4, 3, 4), Split(64, 256, 4, 3, 4), Split(16, 256, 2, 4, 4),
            Split(64, 128, 4, 4, 4, 64), Split(64, 128, 2, 4, 4, 64),
        ),
        (3072, 1024, True): (  # 8.1 8.3 8.6; 9.3 10.5 -> 7.0 7.3 8.7; 7.1 8.9
            Split(32, 128, 4, 4, 4), Split(16, 256, 1, 3, 4), Split(16, 256, 1, 3, 4),
            Split(32, 64, 1, 6, 4, 128), Split(64, 64, 1, 5, 8, 128),
        ),
        (1024, 3072, False): (  # 8.6 9.1 9.3; 9.8 10.9 -> 5.3 6.1 6.7; 7.4 8.4
            Split(64, 256, 6, 3, 4), Split(64, 256, 6, 3, 4), Split(16, 256, 2, 4, 4),
            Split(64, 128, 4, 4, 4, 64), Split(64, 128, 2, 4, 4, 64),
        ),
        # Qwen3-8B, Llama-3-8B
        (6144, 4096, False): (  # 20.9 21.6 20.8 -> 18.5 19.4 20.0
            Split(64, 256, 1, 3, 4), Split(64, 256, 1, 3, 4), Split(64, 128, 1, 4, 4)
        ),
        (4096, 4096, False): (  # 15.6 14.6 14.8 -> 13.2 14.0; 64 with the norm after them 18.3 -> 17.1
            Split(64, 128, 4, 4, 4), Split(64, 256, 2, 3, 4), Split(64, 256, 2, 3, 4)
        ),
        (12288, 4096, True): (  # 73.5 75.7 77.4 -> 68.8 71.6 73.3
            Split(32, 128, 1, 4, 4), Split(32, 128, 1, 4, 4), Split(32, 128, 1, 3, 4)
        ),
        (4096, 12288, False): (  # 38.6 40.2 41.6 -> 36.1 37.5 39.4
            Split(64, 128, 4, 4, 4), Split(64, 256, 2, 3, 4), Split(64, 256, 2, 3, 4)
        ),
        # Qwen2.5-7B and Qwen2.5-VL-7B
        (4608, 3584, False): (None, None, None),  # 14.2 14.4 14.6; ours 14.3 15.7 18.0
        (3584, 3584, False): (Split(64, 256, 2, 3, 4), Split(64, 256, 2, 3, 4), None),  # 11.7 11.8 11.8 -> 11.0 11.4
        (18944, 3584, True): (  # 99.1 101.4 105.0 -> 93.5 96.5 100.2
            Split(32, 128, 1, 4, 4), Split(16, 256, 1, 3, 4), Split(16, 128, 1, 4, 4)
        ),
        (3584, 18944, False): (  # 52.8 53.3 54.3 -> 48.4 49.8 52.2
            Split(64, 256, 2, 3, 4), Split(64, 256, 2, 3, 4), Split(64, 256, 2, 3, 4)
        ),
        # The head of Qwen3-0.6B; its matrix is read once per step
        (151936, 1024, False): (  # 111 118 123 -> 102 110 114
            Split(64, 128, 1, 4, 4), Split(64, 128, 1, 3, 4), Split(64, 128, 1, 3, 4)
        ),
    }
}  # fmt: skip

# By (width, depth, gated). Comments: microseconds for one row by the choices above (with the model's bias, and with a
# norm's kernel if the choice needs one) -> by gemm/dense_row; H100, bfloat16.
ONE_ROW: dict[str, dict[tuple[int, int, bool], RowCut]] = {
    "sm_90": {
        # Qwen3-0.6B; a step 905 -> 728
        (4096, 1024, False): RowCut(4, 256, 1),  # 5.1 -> 3.7
        (1024, 2048, False): RowCut(2, 256, 1),  # 4.1 -> 2.8
        (3072, 1024, True): RowCut(4, 512, 2),  # 7.5 -> 5.9
        (1024, 3072, False): RowCut(2, 1024, 4),  # 5.3 -> 3.2
        # Qwen3-8B; its q|k|v and down would gain 3 and 4 %
        (12288, 4096, True): RowCut(2, 2048, 8),  # 71.9 -> 68.3
        # gpt-oss-20b; its o reads while attention waits: with one warp, RowCut(2, 256, 1), a step takes 60 us more
        (5120, 2880, False): RowCut(1, 512, 2),  # 15.4 -> 12.2
        (2880, 4096, False): RowCut(4, 512, 2),  # 15.5 -> 9.9
        # Qwen3-30B-A3B
        (5120, 2048, False): RowCut(4, 256, 1),  # 12.3 -> 8.1
        (2048, 4096, False): RowCut(2, 256, 1),  # 7.9 -> 7.4
        # Qwen3-4B, Llama-3.2-3B, for which the rule has another cut or none
        (9728, 2560, True): RowCut(2, 2048, 8),  # 39.9 -> 37.0
        (3072, 3072, False): RowCut(8, 1024, 4),  # 9.7 -> 8.1
        (8192, 3072, True): RowCut(2, 1024, 4),  # 38.6 -> 36.2
    }
}
ROW_DEPTH, ROW_VALUES = 3072, 1 << 25  # limits for shapes without an entry, up to which gemm/dense_row computes one row

# Numbers of rows, by (width, depth) of gate and of up. Comments: microseconds of the vendor's product with silu·mul ->
# of ours, at 96, 128 rows, H100, bfloat16.
ONE_WAVE: dict[str, dict[tuple[int, int], range]] = {
    "sm_90": {
        # 80.1 82.7 -> 77.4 77.8; a layer without attention 170 169 -> 165 162; tiles of 256 rows gained nothing
        # at 193 to 256 rows; fewer than 96 rows, which leave more of a tile empty, were not measured
        (12288, 4096): range(96, 129),
        (18944, 3584): range(96, 129),  # 110 112 -> 103 104 in wide tiles
    }
}

MANY_ROWS = 512  # with fewer rows the vendor's smaller tiles are faster
# Minimum share of filled waves, by (width, depth) of gate and of up. Comments: microseconds of the vendor's product
# with silu·mul -> of ours, at 512, 1,024, 2,048 rows, H100, bfloat16. Between these, the time of ours grows with the
# number of waves, and the vendor's with the number of rows.
LEAST_FILL: dict[str, dict[tuple[int, int], float]] = {
    "sm_90": {
        (3072, 1024): 0.8,  # 15.6 25.5 49.5 -> 14.5 25.6 37.1, filled 0.73 0.73 0.97
        (9728, 2560): 0.85,  # 83.5 162 318 -> 83.9 137 269, filled 0.77 0.92 0.92
        (12288, 4096): 0.9,  # 146 283 566 -> 133 260 523, filled 0.97; 768 rows 212 -> 212, filled 0.87
        (18944, 3584): 0.84,  # 203 383 793 -> 191 348 695, filled 0.90 1.00 1.00; 576 rows 237 -> 230, filled 0.84
    }
}
OTHER_FILL = 0.83  # for other shapes: (11008, 2048) and (27648, 5120) took 2 to 23 % less from this share on


def one_wave_gated(rows: int, width: int, depth: int) -> bool:
    """Whether this card uses gemm/gated_one_wave for `rows` rows and weights gate and up [width, depth]."""
    return rows <= MAX_ROWS and in_one_wave(target(), rows, width, depth)


def in_one_wave(device: Target, rows: int, width: int, depth: int) -> bool:
    """Like `one_wave_gated`, for a given device and at most MAX_ROWS rows."""
    if rows not in ONE_WAVE.get(device.arch, {}).get((width, depth), ()):
        return False
    return -(-width // sum(columns_of(width))) <= device.num_units and device.shared_memory >= SHARED_MEMORY


def many_gated(rows: int, width: int, depth: int) -> bool:
    """Whether this card uses gemm/gated_persistent for `rows` rows and weights gate and up [width, depth]."""
    return rows >= MANY_ROWS and fills(target(), rows, width, depth)


def fills(device: Target, rows: int, width: int, depth: int) -> bool:
    """Like `many_gated`, for a given device and at least MANY_ROWS rows."""
    least = _least_fill(device, width, depth)
    return least is not None and fill(device, rows, width) >= least


def fill(device: Target, rows: int, width: int) -> float:
    """Return the share of gemm/gated_persistent's waves of tiles that these rows fill."""
    tiles = -(-rows // DESCRIBED.block_m) * -(-width // DESCRIBED.block_n)
    return rows * width / (-(-tiles // device.num_units) * device.num_units * DESCRIBED.block_m * DESCRIBED.block_n)


def fullness(device: Target, rows: int, width: int, depth: int) -> float:
    """Return how much of the device `rows` rows use with weights gate and up [width, depth], to compare batches.

    The tiles of the vendor's library are unknown: if it multiplies, return the least share for which ours is used.
    """
    least = _least_fill(device, width, depth)
    if least is None:
        return 1.0
    return max(fill(device, rows, width), least) if rows >= MANY_ROWS else least


def _least_fill(device: Target, width: int, depth: int) -> float | None:
    """Return the minimum share of filled waves for gemm/gated_persistent; None: it is never used."""
    shapes = LEAST_FILL.get(device.arch)
    if shapes is None or depth % DESCRIBED.block_k or width % 8:  # descriptors need multiples of 16 bytes
        return None
    return shapes.get((width, depth), OTHER_FILL)


@functools.cache
def one_row(width: int, depth: int, gated: bool) -> RowCut | None:
    """Return how gemm/dense_row multiplies one row by a weight [width, depth] (gated: two), or None: it does not."""
    return choose_for_one_row(target(), width, depth, gated)


def choose_for_one_row(device: Target, width: int, depth: int, gated: bool) -> RowCut | None:
    """Like `one_row`, for a given device."""
    shape, shapes = (width, depth, gated), ONE_ROW.get(device.arch)
    if shapes is None or shape in shapes:
        return None if shapes is None else shapes[shape]
    if shape in SHAPES.get(device.arch, {}) or depth > ROW_DEPTH or width * depth * (1 + gated) > ROW_VALUES:
        return None
    # The 16 such products of Qwen2.5 0.5B to 3B, Qwen3 1.7B and 4B, Llama 3.2 1B and 3B take 7 to 74 % less time.
    if depth <= 2048:
        return RowCut(2, 512, 2) if gated else RowCut(4, 256, 1)
    return RowCut(2, 1024, 4) if gated else RowCut(4, 1024, 4)


def few_rows(rows: int, width: int, depth: int, gated: bool) -> Split | None:
    """Return how this card multiplies `rows` rows by a weight [width, depth] (gated: two); None: the vendor's
    library."""
    return few_rows_cut(rows, width, depth, gated) if rows <= CLASSES[-1] else None


@functools.cache
def few_rows_cut(rows: int, width: int, depth: int, gated: bool) -> Split | None:
    return choose(target(), rows, width, depth, gated)


def choose(device: Target, rows: int, width: int, depth: int, gated: bool) -> Split | None:
    """Like `few_rows`, for a given device."""
    shapes = SHAPES.get(device.arch)
    if shapes is None or not 0 < rows <= CLASSES[-1] or depth % 64:
        return None
    known = shapes.get((width, depth, gated))
    if known is not None:
        return next((cut for cut, most in zip(known, CLASSES) if rows <= most), None)
    return _by_rule(device.num_units, width, depth, gated) if rows <= 32 else None


def _by_rule(units: int, width: int, depth: int, gated: bool) -> Split | None:
    """Choose one program per unit with loads of long tiles in flight, if the number of tiles fills the units well."""
    if gated:
        return Split(32, 128, 1, 4, 4) if width >= 64 * units else None
    tiles = -(-width // 64)
    splits = max(1, min(units // tiles, depth // 512))
    programs = tiles * splits
    filled = programs / (-(-programs // units) * units)
    fits = splits == 1 or tiles <= MAX_TILES
    return Split(64, 256, splits, 3, 4) if fits and filled >= 0.7 else None
