"""CacheLayout: which layers share a block table, and where the pages of their blocks lie in memory.

Owner: device thread, at start. In: one spec per layer. Out: groups, bytes of a block, the layers' caches.

    buffers     L of them, each [num_blocks, page_bytes of its own]; a block is the pages of one number in all buffers
    groups      layers of a kind, at most L in a group; the layer i of a group has its pages in buffer i

Every block belongs to one group at a time, and all groups draw from one pool. So L is the number of layers of the
rarest kind: layers of other kinds make several groups, and no buffer stays empty. Layers of a kind that keep more bytes
than others come first in their group, so that large pages meet in one buffer. A buffer's page is as large as the
largest that any group has there; what smaller ones leave is padding, which is logged. Where too much would be padding,
of all blocks or of those that a long context keeps, layers of small pages lie side by side in a page, a group has more
than L of them, and L is smaller. Block 0 is the dummy block: padded rows write to it and no request ever owns it.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch

from engine.base.errors import ConfigError
from engine.cache.spec import CacheSpec, LayerCache

log = logging.getLogger("omniloop.engine")

ALIGNED = 16  # bytes; pages begin at multiples of it
NEARLY_EQUAL = 1.25  # kinds whose numbers of layers differ by less are one group each
MAX_PADDING = 0.25  # of the cache


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share block tables."""

    spec: CacheSpec  # of one of them: its kind is that of all
    layers: tuple[int, ...]  # their numbers among the specs
    places: tuple[tuple[int, int], ...]  # of each layer: the buffer, and the first byte in a page of it


class CacheLayout:
    """Fixed once a model's specs are known."""

    def __init__(self, specs: Sequence[CacheSpec], block_size: int, extra_per_token: int = 0) -> None:
        """extra_per_token: bytes for each token of a block that are stored outside the layers' pages."""
        self.block_size = block_size
        self.specs = tuple(specs)
        kinds: dict[Hashable, list[int]] = {}
        for number, spec in enumerate(specs):
            kinds.setdefault(spec.shared, []).append(number)
        for layers in kinds.values():
            layers.sort(key=lambda number: -specs[number].block_bytes(block_size))
        counts = [len(layers) for layers in kinds.values()]
        largest = max(counts)
        most = largest if largest <= NEARLY_EQUAL * min(counts) else min(counts)
        self._divide(list(kinds.values()), *min(self._ways(list(kinds.values()), most), key=self._waste)[:2])
        self.block_bytes = sum(self.page_bytes) + extra_per_token * block_size
        self.group_of = [0] * len(specs)  # by layer
        for number, group in enumerate(self.groups):
            for layer in group.layers:
                self.group_of[layer] = number
        self._check_padding(self._padding(self.groups))

    def _ways(self, kinds: Sequence[Sequence[int]], most: int) -> Iterator[tuple[int, int, float, float]]:
        """Buffers, bytes of a page as _divide takes them, and what they leave unused: of all, of groups that see all.

        From those that make the fewest groups on.
        """
        for num_buffers in range(most, 0, -1):
            self._divide(kinds, num_buffers, 0)
            for page_bytes in (0, *self._pages(kinds, max(self.page_bytes))):
                self._divide(kinds, num_buffers, page_bytes)
                yield num_buffers, page_bytes, self._padding(self.groups), self._padding(self._lasting)

    def _pages(self, kinds: Sequence[Sequence[int]], largest: int) -> list[int]:
        """Bytes of a page: the largest layer's, or a little more where layers of a kind then lie in it side by side.

        An example is a page of codes and scales: two layers of half as many codes have a scale more than one layer.
        """
        sizes = {self._size(layers[0]) for layers in kinds}
        wider = {-(-largest // size) * size for size in sizes if size}
        return sorted({largest, *(size for size in wider if size < (1 + MAX_PADDING / 2) * largest)})

    def _size(self, layer: int) -> int:
        """Bytes of a layer's page."""
        return -(-self.specs[layer].block_bytes(self.block_size) // ALIGNED) * ALIGNED

    @staticmethod
    def _waste(way: tuple[int, int, float, float]) -> tuple[bool, int]:
        """Whether too much of the cache is padding; and how much of the blocks that long contexts fill it with."""
        return way[2] > MAX_PADDING, int(way[3] / MAX_PADDING)

    def _divide(self, kinds: Sequence[Sequence[int]], num_buffers: int, page_bytes: int) -> None:
        """Layers to groups and places: one layer of a group per buffer, or as many as a page of so many bytes holds."""
        sizes = [self._size(layer) for layer in range(len(self.specs))]
        self.num_buffers = num_buffers
        self.groups: list[Group] = []
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

    @property
    def keeps(self) -> bool:
        """Whether a block has bytes: models that compute a prompt in one step keep nothing."""
        return self.block_bytes > 0

    @property
    def tables(self) -> list[tuple[int, int]]:
        """(kind, window) of each group, as the scheduler takes them."""
        return [(group.spec.kind.number, group.spec.kind.window) for group in self.groups]

    def blocks_for(self, num_tokens: int, max_chunk: int) -> int:
        """Blocks that a row of so many tokens holds at most, over all groups; `max_chunk`: its tokens in a step."""
        kinds = [group.spec.kind for group in self.groups]
        return sum(kind.row_blocks(num_tokens, self.block_size, max_chunk) for kind in kinds)

    def allocate(self, num_blocks: int, poison: bool, device: torch.device | str = "cpu") -> list[LayerCache]:
        """Each layer's cache, not written yet; with `poison` what was not written is not a number."""
        buffers = [torch.empty((num_blocks, size), dtype=torch.uint8, device=device) for size in self.page_bytes]
        caches: list[LayerCache] = [()] * len(self.specs)
        for pages in buffers if poison else ():
            pages.fill_(0xFF)  # not a number in every dtype
        for group in self.groups:
            for layer, (buffer, start) in zip(group.layers, group.places):
                caches[layer] = self.specs[layer].views(buffers[buffer][:, start:], self.block_size)
        return caches

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
