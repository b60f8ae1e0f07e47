"""CacheLayout: assigns layers to groups that share block tables, and the pages of their blocks to memory.

Owner: device thread, at start. In: one spec per layer. Out: groups, bytes of a block, the layers' caches.

    buffers     L buffers, each [num_blocks, its own page_bytes]; block n is page n of all buffers
    groups      layers of one kind, at most L per group; layer i of a group has its pages in buffer i

A block belongs to one group at a time, and all groups take blocks from one pool. So L is the number of layers of the
rarest kind: layers of other kinds form several groups, and no buffer stays empty. In a group the layers with more bytes
come first, so that large pages share a buffer. A buffer's page is as large as the largest page that any group has in
it; the rest of smaller pages is padding, which is logged. If too much would be padding, in all blocks or in the blocks
of a long context, several layers with small pages share a page: then a group has more than L layers, and L is smaller.
Small layers of a drafter share a page as one layer.
States use runs of the same blocks (runs.py): then L and pages follow from the layers with tokens. Block 0 is the dummy
block: padding rows write to it, and no request ever owns it.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass

import torch

from engine.base.errors import ConfigError
from engine.cache.runs import Runs, pages_for, runs_over
from engine.cache.spec import CacheSpec, KeyValueSpec, LayerCache
from engine.cache.state import StateSpec
from engine.cache.tokens import GuestSpec

log = logging.getLogger("omniloop.engine")

Unit = tuple[int, ...]  # layers that lie behind each other in one place of a page

ALIGNED = 16  # bytes; pages begin at multiples of this
NEARLY_EQUAL = 1.25  # if the kinds' numbers of layers differ by a smaller factor, each kind is one group
MAX_PADDING = 0.25  # largest share of padding in the cache, and in runs of states
BLOCK_SIZES = 8, 16, 32, 64  # tried for advice in an error


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share block tables, or runs."""

    spec: CacheSpec  # spec of one of the model's layers; all have its kind
    layers: tuple[int, ...]  # their indices in the specs
    places: tuple[tuple[int, int], ...]  # per layer: the buffer, and the first byte in its page


class CacheLayout:
    """Layout for a model's specs; never changes."""

    def __init__(self, specs: Sequence[CacheSpec], block_size: int, extra_per_token: int = 0) -> None:
        """extra_per_token: bytes per token of a block that are stored outside of the layers' pages."""
        self.block_size = block_size
        self._extra_bytes = extra_per_token * block_size
        self._has_guests = True  # else pages of a drafter's layers have no memory
        self.specs = tuple(specs)
        self._states: dict[StateSpec, list[int]] = {}
        for number, spec in enumerate(specs):
            if isinstance(spec, StateSpec):
                self._states.setdefault(spec, []).append(number)
        self._lay_out()
        self._check_padding(self._padding(self.groups))
        self.block_bytes = sum(self.page_bytes) + self._extra_bytes
        self.runs = self._runs()  # None: there are no states
        self.token_groups = len(self.groups)  # the first `token_groups` groups have block tables
        if self.runs is not None:
            for states in self.runs.groups:
                places = tuple((buffer, 0) for buffer in range(len(states.layers)))
                self.groups.append(Group(states.spec, states.layers, places))
            log.info("KV cache: %s", self.runs)
        self.group_of = [0] * len(specs)  # by layer
        for number, group in enumerate(self.groups):
            for layer in group.layers:
                self.group_of[layer] = number

    def of_rank(self, rank: int, ranks: int) -> CacheLayout:
        """The same places for one of so many ranks, which differ in the checkpoint's scales of their heads; rank 0
        alone has the layers of a drafter."""
        made = copy(self)
        made.specs = tuple(spec.of_rank(rank, ranks) if isinstance(spec, KeyValueSpec) else spec for spec in self.specs)
        if rank:
            made._has_guests, made._extra_bytes = False, 0
            used = {buffer for _, buffer, _ in made._held()}
            made.page_bytes = tuple(size if number in used else 0 for number, size in enumerate(self.page_bytes))
            made.block_bytes = sum(made.page_bytes)
        return made

    def _held(self) -> Iterator[tuple[int, int, int]]:
        """Yield the layers with memory: (layer, its buffer, the first byte in the buffer's page)."""
        for group in self.groups:
            for layer, (buffer, start) in zip(group.layers, group.places):
                if self._has_guests or not isinstance(self.specs[layer], GuestSpec):
                    yield layer, buffer, start

    def _lay_out(self) -> None:
        """Choose groups, buffers and pages for layers that cache tokens; only buffers if there are none."""
        kinds: dict[Hashable, list[int]] = {}
        for number, spec in enumerate(self.specs):
            if spec.kind.has_tables:
                kinds.setdefault(spec.shared, []).append(number)
        self.groups: list[Group] = []
        if not kinds:
            self.page_bytes = pages_for(self._states, ALIGNED)  # by buffer
            self.num_buffers = len(self.page_bytes)
            return
        units = [self._units(layers) for layers in kinds.values()]
        counts = list(map(len, units))
        largest = max(counts)
        most = largest if largest <= NEARLY_EQUAL * min(counts) else min(counts)
        self._divide(units, *min(self._ways(units, most), key=self._waste)[:2])

    def _units(self, layers: list[int]) -> list[Unit]:
        """Return a kind's layers as units that get one place each, the largest first: a layer, or several of a drafter
        that together are not larger than the kind's largest layer."""
        most = max(map(self._size, layers))
        units: list[list[int]] = []
        room = 0  # in the last unit
        for layer in sorted(layers, key=lambda number: isinstance(self.specs[number], GuestSpec)):
            size, guest = self._size(layer), isinstance(self.specs[layer], GuestSpec)
            if guest and size <= room:
                units[-1].append(layer)
            else:
                units.append([layer])
                room = most * guest
            room -= size * guest
        return sorted(map(tuple, units), key=lambda unit: -self._bytes(unit))

    def _bytes(self, unit: Unit) -> int:
        """Return the bytes of a unit's place."""
        return sum(map(self._size, unit))

    def _ways(self, kinds: Sequence[Sequence[Unit]], most: int) -> Iterator[tuple[int, int, float, float, float]]:
        """Yield (buffers, page bytes for _divide, unused shares of all blocks, of groups reading all tokens, of runs).

        The ways with the fewest groups come first.
        """
        for num_buffers in range(most, 0, -1):
            self._divide(kinds, num_buffers, 0)
            for page_bytes in (0, *self._pages(kinds, max(self.page_bytes))):
                self._divide(kinds, num_buffers, page_bytes)
                padding = self._padding(self.groups), self._padding(self._lasting), self._padding_of_runs()
                yield num_buffers, page_bytes, *padding

    def _pages(self, kinds: Sequence[Sequence[Unit]], largest: int) -> list[int]:
        """Return candidates for page bytes: the largest layer's, or slightly more if then several layers of a kind fit.

        Example: pages of codes and scales, in which two layers with half as many codes need one more scale than one
        layer. Other candidates are multiples of the largest that hold a row of a state, which must be in one page.
        """
        sizes = {self._bytes(units[0]) for units in kinds}
        wider = {-(-largest // size) * size for size in sizes if size}
        rows = {-(-spec.widest // largest) * largest for spec in self._states if largest}
        return sorted({largest, *rows, *(size for size in wider if size < (1 + MAX_PADDING / 2) * largest)})

    def _size(self, layer: int) -> int:
        """Return the bytes of a layer's page."""
        return -(-self.specs[layer].block_bytes(self.block_size) // ALIGNED) * ALIGNED

    @staticmethod
    def _waste(way: tuple[int, int, float, float, float]) -> tuple[bool, bool, int]:
        """Return whether too much of the cache, and of runs, is padding, and the padding level of long contexts'
        blocks."""
        return way[2] > MAX_PADDING, way[4] > MAX_PADDING, int(way[3] / MAX_PADDING)

    def _divide(self, kinds: Sequence[Sequence[Unit]], num_buffers: int, page_bytes: int) -> None:
        """Assign units to groups and places: one of a group per buffer, or as many as fit into page_bytes."""
        self.num_buffers = num_buffers
        self.groups = []
        pages = [0] * self.num_buffers
        for units in kinds:
            size = self._bytes(units[0])  # largest size of the kind
            most = self.num_buffers * max(1, page_bytes // max(size, 1))
            for first in range(0, len(units), most):
                placed: dict[int, tuple[int, int]] = {}
                filled = [0] * self.num_buffers  # bytes
                for i, unit in enumerate(units[first : first + most]):
                    buffer = i % self.num_buffers
                    for layer in unit:
                        placed[layer] = buffer, filled[buffer]
                        filled[buffer] += self._size(layer)
                pages = list(map(max, pages, filled))
                mine = tuple(placed)
                own = next((layer for layer in mine if not isinstance(self.specs[layer], GuestSpec)), mine[0])
                self.groups.append(Group(self.specs[own], mine, tuple(placed.values())))
        self.page_bytes = tuple(pages)  # by buffer

    @property
    def _lasting(self) -> list[Group]:
        """Groups whose blocks a context holds to its end."""
        return [group for group in self.groups if group.spec.kind.lasts]

    def _padding(self, groups: Sequence[Group]) -> float:
        """Return the share of these groups' blocks that no layer uses."""
        used = sum(self.specs[layer].block_bytes(self.block_size) for group in groups for layer in group.layers)
        return 1 - used / (len(groups) * sum(self.page_bytes)) if used else 0.0

    def _padding_of_runs(self) -> float:
        """Return the padding share of runs in the chosen pages; 1 if a row of a state is wider than a page."""
        runs = runs_over(self._states, self.page_bytes) if self._states else None
        return runs.padding if runs is not None else float(bool(self._states))

    @property
    def keeps(self) -> bool:
        """Whether a block has bytes; models that compute a prompt in one step store nothing."""
        return self.block_bytes > 0

    @property
    def tables(self) -> list[tuple[int, int]]:
        """(kind, window) of each group, for the scheduler; all groups of states are one, the last."""
        kinds = [group.spec.kind for group in self.groups[: self.token_groups + 1]]
        return [(kind.number, kind.window) for kind in kinds]

    def blocks_for(self, num_tokens: int, max_chunk: int) -> int:
        """Return the most blocks, in all groups, of a row of num_tokens tokens; max_chunk: its most tokens per step."""
        kinds = [group.spec.kind for group in self.groups[: self.token_groups]]
        tokens = sum(kind.row_blocks(num_tokens, self.block_size, max_chunk) for kind in kinds)
        return tokens + (0 if self.runs is None else self.runs.row_blocks)

    @property
    def checkpoint_blocks(self) -> int:
        """Blocks of a state that a prefix hit needs; 0: a prefix has only the blocks of its tokens."""
        return 0 if self.runs is None else self.runs.state_blocks

    def rows_in(self, num_blocks: int, num_tokens: int, max_chunk: int) -> int:
        """Return how many rows of num_tokens tokens fit into num_blocks blocks, without the dummy block."""
        return num_blocks // self.blocks_for(num_tokens, max_chunk)

    def allocate(self, num_blocks: int, poison: bool, device: torch.device | str = "cpu") -> list[LayerCache]:
        """Allocate each layer's cache, uninitialised; poison: fill it with NaN."""
        buffers = [torch.empty((num_blocks, size), dtype=torch.uint8, device=device) for size in self.page_bytes]
        caches: list[LayerCache] = [()] * len(self.specs)
        for pages in buffers if poison else ():
            pages.fill_(0xFF)  # NaN in every dtype
        for layer, buffer, start in self._held():
            pages = buffers[buffer][:, start:]
            if self.runs is not None and isinstance(self.specs[layer], StateSpec):
                pages = pages[:, : self.runs.page_bytes]  # equal in all layers
            caches[layer] = self.specs[layer].views(pages, self.block_size)
        return caches

    def _runs(self) -> Runs | None:
        """Return the runs of states, after a check of their padding."""
        if not self._states:
            return None
        runs = runs_over(self._states, self.page_bytes)
        if runs is not None and runs.padding <= MAX_PADDING:
            return runs
        if runs is None:
            widest = max(spec.widest for spec in self._states)
            found = f"a row of a state has {widest:,} bytes, more than a page of {min(self.page_bytes):,}"
        else:
            found = f"{runs.padding:.0%} of the blocks of a row's states would be padding (at most {MAX_PADDING:.0%})"
        raise ConfigError(f"--block-size {self.block_size}: {found}; {self._advice()}")

    def _advice(self) -> str:
        """Return which block sizes would fit."""
        fitting, block_size = [], self.block_size
        for size in BLOCK_SIZES if self.groups else ():
            self.block_size = size
            self._lay_out()
            if max(self._padding(self.groups), self._padding_of_runs()) <= MAX_PADDING:
                fitting.append(str(size))
        self.block_size = block_size
        if fitting:
            return f"what fits: --block-size {' or '.join(fitting)}"
        return "no size of a block fits: this model's mixture of layers is not supported"

    def _check_padding(self, share: float) -> None:
        if share > MAX_PADDING:
            codes = any(getattr(getattr(spec, "dtype", None), "itemsize", 2) == 1 for spec in self.specs)
            guests = any(isinstance(spec, GuestSpec) for spec in self.specs)
            raise ConfigError(
                ("with the drafter of --speculative-config " if guests else "")
                + f"the layers' caches differ so much that {share:.0%} of the KV cache would be padding (at most "
                f"{MAX_PADDING:.0%}): this model's mixture of layers is not supported"
                + (" with codes of 8 bits; name --kv-cache-dtype bfloat16" if codes else "")
            )
        if share > 0.01:
            log.info("KV cache: %d groups of layers, %.1f %% of it padding", len(self.groups), 100 * share)
