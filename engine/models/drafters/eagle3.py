"""EAGLE-3 and 3.1: decoder layers over a token's embedding and the feature of the token before.

    feature = fc(cat(streams))                        of the target's token; later the last layer's own output
    x = cat(input_norm(embed), hidden_norm(feature))  r = norm_before_residual ? hidden_norm(feature) : feature
    a = r + attention(x);  out = a + mlp(mlp_norm(a));  further layers are Llama's;  logits = head(norm(out))
    next feature = norm_output ? norm(out) : out

P-EAGLE, with `mask_hidden`: one pass guesses all drafts; behind the newest token lie masks, whose feature is
fc(mask_hidden).

Without `fc` (use_aux_hidden_state: false) the feature is the target's hidden state behind its final norm, as in vLLM.
Thread: device. Source: arXiv:2503.01840 and the files of SafeAILab/EAGLE; options of 3.1 as in
vllm-project/speculators.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from engine.attention.meta import AttentionMeta
from engine.base.model_config import TextConfig
from engine.cache.spec import LayerCache
from engine.cache.tokens import GuestSpec
from engine.kernels.gemm.pack import Placement
from engine.layers.attention import qkv_product, self_attention
from engine.layers.batch import Batch
from engine.layers.linear import Linear
from engine.layers.mlp import decoder_mlp
from engine.layers.norm import Normed, RMSNorm
from engine.layers.rope import Rope, RopeTable
from engine.layers.stream import Product, Stream
from engine.models.base.decoder import Decoder
from engine.models.drafters import vocabulary
from engine.models.drafters.base import Kind, config_of, guest_specs, places_before
from engine.models.drafters.eagle_settings import EagleConfig
from engine.models.drafters.small_head import LentHead
from engine.models.drafters.vocabulary import Vocabulary
from engine.models.text.llama import LlamaLayer
from engine.weights.files import Shard
from engine.weights.table import Row, Table, Wanted

LAYER = "layers.0."
ROWS = (
    Row(("fc",), "fc"),
    Row(("input_norm",), "joined_norm"),
    Row(("fc_norm.*",), "stream_norms.*"),
    Row((LAYER + "hidden_norm",), "layer.hidden_norm"),
    Row(("norm",), "norm"),
    Row(("",), "mask"),
)
MASK = "mask_hidden"
LAYER_ROWS = (
    Row(("input_layernorm",), "attention_norm"),
    Row(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "attention.qkv", "rows"),
    Row(("self_attn.o_proj",), "o", "columns"),
    Row(("post_attention_layernorm",), "mlp_norm"),
    Row(("mlp.gate_proj", "mlp.up_proj"), "mlp.gate_up", "rows"),
    Row(("mlp.down_proj",), "mlp.down", "columns"),
)
IGNORED = ("t2d", "layers.*.self_attn.rotary_emb.inv_freq", "rotary_emb.inv_freq")


class FirstLayer:
    """The first decoder layer, whose attention reads a token's embedding and the feature of the token before."""

    def __init__(self, config: EagleConfig) -> None:
        text = config.text
        hidden = text.hidden_size
        self.attention_norm, self.hidden_norm, self.mlp_norm = (RMSNorm(hidden, text.norm_eps) for _ in range(3))
        self.attention = self_attention(text, text.layers[0])
        self.attention.qkv = qkv_product(replace(text, hidden_size=2 * hidden), text.layers[0])
        self.o = Linear(text.num_heads * text.head_dim, hidden, bias=text.o_bias)
        self.mlp = decoder_mlp(text)
        self._norm_before_residual = config.norm_before_residual

    def joined(self, embedded: Tensor, before: Tensor) -> tuple[Normed, Tensor]:
        """The input of the attention's projection, [T, 2 H], and a new residual stream [T, H]."""
        normed = self.hidden_norm(before)
        rows = torch.cat([self.attention_norm(embedded), normed], 1)
        return Normed(None, rows), normed if self._norm_before_residual else before.clone()

    def __call__(self, embedded: Tensor, before: Tensor, rope: Rope, meta: AttentionMeta, cache: LayerCache) -> Stream:
        """The stream behind the layer, [T, H]; writes the tokens' keys and values."""
        rows, residual = self.joined(embedded, before)
        x = Stream(residual)
        x.add(Product(self.o, self.attention(rows, rope, meta, cache)))
        x.add(self.mlp(x.normed(self.mlp_norm)))
        return x


class MaskStreams:
    """`mask_hidden`: what stands for the target's streams behind the first draft, when one pass guesses all."""

    weight: Tensor  # [1, numbers of the joined streams]

    def __init__(self, shards: list[Shard], table: Table, width: int) -> None:
        found = (info.shape for each in shards for name, info in each.tensors.items() if table.canonical(name) == MASK)
        shape = tuple(next(found, (1, width)))  # some files have further dimensions of 1
        self._shape = shape if torch.Size(shape).numel() == width else (1, width)

    def expects(self) -> dict[str, tuple[Wanted | None, ...]]:
        return {MASK: (Wanted(self._shape),)}

    def fill(self, pieces: dict[str, list[Tensor | None]], placement: Placement) -> None:
        piece = pieces[MASK][0]
        assert piece is not None
        self.weight = piece.to(placement.device, placement.dtype, copy=True).view(1, -1)


class Eagle3:
    """One drafter; the target lends its embedding and head if the files have none."""

    kind: Kind

    def __init__(self, config: EagleConfig, target: Decoder, shards: list[Shard]) -> None:
        text = config.text
        self.options, self.dtype, self.device, self._target = config, target.dtype, target.device, target
        longest = target.config.max_model_len or target.config.max_position
        self.config = config_of("Eagle3", config.folder, text, config.torch_dtype, longest)
        table = self.weight_table()
        names = {table.canonical(name) for shard in shards for name in shard.tensors}
        hidden, count, width = text.hidden_size, len(config.streams), config.stream_width
        self.vocabulary = Vocabulary(target, names, hidden, config.vocab_size, config.small_head)
        self.fc = Linear(count * width, hidden) if config.joins_streams else None
        self.joined_norm = RMSNorm(count * width, text.norm_eps) if config.norm_before_fc else None
        self.stream_norms = [RMSNorm(width, text.norm_eps) for _ in range(count) if config.fc_norm]
        self.layer = FirstLayer(config)
        self.further = [LlamaLayer(text, layer) for layer in text.layers[1:]]
        self.norm = RMSNorm(hidden, text.norm_eps)
        self.kind = "chain" if config.mask_id is None else "parallel"
        self.mask = None if config.mask_id is None else MaskStreams(shards, table, count * width)
        self._rope = RopeTable(text.layers[0].rope, target.device, self.config.max_position)

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
        """See ParallelDrafter."""
        return self.options.mask_id or 0

    @property
    def named(self) -> str:
        """Which kind of head it is."""
        return "EAGLE-3" if self.mask is None else "P-EAGLE"

    @property
    def described(self) -> str:
        """See ChainDrafter."""
        options, count = self.options, len(self.options.text.layers)
        over = (
            "the inputs of layers " + ", ".join(map(str, options.streams))
            if self.fc is not None
            else "the last hidden state"
        )
        return (
            f"{self.named} of {count} layer{'s' * (count > 1)} with {options.vocab_size:,} of "
            f"{options.text.vocab_size:,} tokens, over {over}"
        )

    @property
    def lent(self) -> LentHead | None:
        """See DraftModel."""
        return self.vocabulary.lent

    @property
    def warning(self) -> str:
        """See ChainDrafter."""
        return self.options.warning

    def weight_table(self) -> Table:
        """The tensors, by the names of speculators; flat files call the first layer `midlayer`."""
        rows = list(ROWS + vocabulary.ROWS)
        for number in range(len(self.text.layers)):
            stem, part = f"layers.{number}.", f"further.{number - 1}." if number else "layer."
            rows += [Row(tuple(stem + name for name in row.names), part + row.target, row.split) for row in LAYER_ROWS]
        return Table(tuple(rows), ("model.",), IGNORED, (("midlayer.", LAYER),))

    def cache_specs(self) -> list[GuestSpec]:
        """A cache of keys and values for each layer."""
        return guest_specs(self._target, self.text, len(self.text.layers))

    def feature(self, streams: list[Tensor]) -> Tensor:
        """See ChainDrafter."""
        if self.fc is None:
            return self._target.norm(streams[0])
        if self.stream_norms:
            streams = [norm(stream) for norm, stream in zip(self.stream_norms, streams, strict=True)]
        joined = torch.cat(streams, 1)
        return self.fc(joined if self.joined_norm is None else self.joined_norm(joined))

    def inputs(self, batch: Batch) -> Tensor:
        """See ChainDrafter."""
        embedded = self.vocabulary.embedded(batch.token_ids)
        if embedded.shape[1] != self._target.config.text.hidden_size:  # the target's media rows do not fit
            return embedded
        return self._target.with_media(embedded, batch)

    def masked(self) -> Tensor:
        """See ParallelDrafter."""
        assert self.mask is not None, "the head guesses one draft in a pass"
        return self.feature(list(self.mask.weight.chunk(len(self.streams), 1)))

    def store(
        self, embedded: Tensor, before: Tensor, positions: Tensor, meta: AttentionMeta, caches: list[LayerCache]
    ) -> None:
        """See ChainDrafter."""
        rope = self._rope(places_before(positions))
        if not self.further:
            self.layer.attention.store(self.layer.joined(embedded, before)[0], rope, meta, caches[0])
            return
        x = self.layer(embedded, before, rope, meta, caches[0])
        for layer, cache in zip(self.further[:-1], caches[1:-1], strict=True):
            layer(x, rope, (meta,), (cache,), None)
        self.further[-1].store(x, rope, (meta,), caches[-1:])

    def step(
        self, token_ids: Tensor, before: Tensor, positions: Tensor, meta: AttentionMeta, caches: list[LayerCache]
    ) -> tuple[Tensor, Tensor]:
        """See ChainDrafter."""
        rope = self._rope(places_before(positions))
        x = self.layer(self.vocabulary.embedded(token_ids), before, rope, meta, caches[0])
        for layer, cache in zip(self.further, caches[1:], strict=True):
            layer(x, rope, (meta,), (cache,), None)
        out = x.rows()
        hidden = self.norm(out)
        return self.vocabulary.logits(hidden), hidden if self.options.norm_output else out
