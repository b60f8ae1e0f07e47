"""Model: the interface of an architecture. A model declares its caches and weights, and computes.

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
    lasting: Tensor | None  # int32 [tokens * top_k] or more: a buffer for the experts that the newest step chose
    newest: Tensor | None  # on a CPU: the experts that the newest step chose, [rows, top_k]


class ItemAdapter(Protocol):
    """The adapter of the item that a tower encodes."""

    def begin_item(self, place: int) -> None:
        """Sets the place of the adapter, for all runs of towers until the next call; 0: none."""


class Model(ABC):
    """One architecture, built for one checkpoint."""

    WEIGHTS: ClassVar[Table]
    reads_pairs: ClassVar[bool] = False  # tokens of an input's second text have a separate type embedding

    takes_rows: ClassVar[bool] = False  # batch.media may replace any token's embedding

    config: ModelConfig
    dtype: torch.dtype  # dtype of activations and caches
    device: str
    towers: Mapping[Modality, Tower]  # modality -> tower; empty for text only
    # The modality or the task of each adapter of the checkpoint. A request uses the first adapter whose modality is
    # among its media; a pooled input uses the adapter that it names.
    adapters: tuple[str, ...] = ()
    of_items: ItemAdapter | None = None  # None: towers have no places of adapters
    sparse: Mapping[int, SparseLayer] = MappingProxyType({})  # layer number -> layer, for layers with experts
    pooler: Pooler | None = None  # set in a model that makes vectors or scores instead of tokens

    def weight_table(self) -> Table:
        """WEIGHTS, adjusted to this checkpoint."""
        return self.WEIGHTS

    @abstractmethod
    def cache_specs(self) -> list[CacheSpec]:
        """The caches of the decoder layers, in layer order: one spec per cache. Layers without a cache, and layers that
        share another layer's cache, have no spec."""

    def caches_of(self, number: int) -> Sequence[int]:
        """The indices in cache_specs of the caches that decoder layer `number`, from 0, reads."""
        return (number,)

    @abstractmethod
    def forward(self, batch: Batch, out: Tensor | None = None) -> Tensor:
        """Hidden states after the final norm, [n, hidden], of the tokens in batch.sample_index, in its order, or all.

        Writes the keys and values of every token into batch.caches. The result goes to `out`, if given.
        """

    def close(self) -> None:  # noqa: B027 (most models have nothing to end)
        """Ends the model's own threads, if it has any; nothing runs or will run."""

    @contextmanager
    def abridged(self) -> Iterator[None]:
        """A context in which forward skips layers whose launches repeat other layers', for steps with unused results.

        Every kernel and every matrix shape still occurs. The caches of all layers must exist already.
        """
        yield

    def is_run(self, number: int) -> bool:
        """Whether forward runs layer `number`: it runs all layers, except inside `abridged`."""
        return True

    @abstractmethod
    def logits(self, hidden: Tensor, adapters: Tensor | None = None) -> Tensor:
        """Rows of forward's result, [n, hidden_size] -> [n, vocab_size] float32. `adapters`: each row's adapter, int32
        [n], as in Batch; None: no row has one."""


def check_prompt_rows(asked: bool, model: Model) -> None:
    """Raises ConfigError if --enable-prompt-embeds is set (`asked`) and the model takes tokens only."""
    if asked and (model.pooler is not None or not model.takes_rows):
        name = model.config.architecture
        raise ConfigError(f"--enable-prompt-embeds: {name} reads tokens only; leave it out")
