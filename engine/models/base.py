"""Model: what the engine asks of an architecture. It declares its caches and weights, and computes.

Owner: device thread. In: a Batch (forward), hidden rows (logits), features of one media item (encode). Out: tensors on
the model's device. Weights are filled once by engine/weights/load and never change.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import Tensor

from engine.cache.spec import CacheSpec
from engine.model_config import ModelConfig
from engine.step.batch import Batch
from engine.weights.table import Table


class Model(ABC):
    """One architecture, built for one checkpoint."""

    WEIGHTS: ClassVar[Table]

    config: ModelConfig
    dtype: torch.dtype  # of activations and caches
    device: str

    def weight_table(self) -> Table:
        """WEIGHTS as this checkpoint needs them."""
        return self.WEIGHTS

    @abstractmethod
    def cache_specs(self) -> list[CacheSpec]:
        """What each decoder layer keeps per token, in layer order."""

    @abstractmethod
    def forward(self, batch: Batch, out: Tensor | None = None) -> Tensor:
        """Hidden states after the final norm, of the tokens of batch.sample_index in its order, or of all: [n, hidden].

        Writes the keys and values of every token into batch.caches. `out`, of the result's shape, takes it when given.
        """

    @contextmanager
    def abridged(self) -> Iterator[None]:
        """Inside, forward leaves out layers that launch only what others launch: for steps whose results nobody reads.

        Every kernel and every product's shape is met nevertheless. Caches are those of all layers, made before.
        """
        yield

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Rows of forward's result, [n, hidden_size] -> [n, vocab_size] float32."""

    def picture_bytes(self, max_rows: int) -> int:
        """Bytes of the largest decoded picture that a tower on this device takes, and scales and cuts itself; 0: none.

        It is as large as one of `max_rows` rows: larger ones are scaled where they were decoded.
        """
        return 0

    def media_examples(self, max_rows: int) -> list[tuple[str, dict[str, Tensor]]]:
        """(modality, features) of items of many sizes, up to about `max_rows` rows: what towers take at their worst,
        and whatever kernels differ by."""
        return []

    def record_towers(self, record: Callable[[Callable[[], None]], Callable[[], None]]) -> None:  # noqa: B027 (few have)
        """Gives the towers graphs: `record` runs a body that can be captured, and returns what replays it."""

    def encode(self, modality: str, features: dict[str, Tensor]) -> Tensor:
        """Embedding rows [num_tokens, hidden_size] of one media item."""
        raise AssertionError(f"{self.config.architecture} takes text only, got {modality}: refused at the edge")
