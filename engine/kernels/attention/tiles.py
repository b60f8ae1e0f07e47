"""Sizes that the work lists and the kernels that read them share.

Users: work.py cuts rows into parts and tiles of these sizes; decode.py and prefill.py walk through them.
"""

from __future__ import annotations

from engine.kernels.target import Target, triton

# Keys per round of decode. Fixed, because it determines the order of a row's sums.
KEYS = 32
KEYS_OF_CODES = 32  # over 8-bit pages


LINES = 16  # of a part, query heads times queries: fewer save nothing in a matrix product
WIDE_HEAD = 256  # dimensions; tiles of wider heads have half as many lines, so that their sums fit the registers
LARGE = 256  # lines of a large tile


def has_large_tiles(device: Target, head_dim: int) -> bool:
    """Whether long prompts over pages of codes use tiles of twice the lines.

    A tile widens every code that it reads, and twice the lines halve this work: one H100 took 1,241 us instead of 1,490
    for a prompt of 8,192 tokens.
    """
    return device.arch == "sm_90" and head_dim <= 128


def stripe_of(group: int, most_cut: int) -> int:
    """Queries of a stripe of a row with at most `most_cut` queries; `group` is query heads per KV head."""
    return max(1, min(most_cut, LINES // group))


def tile_lines(group: int, head_dim: int, large: bool = False) -> int:
    """Lines of a prefill tile, query heads times tokens: usually 128 or LARGE, more if a group is larger."""
    return max(LARGE if large else 64 if head_dim > WIDE_HEAD else 128, triton.next_power_of_2(group))


def tile_tokens(group: int, head_dim: int, large: bool = False) -> int:
    """Tokens in a prefill tile; `group` is query heads per KV head."""
    return tile_lines(group, head_dim, large) // group
