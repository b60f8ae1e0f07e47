"""Sizes: the bounds of every step, fixed at start, and the sizes of steps that are recorded as graphs.

Thread: device, at start. A graph's key is its padded number of tokens; a step uses the smallest graph that fits. Graphs
are captured from large to small, so the largest graph sets the size of the shared memory pool.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

MOST_LINES = 512  # places of a step for which a token is chosen; each has float32 logits in the sampler's workspace
MOST_CUT = 16  # queries of a verify step's row whose attention is cut into parts of its context; longer rows are tiles
MIXED_LIMIT = 2048  # tokens; longer steps run eagerly, because launches are a small part of their time
# Sizes of mixed graphs as (up to so many tokens, increment). Products are cut into tiles of 128 rows (64 if small): on
# an 8B model 512 tokens took 0.8 ms longer in a graph of 528 than in a graph of 512. At most 12 % of a step is padding.
MIXED_STEPS = ((256, 16), (512, 32), (1024, 64), (MIXED_LIMIT, 128), (4096, 256), (8192, 512), (16384, 1024))
# With drafts, also the sizes of a verify step of one row, because products of few rows and of few experts have kernels
# of their own: a step of 2 tokens of Qwen3.6-35B-A3B took 4.65 ms in a graph of 16 and takes 3.2 in one of 2.
VERIFIED = (2, 3, 4, 8)
# Sizes of another forward's graphs, which a start records besides those above: two in each doubling.
COARSE = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
# Text encoders are small models with long steps. For a step of 16,384 tokens the host needed 11 ms for 150 launches,
# the device only 7 ms for the work, so graphs pay off even for long steps. On several ranks they do too: the threads
# that launched 8,192 tokens of an 8B model on four ranks needed 225 ms, as long as one device needs for the work.
LONG_LIMIT = MIXED_STEPS[-1][0]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The bounds of every step."""

    max_rows: int  # rows in a step
    max_tokens: int  # tokens in a step
    max_slots: int  # running and waiting requests
    max_model_len: int  # tokens of prompt and answer together
    max_chunk: int  # tokens of one row in a step
    block_size: int  # tokens in a KV block
    encoder_rows: int  # capacity of the encoder cache in rows, so also the most rows of one media item
    width: int = 1  # places for the tokens that a row gets from one step; with drafts: theirs, one more, and an end
    whole_prompts: bool = False  # True: one step computes a whole prompt
    ranks: int = 1  # devices on which each step is launched

    @property
    def num_drafts(self) -> int:
        """The most drafts that a step verifies for a row."""
        return max(0, self.width - 2)

    @property
    def max_lines(self) -> int:
        """The most places of a step for which a token is chosen: one per row, and drafts up to MOST_LINES."""
        return max(self.max_rows, min(MOST_LINES, self.max_rows * (1 + self.num_drafts)))

    @property
    def least_tokens(self) -> int:
        """The smallest token budget that a step may have."""
        return self.max_model_len if self.whole_prompts else 1

    @property
    def most_graphed(self) -> int:
        """Tokens of the longest step that is recorded as a graph."""
        return min(self.max_tokens, LONG_LIMIT if self.whole_prompts or self.ranks > 1 else MIXED_LIMIT)

    @property
    def mixed(self) -> list[int]:
        """Numbers of tokens with a mixed graph."""
        sizes = mixed_sizes(self.most_graphed)
        return [size for size in VERIFIED if size < sizes[0]] + sizes if self.num_drafts else sizes

    @property
    def max_blocks(self) -> int:
        """The number of entries in a request's block table."""
        return -(-self.max_model_len // self.block_size)


def decode_sizes(max_rows: int, chosen: tuple[int, ...] = ()) -> list[int]:
    """Numbers of rows with a decode graph: 1, 2, 4, 8, then multiples of 8, then `max_rows`; or the operator's list."""
    if chosen:
        return sorted(set(chosen))
    return sorted({size for size in (1, 2, 4, *range(8, max_rows, 8)) if size < max_rows} | {max_rows})


def fewer_decode_sizes(max_rows: int, chosen: tuple[int, ...] = ()) -> list[int]:
    """Numbers of rows with a decode graph of another forward: 1, 2, 4, 8, 16, then COARSE; or the operator's list."""
    sizes = decode_sizes(max_rows, chosen)
    return sizes if chosen else [size for size in sizes if size in (1, 2, 4, 8, *COARSE, max_rows)]


def pass_sizes(max_rows: int) -> list[int]:
    """Numbers of rows with a graph of a drafter's pass; it is short, so padding costs little."""
    return fewer_decode_sizes(max_rows)


def fewer_mixed_sizes(most: int) -> list[int]:
    """Numbers of tokens with a mixed graph of another forward: COARSE, then sizes of which at most 20 % is padding,
    because products of more tokens take time for each token."""
    found: list[int] = []
    sizes = mixed_sizes(most)
    for size, smaller in zip(reversed(sizes), [*reversed(sizes[:-1]), 0]):
        if not found or (size in COARSE if size <= COARSE[-1] else 4 * found[-1] > 5 * (smaller + 1)):
            found.append(size)
    return found[::-1]


def line_sizes(max_rows: int, max_lines: int) -> list[int]:
    """Numbers of lines with a sampling graph, beyond those of rows: multiples of 64, then `max_lines`."""
    return sorted({*range(64, max_lines, 64), max_lines} - set(range(max_rows + 1)))


def mixed_sizes(most: int) -> list[int]:
    """Numbers of tokens with a mixed graph, in the increments of MIXED_STEPS up to `most`."""
    sizes: list[int] = []
    limit, start = min(most, LONG_LIMIT), 0
    for end, step in MIXED_STEPS:
        sizes += range(start + step, end + 1, step)
        start = end
    return [size for size in sizes if size < limit] + [limit]


def long_sizes(max_tokens: int) -> list[int]:
    """Sample sizes of steps without a graph; products are timed at these sizes, which represent those near them."""
    sizes = [MIXED_LIMIT << doublings for doublings in range(1, max_tokens.bit_length())]
    return [size for size in sizes if size < max_tokens] + [max_tokens] * (max_tokens > MIXED_LIMIT)


def one_size_per_doubling(sizes: list[int]) -> list[int]:
    """The largest size of each doubling, out of ascending sizes; few kernels run only at the sizes between."""
    return list({(size - 1).bit_length(): size for size in sizes}.values())


def sizes_for_other_kernels(sizes: list[int], most: int, way: Callable[[int], Hashable]) -> list[int]:
    """One number of tokens, up to `most`, for each choice of kernels (`way`) that `sizes` do not cover."""
    met = {way(size) for size in sizes}
    return [size for key, size in {way(size): size for size in range(1, most + 1)}.items() if key not in met]
