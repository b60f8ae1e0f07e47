"""Places the parts of a state or of a tail in the pages of a run.

In: parts (rows, width, dtype) in order, and the bytes of a page. A part begins with a new page, and a page holds whole
rows. A part of a tail has `rows` rows for each position of the ring; the rows of position p begin at (p % ring) * rows.
Users: kernels (`first` and `per_page` are their constants), references (they read and write rows), and
engine/cache/state.py (it counts pages).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a state or of a tail: rows of `width` numbers."""

    rows: int  # number of rows in a state, or in one position of a tail
    width: int
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.width * self.dtype.itemsize

    def pages(self, page_bytes: int, times: int = 1) -> int:
        """Pages that times * rows rows take; 0 if a page is smaller than a row."""
        each = page_bytes // self.row_bytes
        return -(-self.rows * times // each) if each else 0


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns of a product that the tail of replayed rows holds: `width` from `first` on, `few` from `few_first` on."""

    first: int  # inputs of the convolution
    width: int
    few_first: int
    few: int

    def parts(self, dtype: torch.dtype) -> tuple[Part, Part]:
        """The parts of the tail, per position: the few columns, the inputs."""
        return Part(1, self.few, dtype), Part(1, self.width, dtype)


@dataclass(frozen=True, slots=True)
class Place:
    """The place of one part in a run."""

    first: int  # the part's first page in the run
    per_page: int  # rows in a page
    rows: int  # number of rows in a state, or in one position of a tail
    width: int
    dtype: torch.dtype

    def read(self, pages: Tensor, blocks: Tensor, start: int = 0, count: int | None = None) -> Tensor:
        """Copies rows start..start + count - 1 of the run with these blocks: [count, width]."""
        row = torch.arange(start, start + (self.rows if count is None else count), device=pages.device)
        block = blocks[self.first + row // self.per_page].long()
        return pages.view(self.dtype)[block[:, None], self._columns(row)]

    def write(self, pages: Tensor, blocks: Tensor, values: Tensor, start: int = 0) -> None:
        """Writes `values` [count, width], rounded to the part's dtype, from row `start` on."""
        row = torch.arange(start, start + len(values), device=pages.device)
        block = blocks[self.first + row // self.per_page].long()
        pages.view(self.dtype)[block[:, None], self._columns(row)] = values.to(self.dtype)

    def _columns(self, row: Tensor) -> Tensor:
        return (row % self.per_page * self.width)[:, None] + torch.arange(self.width, device=row.device)


def placed(parts: Sequence[Part], page_bytes: int, times: int = 1) -> tuple[tuple[Place, ...], int]:
    """Returns the places of the parts, each with times * rows rows, and the number of pages of all parts."""
    found, first = [], 0
    for part in parts:
        per_page, pages = page_bytes // part.row_bytes, part.pages(page_bytes, times)
        assert pages > 0, f"a row of {part.row_bytes} bytes does not fit into a page of {page_bytes}"
        assert page_bytes % part.dtype.itemsize == 0, f"pages of {page_bytes} bytes do not hold {part.dtype} in order"
        found.append(Place(first, per_page, part.rows, part.width, part.dtype))
        first += pages
    return tuple(found), first
