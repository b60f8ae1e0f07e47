"""SplitModel: the model of all ranks of an engine, each of which has a slice of the checkpoint.

Owner: the stream's thread, which computes rank 0; its Group has a thread for each other rank. `forward` and `logits`
are collective: all ranks run them, or none. All ranks get the same batch, and have caches with the same block numbers.
Rank 0 alone runs the hooks of a step's parts, which read the residual stream that all ranks have. On devices the step's
backend runs the forwards of the members instead (engine/step/backend/device), because each has its own buffers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from engine.base.dealing import share, width
from engine.base.errors import ConfigError
from engine.base.model_config import ModelConfig
from engine.cache.layout import CacheLayout
from engine.cache.spec import CacheSpec, KeyValueSpec, LayerCache
from engine.layers.attention import DealtNorm
from engine.layers.batch import Batch
from engine.layers.embed import Head
from engine.layers.linear import Linear
from engine.layers.moe import Experts
from engine.models.base.decoder import Decoder
from engine.models.base.model import Model
from engine.models.text.llama import LlamaLayer, ParallelLayer
from engine.parallel.codes import deal_codes
from engine.parallel.group import Group, Link
from engine.parallel.host import HostGroup
from engine.parallel.pieces import DealtPieces, check_marks, check_slices, parts_of_towers
from engine.parallel.slices import config_of
from engine.weights.table import Table, addressed

DEALT = (LlamaLayer, ParallelLayer)  # every addend of these layers is a product whose columns are dealt out
Build = Callable[[ModelConfig, int], Model]


class SplitModel(Model):
    """One model on several ranks."""

    def __init__(
        self, whole: Model, build: Build, ranks: int, group: Group | None = None, whole_experts: bool = False
    ) -> None:
        """`whole`: the model of the whole checkpoint, which drafters read; it has rank 0's embedding and last norm, and
        no other weights; `build`: makes the model of a ModelConfig for a
        rank; `group`: of so many ranks, by default on this CPU; `whole_experts`: each rank has some of the experts,
        else a part of the width of each. Raises ConfigError if a layer or a tensor cannot be dealt out."""
        self.whole = dealt(whole)
        self.config, self.dtype, self.device = whole.config, whole.dtype, whole.device
        self.group = HostGroup(ranks) if group is None else group
        configs = [config_of(whole.config, rank, ranks, whole_experts) for rank in range(ranks)]
        self.members = [dealt(build(config, rank)) for rank, config in enumerate(configs)]
        for _, _, part in addressed(whole.weight_table(), whole):
            if isinstance(part, Experts):
                part.is_whole = whole_experts
        for model in (whole, *self.members):
            for part in parts_of_towers(model):
                if isinstance(part, Linear):
                    part.rows = part.columns = None  # every product of a tower is whole
        for rank, (member, link) in enumerate(zip(self.members, self.group.links)):
            member.exchange = link
            self._deal_norms(member, link)
            _deal_head(member, rank, ranks)
            deal_codes(whole, member, rank, ranks)
        check_marks(whole)
        check_slices(whole, self.members)
        first = self.members[0]
        self.whole.embed, self.whole.norm, self.whole.is_dealt = first.embed, first.norm, True
        self.sparse, self.towers = first.sparse, first.towers
        self.caches: list[list[LayerCache]] = []  # by rank, from rank 1 on; set when the cache is allocated

    def _deal_norms(self, member: Decoder, link: Link) -> None:
        """Norms over whole projections need the sums of squares of all ranks."""
        text, ranks = self.config.text, len(self.members)
        for layer, config in zip(member.layers, text.layers):
            if layer.attention is not None and layer.attention.qk_norm == "projection":
                whole = text.of_layer(config)
                keys = whole.num_kv_heads
                copies = ranks * layer.attention.num_kv_heads // keys
                sizes = whole.num_heads * whole.head_dim, keys * whole.head_dim
                layer.attention.dealt_norm = DealtNorm(link, *sizes, copies)

    def allocate(self, layout: CacheLayout, blocks: int, poison: bool) -> None:
        """Allocates the caches of all ranks but the first; `layout`: with the scales of all ranks' heads."""
        ranks = len(self.members)
        self.caches = [layout.of_rank(rank, ranks).allocate(blocks, poison, self.device) for rank in range(1, ranks)]

    def dealt_specs(self, specs: Sequence[CacheSpec]) -> list[CacheSpec]:
        """The caches of a rank, with the dtypes and the scales of `specs`, the whole model's."""
        return [
            replace(own, dtype=spec.dtype, given=spec.given)
            if isinstance(own, KeyValueSpec) and isinstance(spec, KeyValueSpec)
            else own
            for own, spec in zip(self.cache_specs(), specs, strict=True)
        ]

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
        return self.group.run(lambda rank: self.members[rank].forward(batches[rank], out if not rank else None))[0]

    def logits(self, hidden: Tensor, adapters: Tensor | None = None) -> Tensor:
        rows = self.group.copies_of(hidden)
        return self.group.collect(self.group.run(lambda rank: self.members[rank].logits(rows[rank])))

    def close(self) -> None:
        self.group.close()


def _deal_head(member: Decoder, rank: int, ranks: int) -> None:
    """A rank computes the logits of a part of the vocabulary."""
    text = member.config.text
    span = share(width(text.vocab_size), rank, ranks)
    head = Head(text.vocab_size, text.hidden_size, text.tie_embeddings, text.head_bias, span)
    member.head = member.embed.head = head


def whole_of(model: Model) -> Model:
    """The model of the whole checkpoint; of several ranks see SplitModel."""
    return model.whole if isinstance(model, SplitModel) else model


def first_of(model: Model) -> Model:
    """The model that rank 0 runs."""
    return model.members[0] if isinstance(model, SplitModel) else model


def dealt(model: Model) -> Decoder:
    """The model, if its layers are of the kinds that can be dealt out."""
    kinds = {type(layer) for layer in model.layers} if isinstance(model, Decoder) else set()
    if not isinstance(model, Decoder) or not kinds <= set(DEALT) or model.adapters:
        named = model.config.architecture
        raise ConfigError(f"{named} has layers that are not dealt out over ranks yet; leave --tensor-parallel-size out")
    return model
