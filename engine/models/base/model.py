"""Model: what the engine asks of an architecture. It declares its caches and weights, and computes.

Owner: device thread. In: a Batch (forward), hidden rows (logits). Out: tensors on the model's device. Media are encoded
by the model's towers (engine/encoders/tower.py). Weights are filled once by engine/weights/load and never change.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from engine.base.errors import ConfigError
from engine.base.model_config import ModelConfig, Routing
from engine.base.request import Modality
from engine.cache.spec import CacheSpec
from engine.encoders.tower import Tower
from engine.layers.batch import Batch
from engine.pooling.heads import Pooler
from engine.weights.table import Table


class SparseLayer(Protocol):
    """A layer whose tokens choose experts."""

    routing: Routing
    lasting: Tensor | None  # int32 [tokens * top_k] or more, becomes the memory of what the newest step chose
    newest: Tensor | None  # on a CPU: [rows, top_k]


class Model(ABC):
    """One architecture, built for one checkpoint."""

    WEIGHTS: ClassVar[Table]
    reads_pairs: ClassVar[bool] = False  # tokens of an input's second text have embeddings of their own

    takes_rows: ClassVar[bool] = False  # any token's embedding may be replaced: batch.media may stand anywhere

    config: ModelConfig
    dtype: torch.dtype  # of activations and caches
    device: str
    towers: Mapping[Modality, Tower]  # by what they encode; empty for text only
    # Adapters of the checkpoint by the media, or by the task, that they are for: a request has the first whose media it
    # shows, an input that is pooled the one it asks for.
    adapters: tuple[str, ...] = ()
    sparse: Mapping[int, SparseLayer] = MappingProxyType({})  # by layer number: those that have experts
    pooler: Pooler | None = None  # of a model that makes vectors or scores in the place of tokens

    def weight_table(self) -> Table:
        """WEIGHTS as this checkpoint needs them."""
        return self.WEIGHTS

    @abstractmethod
    def cache_specs(self) -> list[CacheSpec]:
        """What decoder layers keep, in layer order: one spec for each cache, and none for layers that have none or read
        another layer's."""

    def caches_of(self, number: int) -> Sequence[int]:
        """The places among cache_specs of what decoder layer `number`, from 0, reads: one for each layer in order."""
        return (number,)

    @abstractmethod
    def forward(self, batch: Batch, out: Tensor | None = None) -> Tensor:
        """Hidden states after the final norm, of the tokens of batch.sample_index in its order, or of all: [n, hidden].

        Writes the keys and values of every token into batch.caches. `out`, of the result's shape, takes it when given.
        """

    @contextmanager
    def abridged(self) -> Iterator[None]:
        """Inside, forward leaves out layers that only repeat launches of others: for steps whose results are not used.

        Every kernel and every product's shape is met nevertheless. Caches are those of all layers, made before.
        """
        yield

    def is_run(self, number: int) -> bool:
        """Whether forward runs the layer of this number: it runs all, except inside `abridged`."""
        return True

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Rows of forward's result, [n, hidden_size] -> [n, vocab_size] float32."""


def check_prompt_rows(asked: bool, model: Model) -> None:
    """Whether requests may bring rows in the place of text, where the operator asks for that. Raises ConfigError."""
    if asked and (model.pooler is not None or not model.takes_rows):
        name = model.config.architecture
        raise ConfigError(f"--enable-prompt-embeds: {name} reads tokens only; leave it out")
