"""Where the rows of a state's parts lie in a run's pages.

In: parts (rows, width, dtype) in order, and the bytes of a page. A part begins with a new page, and a page holds whole
rows. Parts of a tail have as many rows for each position of the ring; position p has its rows from (p % ring) * rows
on. Users: kernels, which are given `first` and `per_page` as constants, references, which read and write rows, and
engine/cache/state.py, which counts pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of numbers."""

    rows: int  # of a state, or of one position of a tail
    width: int
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        """Of one row."""
        return self.width * self.dtype.itemsize

    def pages(self, page_bytes: int, times: int = 1) -> int:
        """Pages of so many bytes that `times` its rows take; 0: a row does not fit into a page."""
        each = page_bytes // self.row_bytes
        return -(-self.rows * times // each) if each else 0


@dataclass(frozen=True, slots=True)
class Place:
    """One part, placed."""

    first: int  # page of the run
    per_page: int  # rows
    rows: int  # of the state, or of one position
    width: int
    dtype: torch.dtype

    def read(self, pages: Tensor, blocks: Tensor, start: int = 0, count: int | None = None) -> Tensor:
        """Rows start..start + count of a run with these blocks: [count, width], a copy."""
        row = torch.arange(start, start + (self.rows if count is None else count), device=pages.device)
        block = blocks[self.first + row // self.per_page].long()
        return pages.view(self.dtype)[block[:, None], self._columns(row)]

    def write(self, pages: Tensor, blocks: Tensor, values: Tensor, start: int = 0) -> None:
        """Rounds `values` [count, width] to the part's dtype."""
        row = torch.arange(start, start + len(values), device=pages.device)
        block = blocks[self.first + row // self.per_page].long()
        pages.view(self.dtype)[block[:, None], self._columns(row)] = values.to(self.dtype)

    def _columns(self, row: Tensor) -> Tensor:
        return (row % self.per_page * self.width)[:, None] + torch.arange(self.width, device=row.device)


def placed(parts: Sequence[Part], page_bytes: int, times: int = 1) -> tuple[tuple[Place, ...], int]:
    """The parts in order, each with `times` its rows, and the pages of all."""
    found, first = [], 0
    for part in parts:
        per_page, pages = page_bytes // part.row_bytes, part.pages(page_bytes, times)
        assert pages > 0, f"a row of {part.row_bytes} bytes does not fit into a page of {page_bytes}"
        assert page_bytes % part.dtype.itemsize == 0, f"pages of {page_bytes} bytes do not hold {part.dtype} in order"
        found.append(Place(first, per_page, part.rows, part.width, part.dtype))
        first += pages
    return tuple(found), first
