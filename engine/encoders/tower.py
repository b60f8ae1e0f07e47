"""Tower: what the engine asks of whatever turns media into rows for the decoder.

Owner: device thread. In: the features of one media item, as the family's processor (mm/processors) makes them. Out:
rows [num_tokens, row_width]. A new tower is a class with these members, named in its model's `towers`; the engine
chooses the sizes of examples, so a tower knows nothing of kernels' variants, of graphs' memory or of the start's order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from itertools import groupby
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from engine.base.request import Modality

T = TypeVar("T")
Features = dict[str, Tensor]
Shapes = Mapping[str, np.ndarray | Tensor]  # features of which only shapes, grids and numbers are read
TOGETHER = 8192  # patches, or rows of a sound's encoder, that items of one run may add up to
# A run that may pause after each layer, saying how much work that was, of the items' weights; then the items' rows.
Pieces = Generator[float, None, list[Tensor]]
Record = Callable[[Callable[[], None]], Callable[[], None]]  # runs a body, and returns what replays it


class Tower(Protocol):
    """One vision or audio tower, its weights filled."""

    @property
    def modalities(self) -> tuple[Modality, ...]:
        """What the tower encodes; first what takes most memory for as many rows."""

    @property
    def row_width(self) -> int:
        """Numbers in a row."""

    def encode(self, features: Features) -> Tensor:
        """One item -> its rows [num_tokens, row_width], new. RequestError where features contradict each other."""

    def example(self, modality: Modality, rows: int) -> Features:
        """Features of a blank item that becomes at most `rows` rows, and about as many."""

    def picture_bytes(self, rows: int) -> int:
        """Bytes of the largest decoded picture that the tower scales and cuts itself; 0: it wants pictures cut.

        The picture is as large as one of `rows` rows: larger ones are scaled where they were decoded.
        """

    def record(self, record: Record) -> None:
        """Records the tower's graphs, if it has any: `record` takes bodies that can be captured."""


@runtime_checkable
class SharedTower(Tower, Protocol):
    """A tower that runs several items at once, of one request or of several."""

    @property
    def together(self) -> int:
        """What the weights of items that run at once may add up to."""

    def weight(self, features: Shapes) -> int:
        """Of an item, uploaded or not: what it costs, in the tower's own unit (patches)."""

    def encode_together(self, items: Sequence[Features]) -> list[Tensor]:
        """As `encode`, for each item; the rows of each are a tensor of their own."""


@runtime_checkable
class PausingTower(SharedTower, Protocol):
    """A tower whose run may pause: what it holds meanwhile is not written by others."""

    def pieces(self, items: Sequence[Features]) -> Pieces:
        """As `encode_together`, the same bits, without a graph."""


class TowerConfig(Protocol):
    """What every tower's configuration says."""

    @property
    def modalities(self) -> tuple[Modality, ...]: ...

    @property
    def row_width(self) -> int: ...


class EagerTower:
    """What towers without graphs share, whose media come scaled and cut."""

    config: TowerConfig

    def __init__(self, config: TowerConfig, dtype: torch.dtype, device: str) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device

    @property
    def modalities(self) -> tuple[Modality, ...]:
        return self.config.modalities

    @property
    def row_width(self) -> int:
        return self.config.row_width

    def picture_bytes(self, rows: int) -> int:
        return 0

    def record(self, record: Record) -> None:
        """No graph: an item is as much work as a large step."""


class SharingTower(EagerTower, ABC):
    """What those share whose items run together."""

    together = TOGETHER

    def encode(self, features: Features) -> Tensor:
        return self.encode_together([features])[0]

    @abstractmethod
    def encode_together(self, items: Sequence[Features]) -> list[Tensor]:
        """As SharedTower has it."""


class LayeredTower(SharingTower):
    """A sharing tower whose run may pause between two layers."""

    def encode_together(self, items: Sequence[Features]) -> list[Tensor]:
        return through(self.pieces(items))

    @abstractmethod
    def pieces(self, items: Sequence[Features]) -> Pieces:
        """As PausingTower has it."""


class PatchTower(LayeredTower):
    """Those that see: `pixel_values` [patches, numbers] of each item."""

    def weight(self, features: Shapes) -> int:
        return len(features["pixel_values"])


def through(run: Generator[float, None, T]) -> T:
    """What a run returns that does not pause."""
    try:
        while True:
            next(run)
    except StopIteration as end:
        made: T = end.value
        return made


def layer_by_layer(layers: Sequence[Callable[..., None]], x: Tensor, *read: Any) -> Generator[float, None, None]:
    """Each layer adds to x [rows, hidden]; behind each the run may pause."""
    for layer in layers:
        layer(x, *read)
        yield len(x) / len(layers)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Parts one behind the other; a single one is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def apart(rows: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """The rows of each item as a tensor of its own, whose memory is freed independently; a single one is not copied."""
    return [rows] if len(lengths) == 1 else [own.clone() for own in rows.split(list(lengths))]


def bounds_of(lengths: Sequence[int], device: torch.device) -> Tensor:
    """Where segments of these lengths begin, and the end of the last: int32 [segments + 1].

    They are counted on the device, since a copy from the host would wait for all that was launched before.
    """
    total, length = sum(lengths), lengths[0]
    if all(each == length for each in lengths[:-1]) and lengths[-1] <= length:
        bounds = torch.arange(0, len(lengths) * length + 1, length, dtype=torch.int32, device=device)
        return bounds if lengths[-1] == length else bounds.clamp_(max=total)
    parts, first = [], 0
    for length, alike in groupby(lengths):
        last = first + length * len(list(alike))
        until = last + (last == total)  # the last run brings the end of all
        parts.append(torch.arange(first, until, length, dtype=torch.int32, device=device))
        first = last
    return joined(parts)


def by_modality(*towers: Tower | None) -> dict[Modality, Tower]:
    """The towers that a checkpoint has, by what they encode."""
    return {modality: tower for tower in towers if tower is not None for modality in tower.modalities}


def each(towers: Mapping[Modality, Tower]) -> list[Tower]:
    """Every tower once."""
    return list({id(tower): tower for tower in towers.values()}.values())
