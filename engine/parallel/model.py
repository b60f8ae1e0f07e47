"""SplitModel: the model of all ranks of an engine, each of which has a slice of the checkpoint.

Owner: the stream's thread, which computes rank 0; its Group has a thread for each other rank. `forward` and `logits`
are collective: all ranks run them, or none. All ranks get the same batch, and have caches with the same block numbers.
Rank 0 alone runs the hooks of a step's parts, which read the residual stream that all ranks have, and the pooler. On
devices the step's backend runs the forwards of the members instead (engine/step/backend/device), because each has its
own buffers.
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
from engine.layers.batch import Batch
from engine.layers.embed import Head
from engine.layers.moe import Experts
from engine.models.base.decoder import Decoder
from engine.models.base.encoder import Encoder
from engine.models.base.model import Model
from engine.parallel.codes import deal_codes
from engine.parallel.group import Group
from engine.parallel.host import HostGroup
from engine.parallel.mixers import connect
from engine.parallel.pieces import DealtPieces, check_marks, check_slices, leave_first_whole
from engine.parallel.slices import config_of
from engine.weights.table import Table, addressed

Build = Callable[[ModelConfig, int], Model]


class SplitModel(Model):
    """One model on several ranks."""

    def __init__(
        self, whole: Model, build: Build, ranks: int, group: Group | None = None, whole_experts: bool = False
    ) -> None:
        """`whole`: the model of the whole checkpoint, which drafters read; it has rank 0's embedding and last norm, and
        no other weights; `build`: makes the model of a ModelConfig for a rank; `group`: of so many ranks, by default on
        this CPU; `whole_experts`: each rank has some of the experts, else a part of the width of each. Raises
        ConfigError if a layer or a tensor cannot be dealt out."""
        self.whole = dealt(whole)
        self.config, self.dtype, self.device = whole.config, whole.dtype, whole.device
        self.group = HostGroup(ranks) if group is None else group
        configs = [config_of(whole.config, rank, ranks, whole_experts) for rank in range(ranks)]
        self.members = [dealt(build(config, rank)) for rank, config in enumerate(configs)]
        for _, _, part in addressed(whole.weight_table(), whole):
            if isinstance(part, Experts):
                part.is_whole = whole_experts
        for model in (whole, *self.members):
            leave_first_whole(model)
        for rank, (member, link) in enumerate(zip(self.members, self.group.links)):
            member.exchange = link
            if isinstance(member, Decoder):
                for layer, config in zip(member.layers, whole.config.text.layers):
                    connect(layer, whole.config.text.of_layer(config), config.mixer, link, rank, ranks)
                _deal_head(member, rank, ranks)
            elif isinstance(self.whole, Encoder):
                member.deal(self.whole, rank, ranks)
        deal_codes(whole, self.members)
        check_marks(whole)
        check_slices(whole, self.members)
        first = self.members[0]
        if isinstance(self.whole, Decoder) and isinstance(first, Decoder):
            self.whole.embed, self.whole.norm, self.whole.is_dealt = first.embed, first.norm, True
        self.sparse, self.towers, self.pooler = first.sparse, first.towers, first.pooler
        self.adapters, self.of_items = first.adapters, first.of_items
        self.caches: list[list[LayerCache]] = []  # by rank, from rank 1 on; set when the cache is allocated

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
    if member.head is None:  # the model pools
        return
    span = share(width(text.vocab_size), rank, ranks)
    head = Head(text.vocab_size, text.hidden_size, text.tie_embeddings, text.head_bias, span)
    member.head = member.embed.head = head


def whole_of(model: Model) -> Model:
    """The model of the whole checkpoint; of several ranks see SplitModel."""
    return model.whole if isinstance(model, SplitModel) else model


def first_of(model: Model) -> Model:
    """The model that rank 0 runs."""
    return model.members[0] if isinstance(model, SplitModel) else model


def dealt(model: Model) -> Decoder | Encoder:
    """The model, if its layers are of classes that say that they can be dealt out."""
    if isinstance(model, Decoder | Encoder) and all(vars(type(layer)).get("is_dealt") for layer in model.layers):
        return model
    named = model.config.architecture
    raise ConfigError(f"{named} has layers that are not dealt out over ranks yet; leave --tensor-parallel-size out")
