"""Sizes: the bounds of every step, fixed at start, and which steps are recorded as graphs.

Thread: device, at start. A graph's key is its padded token count; a step takes the smallest that holds it. Graphs are
captured from large to small, so the shared pool is as large as the largest needs and every smaller one fits into it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

MIXED_LIMIT = 2048  # tokens; longer steps spend so little of their time on launches that they run eagerly
# Mixed sizes: up to so many tokens in steps of so many. Products are cut into tiles of 128 rows (of 64 for small ones):
# 512 tokens in a graph of 528 took 0.8 ms longer on an 8B than in one of 512. At most 12 % of a step is padding.
MIXED_STEPS = ((256, 16), (512, 32), (1024, 64), (MIXED_LIMIT, 128), (4096, 256), (8192, 512), (16384, 1024))
# Encoders of texts are small and their steps long: 150 launches of a step of 16,384 tokens took a host 11 ms, and a
# device 7.
ENCODER_LIMIT = MIXED_STEPS[-1][0]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bounds of every step, fixed at start."""

    max_rows: int  # rows in a step
    max_tokens: int  # tokens in a step
    max_slots: int  # requests running and waiting
    max_model_len: int  # tokens of prompt and answer
    max_chunk: int  # tokens of a row in a step
    block_size: int  # tokens in a KV block
    encoder_rows: int  # tower rows that one item may have
    width: int = 1  # tokens that a row may bring home from one step
    whole_prompts: bool = False  # a prompt is computed in one step

    @property
    def least_tokens(self) -> int:
        """Tokens that every step must have room for."""
        return self.max_model_len if self.whole_prompts else 1

    @property
    def most_graphed(self) -> int:
        """Tokens of the longest steps that are recorded as graphs."""
        return min(self.max_tokens, ENCODER_LIMIT if self.whole_prompts else MIXED_LIMIT)

    @property
    def max_blocks(self) -> int:
        """Entries of one request's block table."""
        return -(-self.max_model_len // self.block_size)


def decode_sizes(max_rows: int, chosen: tuple[int, ...] = ()) -> list[int]:
    """1, 2, 4, 8, then steps of 8 up to the rows that a step can have; or the operator's choice."""
    if chosen:
        return sorted(set(chosen))
    return sorted({size for size in (1, 2, 4, *range(8, max_rows, 8)) if size < max_rows} | {max_rows})


def mixed_sizes(most: int) -> list[int]:
    """Multiples of a product's tile up to `most`, the longest step with a graph; finer ones below."""
    sizes: list[int] = []
    limit, start = min(most, ENCODER_LIMIT), 0
    for end, step in MIXED_STEPS:
        sizes += range(start + step, end + 1, step)
        start = end
    return [size for size in sizes if size < limit] + [limit]


def long_sizes(max_tokens: int) -> list[int]:
    """Some of the steps that have no graph: what is fastest for them is so for others near them."""
    sizes = [MIXED_LIMIT << doublings for doublings in range(1, max_tokens.bit_length())]
    return [size for size in sizes if size < max_tokens] + [max_tokens] * (max_tokens > MIXED_LIMIT)


def one_size_per_doubling(sizes: list[int]) -> list[int]:
    """The last of each doubling, of ascending sizes: kernels that run only at sizes between those are rare."""
    return list({(size - 1).bit_length(): size for size in sizes}.values())


def sizes_for_other_kernels(sizes: list[int], most: int, way: Callable[[int], Hashable]) -> list[int]:
    """One number of tokens, up to `most`, for each choice of kernels (`way`) that none of `sizes` makes."""
    met = {way(size) for size in sizes}
    return [size for key, size in {way(size): size for size in range(1, most + 1)}.items() if key not in met]
