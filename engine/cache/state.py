"""Caches of states: a recurrent layer's state of a whole sequence, and the inputs of its newest tokens.

In: numbers of the model. Out: specs of layers whose rows have runs of blocks (runs.py). A row's base run holds the
state after `base` tokens; its tail run holds the inputs of later tokens, by position modulo `ring`:

    state   part 0 [rows, width] | part 1 | ..        row r is in page first + r // (rows per page); only whole rows
    tail    part 0 [ring * rows, width] | ..          the rows of position p begin at (p % ring) * rows

Each part begins with a new page. A step adds to the tail, and folds `chunk` positions at a time into the state.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from torch import Tensor

from _fast import kinds
from engine.cache.spec import CacheKind, LayerCache
from engine.kernels.state.places import Part


@dataclass(frozen=True, slots=True)
class StateSpec:
    """Parts of a state and of its tail."""

    parts: tuple[Part, ...]
    tail: tuple[Part, ...]
    chunk: int  # positions that are folded into the state at once: 16 on an accelerator, 1 on a CPU
    ring: int  # positions of the tail: a chunk, and the positions of two steps in flight

    @property
    def kind(self) -> CacheKind:
        return CacheKind(kinds.STATE, self.chunk)

    @property
    def shared(self) -> Hashable:
        return self

    @property
    def widest(self) -> int:
        """Bytes of the longest row, which a page must hold."""
        return max(part.row_bytes for part in (*self.parts, *self.tail))

    @property
    def state_bytes(self) -> int:
        """Bytes of a state's numbers."""
        return sum(part.rows * part.row_bytes for part in self.parts)

    @property
    def tail_bytes(self) -> int:
        """Bytes of a tail's numbers."""
        return self.ring * sum(part.rows * part.row_bytes for part in self.tail)

    def pages(self, page_bytes: int) -> int:
        """Return the number of pages of a state; each page holds at least one row."""
        return _pages(self.parts, page_bytes, 1)

    def tail_pages(self, page_bytes: int) -> int:
        """Return the number of pages of a tail."""
        return _pages(self.tail, page_bytes, self.ring)

    def block_bytes(self, block_size: int) -> int:
        """Return 0, because a block holds no tokens of the layer."""
        return 0

    def views(self, pages: Tensor, block_size: int) -> LayerCache:
        """Return the pages themselves, uint8 [num_blocks, page_bytes]; kernels divide them into parts."""
        return (pages,)


def _pages(parts: Sequence[Part], page_bytes: int, times: int) -> int:
    assert all(part.row_bytes <= page_bytes for part in parts), "the layout makes pages that hold each row"
    return sum(part.pages(page_bytes, times) for part in parts)
