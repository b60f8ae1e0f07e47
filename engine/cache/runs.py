"""Runs: how the states of all layers lie in blocks of the one pool, which have a page in each buffer.

Owner: device thread, at start. In: the specs of layers with states, and the buffers (layout.py). Out: the blocks of a
run, the groups of layers, the columns that a group has in the table of runs, and what of all that is padding.

    group        at most as many layers as there are buffers; layer i of it has pages in buffer i
    run          for each group the pages of one layer: the blocks of a state, or of a tail, of one row
    table        [run ids, columns]: a group has as many columns as its state or its tail has pages, the larger number

A row that computes holds two states, since a step reads one and writes the next, and one tail. Models of which no layer
caches tokens have pages as their states suggest; in others pages are those of the tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from engine.cache.state import StateSpec

LARGEST_PAGE = 65536  # bytes, in models without blocks of tokens
STATES_OF_A_ROW = 2
STEP = 0.005  # padding that differs by less is equal


@dataclass(frozen=True, slots=True)
class RunGroup:
    """Layers whose states have the same blocks."""

    spec: StateSpec  # of each
    layers: tuple[int, ...]  # their numbers among the specs
    state_pages: int  # of a layer
    tail_pages: int
    first_column: int  # in the table of runs

    @property
    def columns(self) -> int:
        """In the table of runs."""
        return max(self.state_pages, self.tail_pages)


@dataclass(frozen=True, slots=True)
class Runs:
    """All layers with states, in groups."""

    groups: tuple[RunGroup, ...]
    page_bytes: int  # that a layer has of a block
    block_bytes: int  # of a block, in all buffers

    @property
    def chunk(self) -> int:
        """Positions that are taken into states at once."""
        return self.groups[0].spec.chunk

    @property
    def state_blocks(self) -> int:
        """Of a run that holds a state."""
        return sum(group.state_pages for group in self.groups)

    @property
    def tail_blocks(self) -> int:
        """Of a run that holds a tail."""
        return sum(group.tail_pages for group in self.groups)

    @property
    def row_blocks(self) -> int:
        """Of a row that computes, its tokens apart."""
        return STATES_OF_A_ROW * self.state_blocks + self.tail_blocks

    @property
    def columns(self) -> int:
        """Of the table of runs."""
        return sum(group.columns for group in self.groups)

    @property
    def state_bytes(self) -> int:
        """Numbers of a state, in all layers."""
        return sum(len(group.layers) * group.spec.state_bytes for group in self.groups)

    @property
    def tail_bytes(self) -> int:
        """Numbers of a tail, in all layers."""
        return sum(len(group.layers) * group.spec.tail_bytes for group in self.groups)

    @property
    def state_padding(self) -> float:
        """The share of a state's blocks that holds no number."""
        return 1 - self.state_bytes / (self.state_blocks * self.block_bytes)

    @property
    def padding(self) -> float:
        """The share of the blocks of a row's states and tail that holds no number."""
        used = STATES_OF_A_ROW * self.state_bytes + self.tail_bytes
        return 1 - used / (self.row_blocks * self.block_bytes)

    def columns_of(self, num_blocks: int) -> list[int]:
        """Of a run of so many blocks, which says whether it is a state's or a tail's: each block's column."""
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
    """Runs of the layers with these numbers, over buffers of such pages; None: a row of theirs is wider than a page."""
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
    if any(differ) and not sum(differ):  # a run's number of blocks says of which kind it is
        groups[-1] = replace(groups[-1], tail_pages=groups[-1].tail_pages + 1)
    return Runs(tuple(groups), least, sum(page_bytes))


def pages_for(states: Mapping[StateSpec, Sequence[int]], aligned: int) -> tuple[int, ...]:
    """By buffer the bytes of a page, of models that cache no tokens: least padding, and of these the fewest blocks."""
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
