"""Sizes that the work lists and the kernels that read them share.

Users: work.py cuts rows into parts and tiles of these sizes; decode.py and prefill.py walk through them.
"""

from __future__ import annotations

from engine.kernels.target import triton

# Of a round of decode, whatever else is tuned: the order of a row's sums follows from it.
KEYS = 32
KEYS_OF_CODES = 32  # over pages of 8 bits


WIDE_HEAD = 256  # dimensions; the tiles of wider heads have half as many lines, so that their sums fit the registers


def tile_lines(group: int, head_dim: int) -> int:
    """Lines of a prefill tile, query heads times tokens: 128, or more when a group alone is larger."""
    return max(64 if head_dim > WIDE_HEAD else 128, triton.next_power_of_2(group))


def tile_tokens(group: int, head_dim: int) -> int:
    """Tokens in a prefill tile; `group` is query heads per KV head."""
    return tile_lines(group, head_dim) // group
