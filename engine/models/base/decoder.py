"""Decoder: the base of every model whose text part is a stack of decoder layers.

Thread: device. One residual stream (engine/layers/stream.py), changed in place by every layer:

    x = embed(tokens); media rows replace the embeddings of placeholders, or are added to embeddings
    each layer: layer(x); after_layer(x)
    logits = head(norm(x))

A layer has one cache, several, or none. The last layer with a cache writes it for every token; after that only the
sampled tokens matter. So from that layer's output projection on, forward computes only the sampled tokens. If the step
samples nothing, forward ends once that cache is written.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from engine.base.model_config import ModelConfig
from engine.base.request import Modality
from engine.cache.spec import CacheSpec, LayerCache
from engine.encoders.tower import Tower
from engine.layers.adapted import TokenAdapters
from engine.layers.attention import PagedSelfAttention
from engine.layers.batch import Batch
from engine.layers.convolution import GatedConvolution
from engine.layers.embed import Embedding, Head
from engine.layers.moe import SparseMLP
from engine.layers.norm import Norm, Normed, stream_norm
from engine.layers.rope import Rope, RopeTable
from engine.layers.states import Recurrent
from engine.layers.stream import Exchange, Stream
from engine.models.base.model import Model
from engine.pooling.heads import Pooler
from engine.weights.table import Table


class Mixer(Protocol):
    """Attention, a convolution or a recurrent layer, which mixes tokens; `meta` is of the kind that the mixer reads."""

    def cache_spec(self, dtype: torch.dtype) -> CacheSpec:
        """The cache of a layer of a model in `dtype`."""

    def __call__(self, x: Normed, rope: Rope, meta: Any, cache: LayerCache) -> Tensor:
        """Writes the cache; returns the input of the layer's output projection, [T, its width]."""

    def store(self, x: Normed, rope: Rope, meta: Any, cache: LayerCache) -> Tensor:
        """Only writes the cache, for steps that do not use the result."""


Metas = Sequence[Any]  # for each cache of a layer: where the step's rows lie in the cache
Caches = Sequence[LayerCache]  # the caches of a layer, in the order of its mixers


class DecoderLayer(ABC):
    """One layer: a norm, attention or its replacement, then the parts that the family adds. The family's WEIGHTS name
    the parts."""

    # In the class's own body: every addend is a product whose columns ranks share, or one that all ranks have alike.
    is_dealt: ClassVar[bool] = False
    attention: PagedSelfAttention | None = None  # None: `convolution`, or the family's own `mixers`
    attention_norm: Norm | None
    convolution: GatedConvolution | None = None
    state: Recurrent | None = None
    experts: SparseMLP | None = None

    @property
    def mixers(self) -> Sequence[Mixer]:
        """The layer's attention, convolutions or recurrent layers, each with its own cache: one, several, or none."""
        found: tuple[Mixer | None, ...] = self.attention, self.convolution, self.state
        return tuple(mixer for mixer in found if mixer is not None)

    @abstractmethod
    def __call__(self, x: Stream, rope: Rope, metas: Metas, caches: Caches, index: Tensor | None) -> None:
        """Adds this layer's outputs to `x`; with `index`, only these tokens continue after the cache is written."""

    def store(self, x: Stream, rope: Rope, metas: Metas, caches: Caches) -> None:
        """Only writes the caches: for the last layer with a cache, if the step does not use its result."""
        rows = x.normed(self.attention_norm)
        for mixer, meta, cache in zip(self.mixers, metas, caches, strict=True):
            mixer.store(rows, rope, meta, cache)


class Decoder(Model):
    """A text decoder; a family defines its layers."""

    takes_rows = True
    is_dealt = False  # several ranks have the weights, of which this object has its embedding and last norm alone

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
        text = config.text
        self.config = config
        self.dtype = dtype
        self.device = device
        self.towers: dict[Modality, Tower] = {}
        self.vision: Tower | None = None
        self.audio: Tower | None = None
        self.table = self.WEIGHTS
        self.chosen: TokenAdapters | None = None
        self.head_chosen: TokenAdapters | None = None  # of the rows whose logits are computed
        self.replaced_parts: Any = None  # parts outside the layers that further rows of a table name
        self.head = (
            None if config.pooling else Head(text.vocab_size, text.hidden_size, text.tie_embeddings, text.head_bias)
        )
        self.exchange: Exchange | None = None  # the model has a slice of the checkpoint's products, as one of several
        self.embed = Embedding(text.vocab_size, text.hidden_size, self.head)
        if config.pooling is not None:
            self.pooler = Pooler(config.pooling, self.embed, text.vocab_size, text.tie_embeddings)
        self.norm = stream_norm(text)
        self.layers = [self.layer(number) for number in range(len(text.layers))]
        sparse = {number: layer.experts for number, layer in enumerate(self.layers) if layer.experts is not None}
        for number, experts in enumerate(sparse.values()):
            experts.number = number
        self.sparse = sparse
        self.numbers = list(range(len(text.layers)))  # numbers of the layers that forward runs
        self.place_caches()
        self._causal = text.causal
        kinds = list(dict.fromkeys(layer.rope for layer in text.layers))
        self.ropes = [RopeTable(kind, device, config.max_model_len or config.max_position) for kind in kinds]
        self._rope_of = [kinds.index(layer.rope) for layer in text.layers]
        scales = torch.tensor([text.embedding_scale, text.media_scale], dtype=dtype)  # rounded as trained
        self._embedding_scale, self._media_scale = (scale / text.residual_scale for scale in scales.tolist())

    @abstractmethod
    def layer(self, number: int) -> DecoderLayer:
        """Makes layer `number`, from 0, as config.text.layers describes it, with empty parts."""

    def after_layer(self, number: int, x: Stream, batch: Batch) -> None:
        """Called after every layer that ran completely, for models that read or change the stream there."""

    def weight_table(self) -> Table:
        text, count = self.config.text, len(self.layers)
        further = tuple(f"layers.{number}.*" for number in range(count, count + text.num_nextn_predict_layers))
        table = replace(self.table, ignore=(*self.table.ignore, *further))
        if self.pooler is not None:
            return self.pooler.table(table)
        if not text.tie_embeddings:
            return table
        # Some tied checkpoints hold the embedding a second time.
        return replace(table, ignore=(*table.ignore, "lm_head.weight"))

    def place_caches(self) -> None:
        """Assigns each layer the indices, in cache_specs, of its own caches or of the caches that it shares."""
        self._caches_of: list[slice] = []
        count = 0
        for layer, config in zip(self.layers, self.config.text.layers):
            if config.kv_shared_with is not None:
                self._caches_of.append(self._caches_of[config.kv_shared_with])
                continue
            self._caches_of.append(slice(count, count + len(layer.mixers)))
            count += len(layer.mixers)

    def caches_of(self, number: int) -> Sequence[int]:
        places = self._caches_of[number]
        return range(places.start, places.stop)

    def cache_specs(self) -> list[CacheSpec]:
        keepers = (layer for layer, text in zip(self.layers, self.config.text.layers) if text.kv_shared_with is None)
        return [mixer.cache_spec(self.dtype) for layer in keepers for mixer in layer.mixers]

    def forward(self, batch: Batch, out: Tensor | None = None) -> Tensor:
        rows = self.merged(batch)
        if self.chosen is not None:
            self.chosen.begin(batch.adapters, batch.named)
        inputs = self.per_layer_inputs(batch, rows)
        counts = batch.num_tokens, batch.num_sampled
        x = Stream(rows, *counts, batch.routed, inputs, self.chosen, self.exchange)
        attention = batch.attention
        if not self._causal:
            attention = [meta.covering(len(batch.token_ids)) for meta in attention]
        ropes = [rope(batch.positions) for rope in self.ropes]
        metas = [attention[group] for group in batch.group_of]  # one per cache
        last = next(number for number in reversed(self.numbers) if self.caches_of(number))
        for number in self.numbers:
            layer, rope, places = self.layers[number], ropes[self._rope_of[number]], self._caches_of[number]
            index = batch.sample_index if number == last and not batch.whole else None
            if index is not None and not len(index):  # middle chunks of prompts need only the caches
                layer.store(x, rope, metas[places], batch.caches[places])
                return x.rows()[:0]
            layer(x, rope, metas[places], batch.caches[places], index)
            self.after_layer(number, x, batch)
            for hook in batch.hooks:
                hook.after_layer(number, x)
        if batch.whole:
            x.keep(batch.sample_index, x.rows())
            if not len(x.rows()):
                return x.rows()
        return x.normed(self.norm).rows(out)  # [S, hidden], or [T, hidden]

    @contextmanager
    def abridged(self) -> Iterator[None]:
        """The first layer, whose norm is not fused into a linear layer, the last, and one layer of each kind
        between."""
        whole, kinds = self.numbers, self.config.text.layers
        first, last = whole[0], whole[-1]
        self.numbers = list({(kinds[n], n == first, n == last): n for n in whole}.values())
        try:
            yield
        finally:
            self.numbers = whole

    def is_run(self, number: int) -> bool:
        return number in self.numbers

    def merged(self, batch: Batch) -> Tensor:
        """The first layer's input, a new tensor [T, hidden]: embeddings, and media rows in their places."""
        residual = self.embedded(batch)
        if self._embedding_scale != 1.0:
            residual *= self._embedding_scale
        return residual if batch.overlay is None and not batch.media else self.with_media(residual, batch)

    def with_media(self, embedded: Tensor, batch: Batch) -> Tensor:
        """Embeddings [T, hidden], which may be changed, with the batch's media rows in their places."""
        if batch.overlay is not None:
            visible, rows = batch.overlay
            embedded = torch.where(visible, self._visible(rows, embedded), embedded)
        for start, length, rows in batch.media:
            tokens = embedded[start : start + length]
            tokens.copy_(self._visible(rows, tokens))
        return embedded

    def _visible(self, rows: Tensor, embedded: Tensor) -> Tensor:
        """The media rows, or the embeddings plus the media rows, in place of the embeddings."""
        rows = self._scaled(rows[:, : embedded.shape[1]])
        return embedded + rows if self.config.adds_media else rows

    def _scaled(self, rows: Tensor) -> Tensor:
        """Media rows times the media scale; most families have none."""
        return rows if self._media_scale == 1.0 else rows * self._media_scale

    def per_layer_inputs(self, batch: Batch, rows: Tensor) -> Tensor | None:
        """The per-layer inputs [T, layers, n], or None; `rows`: the stream before the first layer."""
        return None

    def embedded(self, batch: Batch) -> Tensor:
        """The tokens' embeddings, a new tensor [T, hidden]."""
        return self.embed(batch.token_ids)

    def products(self, hidden: Tensor, adapters: Tensor | None = None) -> Tensor:
        """`logits` before their scale and soft cap."""
        assert self.head is not None, "a model with a pooler has no head"
        if self.head_chosen is not None:
            self.head_chosen.begin(adapters)
        return self.head(hidden)

    def logits(self, hidden: Tensor, adapters: Tensor | None = None) -> Tensor:
        return self.scaled(self.products(hidden, adapters))

    def scaled(self, logits: Tensor) -> Tensor:
        """Logits of the head's products, which are overwritten."""
        scale, cap = self.config.text.logit_scale, self.config.text.logit_softcap
        if scale != 1.0:
            logits *= scale
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits
