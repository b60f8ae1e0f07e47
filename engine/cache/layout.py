"""CacheLayout: which layers share a block table, and where the pages of their blocks lie in memory.

Owner: device thread, at start. In: one spec per layer. Out: groups, bytes of a block, the layers' caches.

    buffers     L of them, each [num_blocks, page_bytes of its own]; a block is the pages of one number in all buffers
    groups      layers of a kind, at most L in a group; the layer i of a group has its pages in buffer i

Every block belongs to one group at a time, and all groups draw from one pool. So L is the number of layers of the
rarest kind: layers of other kinds make several groups, and no buffer stays empty. Layers of a kind that keep more bytes
than others come first in their group, so that large pages meet in one buffer. A buffer's page is as large as the
largest that any group has there; what smaller ones leave is padding, which is logged. Where too much would be padding,
of all blocks or of those that a long context keeps, layers of small pages lie side by side in a page, a group has more
than L of them, and L is smaller. States have runs of the same blocks (runs.py): L and pages are what layers with tokens
suggest. Block 0 is the dummy block: padded rows write to it and no request ever owns it.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch

from engine.base.errors import ConfigError
from engine.cache.runs import Runs, pages_for, runs_over
from engine.cache.spec import CacheSpec, LayerCache
from engine.cache.state import StateSpec

log = logging.getLogger("omniloop.engine")

ALIGNED = 16  # bytes; pages begin at multiples of it
NEARLY_EQUAL = 1.25  # kinds whose numbers of layers differ by less are one group each
MAX_PADDING = 0.25  # of the cache, and of the runs of states
BLOCK_SIZES = 8, 16, 32, 64  # for advice


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share block tables, or runs."""

    spec: CacheSpec  # of one of them: its kind is that of all
    layers: tuple[int, ...]  # their numbers among the specs
    places: tuple[tuple[int, int], ...]  # of each layer: the buffer, and the first byte in a page of it


class CacheLayout:
    """Fixed once a model's specs are known."""

    def __init__(self, specs: Sequence[CacheSpec], block_size: int, extra_per_token: int = 0) -> None:
        """extra_per_token: bytes for each token of a block that are stored outside the layers' pages."""
        self.block_size = block_size
        self.specs = tuple(specs)
        self._states: dict[StateSpec, list[int]] = {}
        for number, spec in enumerate(specs):
            if isinstance(spec, StateSpec):
                self._states.setdefault(spec, []).append(number)
        self._lay_out()
        self._check_padding(self._padding(self.groups))
        self.block_bytes = sum(self.page_bytes) + extra_per_token * block_size
        self.runs = self._runs()  # None: there are no states
        self.token_groups = len(self.groups)  # the first so many groups have block tables
        if self.runs is not None:
            for states in self.runs.groups:
                places = tuple((buffer, 0) for buffer in range(len(states.layers)))
                self.groups.append(Group(states.spec, states.layers, places))
            log.info("KV cache: %s", self.runs)
        self.group_of = [0] * len(specs)  # by layer
        for number, group in enumerate(self.groups):
            for layer in group.layers:
                self.group_of[layer] = number

    def _lay_out(self) -> None:
        """Groups, buffers and pages of what layers cache of tokens; where they cache none, buffers alone."""
        specs, block_size = self.specs, self.block_size
        kinds: dict[Hashable, list[int]] = {}
        for number, spec in enumerate(specs):
            if spec.kind.has_tables:
                kinds.setdefault(spec.shared, []).append(number)
        self.groups: list[Group] = []
        if not kinds:
            self.page_bytes = pages_for(self._states, ALIGNED)  # by buffer
            self.num_buffers = len(self.page_bytes)
            return
        for layers in kinds.values():
            layers.sort(key=lambda number: -specs[number].block_bytes(block_size))
        counts = [len(layers) for layers in kinds.values()]
        largest = max(counts)
        most = largest if largest <= NEARLY_EQUAL * min(counts) else min(counts)
        self._divide(list(kinds.values()), *min(self._ways(list(kinds.values()), most), key=self._waste)[:2])

    def _ways(self, kinds: Sequence[Sequence[int]], most: int) -> Iterator[tuple[int, int, float, float, float]]:
        """Buffers, bytes of a page as _divide takes them, and what they leave unused: of all, of groups that see all,
        of runs.

        From those that make the fewest groups on.
        """
        for num_buffers in range(most, 0, -1):
            self._divide(kinds, num_buffers, 0)
            for page_bytes in (0, *self._pages(kinds, max(self.page_bytes))):
                self._divide(kinds, num_buffers, page_bytes)
                padding = self._padding(self.groups), self._padding(self._lasting), self._padding_of_runs()
                yield num_buffers, page_bytes, *padding

    def _pages(self, kinds: Sequence[Sequence[int]], largest: int) -> list[int]:
        """Bytes of a page: the largest layer's, or a little more where layers of a kind then lie in it side by side.

        An example is a page of codes and scales: two layers of half as many codes have a scale more than one layer.
        Or as many times the largest as a row of a state needs, which lies in one page.
        """
        sizes = {self._size(layers[0]) for layers in kinds}
        wider = {-(-largest // size) * size for size in sizes if size}
        rows = {-(-spec.widest // largest) * largest for spec in self._states if largest}
        return sorted({largest, *rows, *(size for size in wider if size < (1 + MAX_PADDING / 2) * largest)})

    def _size(self, layer: int) -> int:
        """Bytes of a layer's page."""
        return -(-self.specs[layer].block_bytes(self.block_size) // ALIGNED) * ALIGNED

    @staticmethod
    def _waste(way: tuple[int, int, float, float, float]) -> tuple[bool, bool, int]:
        """Whether too much of the cache, and of runs, is padding; how much of the blocks that long contexts fill."""
        return way[2] > MAX_PADDING, way[4] > MAX_PADDING, int(way[3] / MAX_PADDING)

    def _divide(self, kinds: Sequence[Sequence[int]], num_buffers: int, page_bytes: int) -> None:
        """Layers to groups and places: one layer of a group per buffer, or as many as a page of so many bytes holds."""
        sizes = [self._size(layer) for layer in range(len(self.specs))]
        self.num_buffers = num_buffers
        self.groups = []
        pages = [0] * self.num_buffers
        for layers in kinds:
            size = sizes[layers[0]]  # the largest of its kind
            most = self.num_buffers * max(1, page_bytes // max(size, 1))
            for first in range(0, len(layers), most):
                mine = tuple(layers[first : first + most])
                places = tuple((i % self.num_buffers, i // self.num_buffers * size) for i in range(len(mine)))
                for layer, (buffer, start) in zip(mine, places):
                    pages[buffer] = max(pages[buffer], start + sizes[layer])
                self.groups.append(Group(self.specs[mine[0]], mine, places))
        self.page_bytes = tuple(pages)  # by buffer

    @property
    def _lasting(self) -> list[Group]:
        """Groups whose blocks a context keeps to its end."""
        return [group for group in self.groups if group.spec.kind.lasts]

    def _padding(self, groups: Sequence[Group]) -> float:
        """The share of these groups' blocks that no layer has."""
        used = sum(self.specs[layer].block_bytes(self.block_size) for group in groups for layer in group.layers)
        return 1 - used / (len(groups) * sum(self.page_bytes)) if used else 0.0

    def _padding_of_runs(self) -> float:
        """The same of runs, over the pages of tokens as they are; all of it if a row of a state is wider than these."""
        runs = runs_over(self._states, self.page_bytes) if self._states else None
        return runs.padding if runs is not None else float(bool(self._states))

    @property
    def keeps(self) -> bool:
        """Whether a block has bytes: models that compute a prompt in one step keep nothing."""
        return self.block_bytes > 0

    @property
    def tables(self) -> list[tuple[int, int]]:
        """(kind, window) of each group, as the scheduler takes them; all groups of states are one, the last."""
        kinds = [group.spec.kind for group in self.groups[: self.token_groups + 1]]
        return [(kind.number, kind.window) for kind in kinds]

    def blocks_for(self, num_tokens: int, max_chunk: int) -> int:
        """Blocks that a row of so many tokens holds at most, over all groups; `max_chunk`: its tokens in a step."""
        kinds = [group.spec.kind for group in self.groups[: self.token_groups]]
        tokens = sum(kind.row_blocks(num_tokens, self.block_size, max_chunk) for kind in kinds)
        return tokens + (0 if self.runs is None else self.runs.row_blocks)

    @property
    def checkpoint_blocks(self) -> int:
        """Blocks of a state that is found again; 0: a prefix has no blocks but those of its tokens."""
        return 0 if self.runs is None else self.runs.state_blocks

    def rows_in(self, num_blocks: int, num_tokens: int, max_chunk: int) -> int:
        """Rows of so many tokens that so many blocks hold, the dummy one not counted."""
        return num_blocks // self.blocks_for(num_tokens, max_chunk)

    def allocate(self, num_blocks: int, poison: bool, device: torch.device | str = "cpu") -> list[LayerCache]:
        """Each layer's cache, not written yet; with `poison` what was not written is not a number."""
        buffers = [torch.empty((num_blocks, size), dtype=torch.uint8, device=device) for size in self.page_bytes]
        caches: list[LayerCache] = [()] * len(self.specs)
        for pages in buffers if poison else ():
            pages.fill_(0xFF)  # not a number in every dtype
        for group in self.groups:
            for layer, (buffer, start) in zip(group.layers, group.places):
                pages = buffers[buffer][:, start:]
                if self.runs is not None and isinstance(group.spec, StateSpec):
                    pages = pages[:, : self.runs.page_bytes]  # in each layer as many
                caches[layer] = self.specs[layer].views(pages, self.block_size)
        return caches

    def _runs(self) -> Runs | None:
        """The runs of states, checked."""
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
        """Which sizes of a block would do."""
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
            raise ConfigError(
                f"the layers' caches differ so much that {share:.0%} of the KV cache would be padding (at most "
                f"{MAX_PADDING:.0%}): this model's mixture of layers is not supported"
                + (" with codes of 8 bits; name --kv-cache-dtype bfloat16" if codes else "")
            )
        if share > 0.01:
            log.info("KV cache: %d groups of layers, %.1f %% of it padding", len(self.groups), 100 * share)
