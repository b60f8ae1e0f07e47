"""Tower: the interface of every encoder that turns media into rows for the decoder.

Owner: device thread. In: the features of one media item, made by the family's processor (mm/processors). Out:
rows [num_tokens, row_width]. A new tower is a class with these members, named in its model's `towers`. The engine
chooses the sizes of examples, so a tower needs no knowledge of kernel variants, graph memory or the order of the start.
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
Shapes = Mapping[str, np.ndarray | Tensor]  # features; only shapes, grids and scalars are read
TOGETHER = 8192  # largest sum of patches, or rows of an audio encoder, over the items of one run
# A run that may pause after each layer and yields the work done, in the unit of `weight`; it returns the items' rows.
Pieces = Generator[float, None, list[Tensor]]
Record = Callable[[Callable[[], None]], Callable[[], None]]  # runs and records a body; returns its replay function


class Tower(Protocol):
    """One vision or audio tower, its weights filled."""

    @property
    def modalities(self) -> tuple[Modality, ...]:
        """The modalities that the tower encodes; first the one that takes the most memory per row."""

    @property
    def row_width(self) -> int:
        """Values in a row."""

    def encode(self, features: Features) -> Tensor:
        """One item -> its rows, a new tensor [num_tokens, row_width]. RequestError if features contradict each
        other."""

    def example(self, modality: Modality, rows: int) -> Features:
        """Features of a blank item that becomes about `rows` rows, and never more."""

    def picture_bytes(self, rows: int) -> int:
        """Bytes of the largest decoded picture that the tower scales and cuts itself; 0: the tower takes patches only.

        The picture has the size that makes `rows` rows; the decoding process scales larger pictures.
        """

    def record(self, record: Record) -> None:
        """Records the tower's graphs, if it has any; `record` captures the bodies that it gets."""


@runtime_checkable
class SharedTower(Tower, Protocol):
    """A tower that runs several items at once, of one request or of several."""

    @property
    def together(self) -> int:
        """The largest sum of `weight` over the items of one run."""

    def weight(self, features: Shapes) -> int:
        """The cost of an item, uploaded or not, in the tower's own unit (patches)."""

    def encode_together(self, items: Sequence[Features]) -> list[Tensor]:
        """As `encode`, for several items; each item's rows are a separate tensor."""


@runtime_checkable
class PausingTower(SharedTower, Protocol):
    """A tower whose run may pause; nothing else writes its tensors while it is paused."""

    def pieces(self, items: Sequence[Features]) -> Pieces:
        """As `encode_together`, with bit-identical results, without a graph."""


class TowerConfig(Protocol):
    """The properties of every tower's configuration."""

    @property
    def modalities(self) -> tuple[Modality, ...]: ...

    @property
    def row_width(self) -> int: ...


class EagerTower:
    """Base of towers without graphs that take scaled and cut media."""

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
        """Records nothing: an item is as much work as a large step, so launches cost little."""


class SharingTower(EagerTower, ABC):
    """Base of towers that run several items together."""

    together = TOGETHER

    def encode(self, features: Features) -> Tensor:
        return self.encode_together([features])[0]

    @abstractmethod
    def encode_together(self, items: Sequence[Features]) -> list[Tensor]:
        """As SharedTower.encode_together."""


class LayeredTower(SharingTower):
    """A sharing tower whose run may pause between two layers."""

    def encode_together(self, items: Sequence[Features]) -> list[Tensor]:
        return through(self.pieces(items))

    @abstractmethod
    def pieces(self, items: Sequence[Features]) -> Pieces:
        """As PausingTower.pieces."""


class PatchTower(LayeredTower):
    """Base of vision towers whose items have `pixel_values` [patches, numbers]."""

    def weight(self, features: Shapes) -> int:
        return len(features["pixel_values"])


def through(run: Generator[float, None, T]) -> T:
    """Runs a generator to its end without pausing; returns its result."""
    try:
        while True:
            next(run)
    except StopIteration as end:
        made: T = end.value
        return made


def layer_by_layer(layers: Sequence[Callable[..., None]], x: Tensor, *read: Any) -> Generator[float, None, None]:
    """Each layer adds to x [rows, hidden]; the run may pause after each layer."""
    for layer in layers:
        layer(x, *read)
        yield len(x) / len(layers)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """The concatenated parts; a single part is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def apart(rows: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """The rows of each item as separate tensors, freed independently; the rows of a single item are not copied."""
    return [rows] if len(lengths) == 1 else [own.clone() for own in rows.split(list(lengths))]


def bounds_of(lengths: Sequence[int], device: torch.device) -> Tensor:
    """The start of each segment, and the end of the last: int32 [segments + 1].

    Computed on the device, because a copy from the host would wait for all work launched before.
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
    """Modality -> the checkpoint's tower for it."""
    return {modality: tower for tower in towers if tower is not None for modality in tower.modalities}


def each(towers: Mapping[Modality, Tower]) -> list[Tower]:
    """The distinct towers."""
    return list({id(tower): tower for tower in towers.values()}.values())
