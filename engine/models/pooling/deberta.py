"""DeBERTa's first version (deberta-base, -large, NLI classifiers): as v2, with separate projections of distances.

https://arxiv.org/abs/2006.03654. The table of distances has no norm. One matrix stacks query, key and value of each
head; queries and values have a bias, keys have none.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from engine.base import dealing
from engine.base.errors import ConfigError
from engine.base.model_config import ModelConfig, TextConfig
from engine.checkpoint.section import Section
from engine.checkpoint.text import refuse
from engine.kernels.gemm.pack import Placement
from engine.layers.linear import Linear
from engine.models.base.encoder import Encoder, EncoderLayer
from engine.models.base.family import Family
from engine.models.pooling.bert import ROWS
from engine.models.pooling.classes import ALL, classes
from engine.models.pooling.deberta_v2 import IGNORED, SELF, Away, DebertaLayer, Span, both_ways, head
from engine.weights.rows import queries_keys_values
from engine.weights.table import Row, Table, Wanted

OWN = (
    Row((SELF + "in_proj",), "layers.*.qkv", "rows"),
    Row((SELF.rstrip("."),), "layers.*.added"),
    Row((SELF + "pos_proj",), "layers.*.keys_of", "rows"),
    Row((SELF + "pos_q_proj",), "layers.*.queries_of", "rows"),
    Row(("encoder.rel_embeddings",), "away.rows"),
)


class Added:
    """The biases of queries and values."""

    queries: Tensor  # [heads, head_dim] in the activations' dtype
    values: Tensor

    def __init__(self, heads: int, head_dim: int) -> None:
        self.shape = heads, head_dim
        self.rows = ((dealing.Section(heads, head_dim),),)  # how ranks share each bias

    def expects(self) -> dict[str, tuple[Wanted | None, ...]]:
        size = self.shape[0] * self.shape[1]
        return {"q_bias": (Wanted((size,)),), "v_bias": (Wanted((size,)),)}

    def fill(self, pieces: dict[str, list[Tensor | None]], placement: Placement) -> None:
        found = []
        for kind in ("q_bias", "v_bias"):
            (piece,) = pieces[kind]
            assert piece is not None
            found.append(piece.to(placement.device, placement.dtype, copy=True).view(self.shape))
        self.queries, self.values = found


class DebertaV1Layer(DebertaLayer):
    """A layer of the first version."""

    is_dealt = True

    def __init__(self, text: TextConfig, away: Away) -> None:
        super().__init__(text, away)
        self.qkv.arrange = lambda _, rows: queries_keys_values(rows, 1, text.head_dim)
        self.added = Added(self.heads, self.head_dim)
        self.qkv.rows = ((dealing.Section(self.heads, 3 * self.head_dim),),)
        width, heads = self.heads * self.head_dim, dealing.Section(self.heads, self.head_dim)
        self.keys_of = Linear(text.hidden_size, width)
        self.queries_of = Linear(text.hidden_size, width, bias=True)
        self.keys_of.rows = self.queries_of.rows = ((heads,),)

    def normed(self, queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return queries + self.added.queries, keys, values + self.added.values

    def of_distances(self, table: Tensor) -> tuple[Tensor, Tensor]:
        bias = self.queries_of.weight.dense_bias()
        assert bias is not None
        keys = functional.linear(table, self.keys_of.weight.dense().float())
        return keys, functional.linear(table, self.queries_of.weight.dense().float(), bias.float())


class Deberta(Encoder):
    """The encoder; most checkpoints have neither positions nor token types."""

    WEIGHTS = Table((*(row for row in ROWS if row.target != "layers.*.qkv"), *OWN), ("deberta.",), IGNORED)
    reads_pairs = True

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
        body = Section(config.raw, "config.json")
        longest = config.max_model_len or config.max_position
        self.away = Away(config.text, Span.of(body), longest - 1, device, norm=False)
        first = 0 if body.boolean("position_biased_input", True) else None
        super().__init__(config, dtype, device, body.integer("type_vocab_size", 0), first)

    def layer(self, text: TextConfig) -> EncoderLayer:
        return DebertaV1Layer(text, self.away)


def text(body: Section, outer: Section) -> TextConfig:
    """The encoder."""
    refuse(body, relative_attention=True, talking_head=False)
    if body.values.get("relative_attention") is None:
        raise ConfigError(f"{body.path}: relative_attention is missing; supported are files that say true")
    return both_ways(body, qkv_layout="joined", qkv_bias=False)


FAMILY = Family(name="DeBERTa", architectures=classes("Deberta", *ALL), model=Deberta, text=text, head=head)
