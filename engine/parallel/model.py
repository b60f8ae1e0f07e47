"""SplitModel: the model of all ranks of an engine on a CPU, each of which has a slice of the checkpoint.

Owner: the stream's thread, which computes rank 0; a HostStream computes each other rank. `forward` and `logits` are
collective: all ranks run them, or none. All ranks get the same batch, and have caches with the same block numbers.
Rank 0 alone runs the hooks of a step's parts, which read the residual stream that all ranks have.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from engine.base.dealing import share, width
from engine.base.errors import ConfigError
from engine.base.model_config import ModelConfig
from engine.cache.layout import CacheLayout
from engine.cache.spec import CacheSpec, LayerCache
from engine.device.host import HostStream
from engine.layers.attention import DealtNorm
from engine.layers.batch import Batch
from engine.layers.embed import Head
from engine.layers.linear import Linear
from engine.models.base.decoder import Decoder
from engine.models.base.model import Model
from engine.models.text.llama import LlamaLayer, ParallelLayer
from engine.parallel.codes import deal_codes
from engine.parallel.host import HostExchange, Meeting
from engine.parallel.pieces import DealtPieces, check_marks, check_slices, parts_of_towers
from engine.parallel.slices import config_of
from engine.quant.kv import numbers_line
from engine.weights.table import Table

DEALT = (LlamaLayer, ParallelLayer)  # every addend of these layers is a product whose columns are dealt out
Made = TypeVar("Made")


class SplitModel(Model):
    """One model on several ranks."""

    def __init__(self, whole: Model, build: Callable[[ModelConfig], Model], ranks: int) -> None:
        """`whole`: the model of the whole checkpoint, never filled; `build`: makes a model of a ModelConfig. Raises
        ConfigError if a layer or a tensor cannot be dealt out."""
        self.whole = dealt(whole)
        self.config, self.dtype, self.device = whole.config, whole.dtype, whole.device
        meeting = self._meeting = Meeting(ranks)
        self.members = [dealt(build(config_of(whole.config, rank, ranks))) for rank in range(ranks)]
        self._exchanges = [HostExchange(meeting, rank) for rank in range(ranks)]
        for model in (whole, *self.members):
            for part in parts_of_towers(model):
                if isinstance(part, Linear):
                    part.rows = part.columns = None  # every product of a tower is whole
        for member, exchange in zip(self.members, self._exchanges):
            member.exchange = exchange
            self._deal_norms(member, exchange)
            _deal_head(member, exchange.rank, ranks)
            deal_codes(whole, member, exchange.rank, ranks)
        check_marks(whole)
        check_slices(whole, self.members)
        self.sparse, self.towers = self.members[0].sparse, self.members[0].towers
        self.caches: list[list[LayerCache]] = []  # by rank, from rank 1 on; set when the cache is allocated
        self._streams: list[HostStream] = []  # of the ranks from rank 1 on; made by the first forward

    def _deal_norms(self, member: Decoder, exchange: HostExchange) -> None:
        """Norms over whole projections need the sums of squares of all ranks."""
        text, ranks = self.config.text, len(self.members)
        for layer, config in zip(member.layers, text.layers):
            if layer.attention is not None and layer.attention.qk_norm == "projection":
                whole = text.of_layer(config)
                keys = whole.num_kv_heads
                copies = ranks * layer.attention.num_kv_heads // keys
                sizes = whole.num_heads * whole.head_dim, keys * whole.head_dim
                layer.attention.dealt_norm = DealtNorm(exchange, *sizes, copies)

    def allocate(self, layout: CacheLayout, blocks: int, poison: bool) -> None:
        """Allocates the caches of all ranks but the first. Raises ConfigError for caches of 8 bits."""
        if numbers := numbers_line(layout.specs, self.dtype):
            raise ConfigError(
                f"--tensor-parallel-size {len(self.members)}: the checkpoint's cache ({numbers}) is not served on "
                "several ranks yet; set --kv-cache-dtype bfloat16"
            )
        self.caches = [layout.allocate(blocks, poison, self.device) for _ in self.members[1:]]

    @property
    def pieces(self) -> Callable[..., DealtPieces]:
        """Makes the loader's Pieces."""
        return functools.partial(DealtPieces, self.members)

    def weight_table(self) -> Table:
        return self.whole.weight_table()

    def cache_specs(self) -> list[CacheSpec]:
        """The caches of one rank; all ranks' are alike."""
        return self.members[0].cache_specs()

    def caches_of(self, number: int) -> Sequence[int]:
        return self.whole.caches_of(number)

    def forward(self, batch: Batch, out: Tensor | None = None) -> Tensor:
        batches = [batch, *(replace(batch, caches=caches, hooks=(), routed=None) for caches in self.caches)]
        assert len(batches) == len(self.members), "the ranks have their caches"
        return self._on_all(lambda rank: self.members[rank].forward(batches[rank], out if not rank else None))[0]

    def logits(self, hidden: Tensor, adapters: Tensor | None = None) -> Tensor:
        return torch.cat(self._on_all(lambda rank: self.members[rank].logits(hidden)), -1)

    def close(self) -> None:
        for stream in self._streams:
            stream.close()

    def _on_all(self, work: Callable[[int], Made]) -> list[Made]:
        """The results of all ranks; the first failure ends the work of all, and is raised."""
        if not self._streams:
            self._streams = [HostStream(f"omniloop-rank-{rank}") for rank in range(1, len(self.members))]
        done: list[Future[Made]] = [Future() for _ in self.members]
        for rank, stream in enumerate(self._streams, 1):
            stream.launch(self._run, rank, work, done[rank])
        self._run(0, work, done[0])
        errors = [error for each in done if (error := each.exception()) is not None]
        if errors:
            self._meeting.renew()
            for exchange in self._exchanges:
                exchange.renew()
            raise next((each for each in errors if not isinstance(each, threading.BrokenBarrierError)), errors[0])
        return [each.result() for each in done]

    def _run(self, rank: int, work: Callable[[int], Made], done: Future[Made]) -> None:
        try:
            done.set_result(work(rank))
        except Exception as error:
            self._meeting.fail()
            done.set_exception(error)


def _deal_head(member: Decoder, rank: int, ranks: int) -> None:
    """A rank computes the logits of a part of the vocabulary."""
    text = member.config.text
    span = share(width(text.vocab_size), rank, ranks)
    head = Head(text.vocab_size, text.hidden_size, text.tie_embeddings, text.head_bias, span)
    member.head = member.embed.head = head


def dealt(model: Model) -> Decoder:
    """The model, if its layers are of the kinds that can be dealt out."""
    kinds = {type(layer) for layer in model.layers} if isinstance(model, Decoder) else set()
    if not isinstance(model, Decoder) or not kinds <= set(DEALT) or model.adapters:
        named = model.config.architecture
        raise ConfigError(f"{named} has layers that are not dealt out over ranks yet; leave --tensor-parallel-size out")
    return model
