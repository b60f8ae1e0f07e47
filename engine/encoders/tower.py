"""Tower: what the engine asks of whatever turns media into rows for the decoder.

Owner: device thread. In: the features of one media item, as the family's processor (mm/processors) makes them. Out:
rows [num_tokens, row_width]. A new tower is a class with these members, named in its model's `towers`; the engine
chooses the sizes of examples, so a tower knows nothing of kernels' variants, of graphs' memory or of the start's order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from engine.request import Modality

Features = dict[str, Tensor]
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

    def weight(self, features: Mapping[str, np.ndarray]) -> int:
        """Of an item that has not been uploaded: what it costs, in the tower's own unit (patches)."""

    def encode_together(self, items: Sequence[Features]) -> list[Tensor]:
        """As `encode`, for each item; the rows of each are a tensor of their own."""


def by_modality(*towers: Tower | None) -> dict[Modality, Tower]:
    """The towers that a checkpoint has, by what they encode."""
    return {modality: tower for tower in towers if tower is not None for modality in tower.modalities}


def each(towers: Mapping[Modality, Tower]) -> list[Tower]:
    """Every tower once."""
    return list({id(tower): tower for tower in towers.values()}.values())
