"""Runs: layout of all layers' states in blocks of the one pool; a block has a page in each buffer.

Owner: device thread, at start. In: the specs of layers with states, and the buffers (layout.py). Out: the number of
blocks of a run, groups of layers, each group's columns in the table of runs, and the share of padding.

    group        at most as many layers as buffers; layer i of a group has pages in buffer i
    run          for each group the pages of one layer: the blocks of one row's state or tail
    table        [run ids, columns]: a group has as many columns as its state or tail has pages, whichever is larger

A running row holds two states, because a step reads one and writes the next, and one tail. In models without layers
that cache tokens the states determine the page size; in others the tokens' pages are used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from engine.cache.state import StateSpec

LARGEST_PAGE = 65536  # bytes, in models without blocks of tokens
STATES_OF_A_ROW = 2
STEP = 0.005  # smaller differences of padding are ignored


@dataclass(frozen=True, slots=True)
class RunGroup:
    """Layers whose states have the same blocks."""

    spec: StateSpec  # same for all layers
    layers: tuple[int, ...]  # their indices in the specs
    state_pages: int  # per layer
    tail_pages: int
    first_column: int  # its first column in the table of runs

    @property
    def columns(self) -> int:
        """Number of columns in the table of runs."""
        return max(self.state_pages, self.tail_pages)


@dataclass(frozen=True, slots=True)
class Runs:
    """All layers with states, in groups."""

    groups: tuple[RunGroup, ...]
    page_bytes: int  # bytes of a layer in a block
    block_bytes: int  # bytes of a block in all buffers

    @property
    def chunk(self) -> int:
        """Positions that are folded into states at once."""
        return self.groups[0].spec.chunk

    @property
    def state_blocks(self) -> int:
        """Blocks of a run that holds a state."""
        return sum(group.state_pages for group in self.groups)

    @property
    def tail_blocks(self) -> int:
        """Blocks of a run that holds a tail."""
        return sum(group.tail_pages for group in self.groups)

    @property
    def width(self) -> int:
        """Blocks of the longest run."""
        return max(self.state_blocks, self.tail_blocks)

    @property
    def row_blocks(self) -> int:
        """Blocks of a running row, without its tokens."""
        return STATES_OF_A_ROW * self.state_blocks + self.tail_blocks

    @property
    def columns(self) -> int:
        """Number of columns of the table of runs."""
        return sum(group.columns for group in self.groups)

    @property
    def state_bytes(self) -> int:
        """Bytes of a state's numbers, in all layers."""
        return sum(len(group.layers) * group.spec.state_bytes for group in self.groups)

    @property
    def tail_bytes(self) -> int:
        """Bytes of a tail's numbers, in all layers."""
        return sum(len(group.layers) * group.spec.tail_bytes for group in self.groups)

    @property
    def state_padding(self) -> float:
        """Share of padding in a state's blocks."""
        return 1 - self.state_bytes / (self.state_blocks * self.block_bytes)

    @property
    def padding(self) -> float:
        """Share of padding in the blocks of a row's states and tail."""
        used = STATES_OF_A_ROW * self.state_bytes + self.tail_bytes
        return 1 - used / (self.row_blocks * self.block_bytes)

    def columns_of(self, num_blocks: int) -> list[int]:
        """Return the column of each block of a run; num_blocks shows whether the run holds a state or a tail."""
        states = num_blocks == self.state_blocks
        assert states or num_blocks == self.tail_blocks, "a run has the blocks of a state, or those of a tail"
        pages = [(group.first_column, group.state_pages if states else group.tail_pages) for group in self.groups]
        return [first + page for first, count in pages for page in range(count)]

    def __str__(self) -> str:
        """For the log."""
        tail = 1 - self.tail_bytes / (self.tail_blocks * self.block_bytes)
        return (
            f"a state of {self.state_bytes / 1e6:.2f} MB in {self.state_blocks} blocks, {self.state_padding:.1%} of "
            f"them padding; a tail of {self.tail_bytes / 1e6:.2f} MB in {self.tail_blocks} blocks, {tail:.1%}"
        )


def runs_over(states: Mapping[StateSpec, Sequence[int]], page_bytes: Sequence[int]) -> Runs | None:
    """Return the runs of these layers in buffers with these page bytes; None: a row of a state is wider than a page."""
    least, per_group = min(page_bytes), len(page_bytes)
    if any(spec.widest > least for spec in states):
        return None
    assert len({spec.chunk for spec in states}) == 1, "a step takes as many positions into all states"
    groups: list[RunGroup] = []
    column = 0
    for spec, layers in states.items():
        for first in range(0, len(layers), per_group):
            mine = tuple(layers[first : first + per_group])
            groups.append(RunGroup(spec, mine, spec.pages(least), spec.tail_pages(least), column))
            column += groups[-1].columns
    differ = [group.state_pages - group.tail_pages for group in groups]
    if any(differ) and not sum(differ):  # a run's number of blocks must determine its kind
        groups[-1] = replace(groups[-1], tail_pages=groups[-1].tail_pages + 1)
    return Runs(tuple(groups), least, sum(page_bytes))


def pages_for(states: Mapping[StateSpec, Sequence[int]], aligned: int) -> tuple[int, ...]:
    """Return page bytes by buffer, for models that cache no tokens: with the least padding, then the fewest blocks."""
    widest = -(-max(spec.widest for spec in states) // aligned) * aligned
    most = max(LARGEST_PAGE, widest)
    rows = {part.row_bytes for spec in states for part in (*spec.parts, *spec.tail)}
    sizes = {-(-count * row // aligned) * aligned for row in rows for count in range(1, most // row + 1)}
    one_of_each = dict.fromkeys(states, (0,))

    def waste(size: int) -> tuple[int, int]:
        runs = runs_over(one_of_each, [size])
        assert runs is not None, "a page holds the longest row"
        return int(runs.padding / STEP), runs.row_blocks

    return (min((size for size in sizes if widest <= size <= most), key=waste),) * max(map(len, states.values()))
