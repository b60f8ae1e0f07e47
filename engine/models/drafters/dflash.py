"""DFlash: Qwen3's layers over a block of masks, with keys and values of the target's streams as context.

    context   c = hidden_norm(fc(cat(streams)));  each layer's keys and values of a place: k_norm(k(c)), v(c)
    block     x = embed(newest token, mask, mask ...);  layers;  logits = head(norm(x))

The context of a token is written once, after the target has computed the token. Queries see the whole context, and the
whole block or, in causal layers, the block up to themselves. A query guesses the token of its own place.
Thread: device. Source: arXiv:2602.06036 and the files of z-lab; options as vLLM and vllm-project/speculators read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engine.attention.meta import AttentionMeta
from engine.base.model_config import LayerConfig, TextConfig
from engine.cache.spec import LayerCache
from engine.cache.tokens import GuestSpec
from engine.kernels.gemm.pack import Placement
from engine.kernels.pages import pages_of
from engine.kernels.rotate import qkv_rope_store
from engine.layers.attention import PagedSelfAttention, output_product
from engine.layers.linear import Linear
from engine.layers.mlp import decoder_mlp
from engine.layers.norm import Normed, RMSNorm
from engine.layers.rope import Rope, RopeTable
from engine.layers.stream import Product, Stream
from engine.models.base.decoder import Decoder
from engine.models.drafters import vocabulary
from engine.models.drafters.base import Block, Kind, config_of, guest_specs, text_places
from engine.models.drafters.dflash_settings import BlockConfig
from engine.models.drafters.small_head import LentHead
from engine.models.drafters.vocabulary import Vocabulary
from engine.weights.files import Shard
from engine.weights.table import Row, Table, Wanted

ATTENTION = "layers.*.self_attn."
ROWS = (
    Row(("fc",), "fc"),
    Row(("hidden_norm",), "hidden_norm"),
    Row(("",), "mask"),
    Row(("layers.*.input_layernorm",), "layers.*.attention_norm"),
    Row((ATTENTION + "q_proj",), "layers.*.attention.queries", "rows"),
    Row((ATTENTION + "k_proj", ATTENTION + "v_proj"), "layers.*.attention.keys_values", "rows"),
    Row((ATTENTION + "q_norm",), "layers.*.attention.q_norm"),
    Row((ATTENTION + "k_norm",), "layers.*.attention.k_norm"),
    Row((ATTENTION.rstrip("."),), "layers.*.attention.sinks"),
    Row((ATTENTION + "o_proj",), "layers.*.o", "columns"),
    Row(("layers.*.post_attention_layernorm",), "layers.*.mlp_norm"),
    Row(("layers.*.mlp.gate_proj", "layers.*.mlp.up_proj"), "layers.*.mlp.gate_up", "rows"),
    Row(("layers.*.mlp.down_proj",), "layers.*.mlp.down", "columns"),
    Row(("norm",), "norm"),
)
IGNORED = ("t2d", "layers.*.self_attn.rotary_emb.inv_freq", "rotary_emb.inv_freq")
SPELLED = (("self_attn.attention_sink_bias", "self_attn.sinks"),)
MASK = "mask_embedding"


class MaskEmbedding:
    """`mask_embedding`: the embedding of masks, in place of the mask token's."""

    weight: Tensor  # [H]

    def __init__(self, hidden_size: int) -> None:
        self.hidden_size = hidden_size

    def expects(self) -> dict[str, tuple[Wanted | None, ...]]:
        return {MASK: (Wanted((self.hidden_size,)),)}

    def fill(self, pieces: dict[str, list[Tensor | None]], placement: Placement) -> None:
        piece = pieces[MASK][0]
        assert piece is not None
        self.weight = piece.to(placement.device, placement.dtype, copy=True)


class ContextAttention(PagedSelfAttention):
    """Attention whose keys and values may be those of other rows than its queries."""

    __slots__ = ("keys_values", "queries")

    def __init__(self, text: TextConfig, layer: LayerConfig) -> None:
        super().__init__(text, layer)
        width, bias = text.num_kv_heads * text.head_dim, text.qkv_bias
        self.queries = Linear(text.hidden_size, text.num_heads * text.head_dim, bias=bias)
        self.keys_values = Linear(text.hidden_size, width, width, bias=bias)

    def store_context(self, context: Tensor, rope: Rope, meta: AttentionMeta, cache: LayerCache) -> None:
        """Writes the keys and values of context rows [T, hidden]."""
        keys, values, scales = pages_of(cache)
        heads = 0, self.num_kv_heads, self.head_dim
        rows, pages = self.keys_values(context), (keys, values, meta.slot_mapping)
        qkv_rope_store(rows, rope.cos, rope.sin, *self._head_norms(), *heads, *pages, False, scales)

    def _projected(self, x: Normed) -> Tensor:
        rows = x.rows()
        return torch.cat([self.queries(rows), self.keys_values(rows)], 1)


class BlockLayer:
    """One decoder layer over the block."""

    def __init__(self, text: TextConfig, layer: LayerConfig) -> None:
        self.attention_norm, self.mlp_norm = (RMSNorm(text.hidden_size, text.norm_eps) for _ in range(2))
        self.attention = ContextAttention(text, layer)
        self.o = output_product(text)
        self.mlp = decoder_mlp(text)

    def __call__(self, x: Stream, rope: Rope, meta: AttentionMeta, cache: LayerCache, before: Tensor) -> None:
        """`before`: see Block; a layer without convolutions regards each query alone."""
        x.add(Product(self.o, self.attention(x.normed(self.attention_norm), rope, meta, cache)))
        x.add(self.mlp(x.normed(self.mlp_norm)))


class DFlash:
    """One drafter; the target lends its embedding and head if the files have none."""

    kind: Kind = "block"
    named = "DFlash"

    def __init__(self, config: BlockConfig, target: Decoder, shards: list[Shard]) -> None:
        text, hidden = config.text, config.text.hidden_size
        self.options, self.dtype, self.device, self._target = config, target.dtype, target.device, target
        longest = target.config.max_model_len or target.config.max_position
        self.config = config_of(self.named, config.folder, text, config.torch_dtype, longest)
        table = self.weight_table()
        names = {table.canonical(name) for shard in shards for name in shard.tensors}
        self.vocabulary = Vocabulary(target, names, hidden, config.vocab_size, config.small_head)
        self.fc = Linear(len(config.streams) * config.stream_width, hidden)
        self.hidden_norm = RMSNorm(hidden, text.norm_eps)
        self.mask = MaskEmbedding(hidden) if MASK in names else None
        self.layers = self.layers_of(config)
        self.norm = RMSNorm(hidden, text.norm_eps)
        self._rope = RopeTable(text.layers[0].rope, target.device, longest)
        self.skipped = config.skipped

    def layers_of(self, config: Any) -> Sequence[BlockLayer]:
        """The layers, without weights; `config`: the drafter's, of its own kind."""
        return [BlockLayer(config.text, layer) for layer in config.text.layers]

    @property
    def text(self) -> TextConfig:
        """The drafter's decoder."""
        return self.options.text

    @property
    def streams(self) -> Sequence[int]:
        """The target's streams that it reads."""
        return self.options.streams

    @property
    def mask_id(self) -> int:
        """See MaskedDrafter."""
        return self.options.mask_id

    @property
    def whole(self) -> tuple[bool, ...]:
        """See MaskedDrafter."""
        return self.options.whole

    @property
    def described(self) -> str:
        """See DraftModel."""
        options, count = self.options, len(self.layers)
        return (
            f"{self.named} of {count} layer{'s' * (count > 1)} with blocks of {options.block_size} and "
            f"{options.vocab_size:,} of {options.text.vocab_size:,} tokens, over the inputs of layers "
            f"{', '.join(map(str, options.streams))}"
        )

    @property
    def lent(self) -> LentHead | None:
        """See DraftModel."""
        return self.vocabulary.lent

    @property
    def warning(self) -> str:
        """See DraftModel."""
        return self.options.warning

    def weight_table(self) -> Table:
        """The tensors, by the names of z-lab's files."""
        return Table(ROWS + vocabulary.ROWS, ("model.",), IGNORED, SPELLED)

    def cache_specs(self) -> list[GuestSpec]:
        """A cache of keys and values for each layer."""
        return guest_specs(self._target, self.text, len(self.layers))

    def store(self, streams: list[Tensor], positions: Tensor, meta: AttentionMeta, caches: list[LayerCache]) -> None:
        """See MaskedDrafter."""
        rope, context = self._rope(text_places(positions)), self.hidden_norm(self.fc(torch.cat(streams, 1)))
        for layer, cache in zip(self.layers, caches, strict=True):
            layer.attention.store_context(context, rope, meta, cache)

    def block(self, queries: Block) -> Tensor:
        """See BlockDrafter."""
        hidden = self.hidden(queries)
        if self.options.scales_logits:
            return self.vocabulary.widened(self.products(hidden))
        return self.vocabulary.logits(hidden)

    def products(self, hidden: Tensor) -> Tensor:
        """New logits [n, tokens of the head] of hidden states [n, H], with the files' own scale and soft cap."""
        return self.options.scaled(self.vocabulary.products(hidden))

    def hidden(self, queries: Block) -> Tensor:
        """The normed hidden states [N, H] of N queries."""
        ids, rope = queries.token_ids, self._rope(text_places(queries.positions))
        embedded, scale = self.vocabulary.embedded(ids), self.options.embedding_scale
        if self.mask is not None:
            embedded = torch.where((ids == self.mask_id)[:, None], self.mask.weight, embedded)
        x = Stream(embedded if scale == 1.0 else embedded * scale)
        for layer, meta, cache in zip(self.layers, queries.metas, queries.caches, strict=True):
            layer(x, rope, meta, cache, queries.before)
        return self.norm(x.rows())
