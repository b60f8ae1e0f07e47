"""JinaBERT (jina-embeddings-v2, jina-reranker-v1): BERT with GeGLU, and ALiBi instead of positions.

The computation follows https://huggingface.co/jinaai/jina-bert-implementation/blob/main/modeling_bert.py. The models of
https://huggingface.co/jinaai/jina-bert-v2-qk-post-norm (jina-embeddings-v2-base-code, -de, -es, -zh) normalise queries
and keys, add the layer's input again after attention's norm, and store gate's rows after up's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from engine.base import dealing
from engine.base.model_config import ModelConfig, TextConfig
from engine.checkpoint.section import Section
from engine.checkpoint.text import refuse
from engine.layers.distance import Slopes
from engine.layers.norm import LayerNorm
from engine.layers.stream import Exchange
from engine.models.base.encoder import Encoder, EncoderLayer
from engine.models.base.family import Family
from engine.models.pooling.bert import IGNORED, LAYER, SELF, head, post_norm_text
from engine.models.pooling.classes import ALL, classes
from engine.weights.table import Row, Table

ROWS = (
    Row(("embeddings.word_embeddings",), "embed"),
    Row(("embeddings.token_type_embeddings",), "types"),
    Row(("embeddings.LayerNorm",), "embed_norm"),
    Row((SELF + "query", SELF + "key", SELF + "value"), "layers.*.qkv", "rows"),
    Row((LAYER + "attention.output.dense",), "layers.*.o", "columns"),
    Row((LAYER + "attention.output.LayerNorm",), "layers.*.attention_norm"),
    Row((LAYER + "mlp.gated_layers",), "layers.*.up", "rows"),
    Row((LAYER + "mlp.wo",), "layers.*.down", "columns"),
    Row((LAYER + "mlp.layernorm",), "layers.*.mlp_norm"),
)
LONGEST = 1 << 17  # tokens; slopes are computed, so the files do not bound the length
MORE_NORMS = "qk-post-norm"  # part of the code's name in the files of the qk-post-norm models
ROWS_OF_MORE_NORMS = (
    *ROWS[:6],
    Row((SELF + "layer_norm_q",), "layers.*.query_norm"),
    Row((SELF + "layer_norm_k",), "layers.*.key_norm"),
    Row((LAYER + "layer_norm_1",), "layers.*.second_norm"),
    Row((LAYER + "mlp.up_gated_layer",), "layers.*.up", "rows"),
    Row((LAYER + "mlp.down_layer",), "layers.*.down", "columns"),
    Row((LAYER + "layer_norm_2",), "layers.*.mlp_norm"),
)


class MoreNorms(EncoderLayer):
    """A layer of the qk-post-norm models."""

    is_dealt = True

    def __init__(self, text: TextConfig) -> None:
        super().__init__(text)
        self.hidden_size = text.hidden_size
        self.query_norm, self.key_norm = (LayerNorm(self.heads * self.head_dim, text.norm_eps) for _ in range(2))
        self.query_norm.rows = self.key_norm.rows = ((dealing.Section(self.heads, self.head_dim),),)
        self.second_norm = LayerNorm(text.hidden_size, text.norm_eps)
        self.up.arrange = lambda _, rows: rows.roll(text.intermediate_size, 0)

    def normed(self, queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shape, both = queries.shape, (queries.flatten(1), keys.flatten(1))
        norms = self.query_norm, self.key_norm
        if self.exchange is None:
            queries, keys = (norm(part).view(shape) for norm, part in zip(norms, both))
        else:
            made = dealt_layer_norms(self.exchange, norms, both, self.hidden_size)
            queries, keys = (part.to(values.dtype).view(shape) for part in made)
        return queries, keys, values

    def after_attention(self, x: Tensor, attended: Tensor) -> Tensor:
        given = x.clone()
        return self.second_norm(super().after_attention(x, attended).add_(given))


def dealt_layer_norms(
    exchange: Exchange, norms: Sequence[LayerNorm], parts: Sequence[Tensor], size: int
) -> Iterator[Tensor]:
    """LayerNorms over rows of `size` numbers, of which each rank has a part [T, n]: the ranks' sums and sums of squares
    are exchanged. Yields the rank's parts, float32."""
    wide = [part.float() for part in parts]
    sums = exchange.total(torch.stack([total for part in wide for total in (part.sum(1), part.square().sum(1))], 1))
    for number, (norm, part) in enumerate(zip(norms, wide)):
        mean, square = (sums[:, 2 * number : 2 * number + 2] / size).split(1, 1)
        found = (part - mean) * torch.rsqrt(square - mean.square() + norm.eps) * norm.weight
        yield found if norm.bias is None else found + norm.bias


class JinaBert(Encoder):
    """An encoder without a table of positions; its ALiBi slopes cover the longest input."""

    WEIGHTS = Table(ROWS, prefixes=("bert.",), ignore=IGNORED)
    reads_pairs = True

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
        self.more_norms = config.text.qk_norm == "projection"
        types = Section(config.raw, "config.json").size("type_vocab_size", 2)
        super().__init__(config, dtype, device, types, first_position=None)
        longest = config.max_model_len or config.max_position
        self.distances = Slopes(config.text.num_heads, longest, device)

    def weight_table(self) -> Table:
        table = super().weight_table()
        return replace(table, rows=(*ROWS_OF_MORE_NORMS, *table.rows[len(ROWS) :])) if self.more_norms else table

    def layer(self, text: TextConfig) -> EncoderLayer:
        return MoreNorms(text) if self.more_norms else EncoderLayer(text)


def text(body: Section, outer: Section) -> TextConfig:
    """The encoder."""
    refuse(body, position_embedding_type="alibi", feed_forward_type="geglu", is_decoder=False)
    body.integer("max_position_embeddings", least=2, most=LONGEST)
    gelu = Section({**body.values, "hidden_act": "gelu"}, body.path, body.outer)
    read = post_norm_text(gelu, None, gated_mlp=True, joined_mlp=True, qkv_bias=True, o_bias=True, mlp_bias=True)
    return replace(read, qk_norm="projection") if MORE_NORMS in str(body.values.get("auto_map")) else read


FAMILY = Family(name="JinaBERT", architectures=classes("JinaBert", *ALL), model=JinaBert, text=text, head=head)
