"""Llama, and every family that is Llama but for flags: Mistral (windows), Qwen2 (biases), Qwen3 (per-head norms).

Thread: device. Pre-norm decoder: RMSNorm, grouped-query attention with rotary positions, SwiGLU. One residual stream,
changed in place by the last product of each half of a layer, which is told the norm that reads it next:

    x = embed(tokens)
    each layer: x += o(attention(norm(x))); x += down(swiglu(norm(x)))
    logits = head(norm(x))

The last layer stores the keys and values of every token; what follows them there is read of the sampled ones only. So
from its output product on there are no others, and where nothing is sampled it ends with its keys and values.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from engine.cache.spec import CacheSpec
from engine.checkpoint.text import read_text
from engine.layers.attention import PagedSelfAttention
from engine.layers.embed import Embedding, Head
from engine.layers.mlp import GatedMLP
from engine.layers.norm import Normed, RMSNorm
from engine.layers.rope import RopeTable
from engine.model_config import ModelConfig
from engine.models.base import Model
from engine.models.family import Family
from engine.step.batch import Batch
from engine.weights.table import Row, Table

ATTENTION = "layers.*.self_attn."
DECODER_ROWS = (
    Row(("embed_tokens",), "embed"),
    Row(("layers.*.input_layernorm",), "layers.*.attention_norm"),
    Row((ATTENTION + "q_proj", ATTENTION + "k_proj", ATTENTION + "v_proj"), "layers.*.attention.qkv"),
    Row((ATTENTION + "q_norm",), "layers.*.attention.q_norm"),
    Row((ATTENTION + "k_norm",), "layers.*.attention.k_norm"),
    Row((ATTENTION + "o_proj",), "layers.*.attention.o"),
    Row(("layers.*.post_attention_layernorm",), "layers.*.mlp_norm"),
    Row(("layers.*.mlp.gate_proj", "layers.*.mlp.up_proj"), "layers.*.mlp.gate_up"),
    Row(("layers.*.mlp.down_proj",), "layers.*.mlp.down"),
    Row(("norm",), "norm"),
    Row(("lm_head",), "head"),
)
# Frequencies are computed from config.json; old files hold them as well.
DECODER_IGNORE = ("layers.*.rotary_emb.inv_freq",)


class DecoderLayer:
    """Attention and MLP with the norm before each."""

    __slots__ = ("attention", "attention_norm", "mlp", "mlp_norm", "number", "rope")

    def __init__(
        self, attention: PagedSelfAttention, mlp: GatedMLP, hidden_size: int, eps: float, rope: int, number: int
    ) -> None:
        self.attention = attention
        self.mlp = mlp
        self.attention_norm = RMSNorm(hidden_size, eps)
        self.mlp_norm = RMSNorm(hidden_size, eps)
        self.rope = rope  # which of the model's rotary tables
        self.number = number  # from 0: which of the caches


class Llama(Model):
    """A text decoder; the base of every model whose text part is one."""

    WEIGHTS = Table(DECODER_ROWS, ignore=DECODER_IGNORE)

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
        text = config.text
        self.config = config
        self.dtype = dtype
        self.device = device
        self.head = Head(text.vocab_size, text.hidden_size, text.tie_embeddings)
        self.embed = Embedding(text.vocab_size, text.hidden_size, self.head)
        self.norm = RMSNorm(text.hidden_size, text.norm_eps)
        kinds = list(dict.fromkeys(layer.rope for layer in text.layers))
        self.ropes = [RopeTable(kind, device) for kind in kinds]
        self.layers = [
            DecoderLayer(
                PagedSelfAttention(text, layer),
                GatedMLP(text.hidden_size, text.intermediate_size, text.mlp_bias),
                text.hidden_size,
                text.norm_eps,
                kinds.index(layer.rope),
                number,
            )
            for number, layer in enumerate(text.layers)
        ]

    def weight_table(self) -> Table:
        if not self.config.text.tie_embeddings:
            return self.WEIGHTS
        # Some tied checkpoints hold the embedding a second time.
        return replace(self.WEIGHTS, ignore=(*self.WEIGHTS.ignore, "lm_head.weight"))

    def cache_specs(self) -> list[CacheSpec]:
        return [layer.attention.cache_spec() for layer in self.layers]

    def forward(self, batch: Batch, out: Tensor | None = None) -> Tensor:
        # The stream of all tokens has no name of its own here: the last layer lets go of it.
        x = Normed(self.layers[0].attention_norm, self._embedded(batch))
        tables = [rope(batch.positions) for rope in self.ropes]
        following = [layer.attention_norm for layer in self.layers[1:]] + [self.norm]
        last = self.layers[-1]
        for layer, after in zip(self.layers, following):
            cos, sin = tables[layer.rope]
            k_cache, v_cache = batch.caches[layer.number]
            index = batch.sample_index if layer is last else None
            if index is not None and not len(index):  # middle chunks of prompts: nobody reads more than the cache
                layer.attention.store(x, cos, sin, batch.attention, k_cache, v_cache)
                return x.residual[:0]
            x = layer.attention(x, layer.mlp_norm, cos, sin, batch.attention, k_cache, v_cache, index)
            x = layer.mlp(x, after)
        return x.rows(out)  # [S, hidden], or [T, hidden]

    @contextmanager
    def abridged(self) -> Iterator[None]:
        """The first layer, whose norm no product does, the last, and of those between one of each kind."""
        layers, kinds = self.layers, self.config.text.layers
        first, last = layers[0], layers[-1]
        self.layers = list({(kinds[layer.number], layer is first, layer is last): layer for layer in layers}.values())
        try:
            yield
        finally:
            self.layers = layers

    def _embedded(self, batch: Batch) -> Tensor:
        residual = self.embed(batch.token_ids)  # [T, hidden]
        if batch.overlay is not None:
            shown, rows = batch.overlay
            residual = torch.where(shown, rows, residual)
        for start, length, rows in batch.media:
            residual[start : start + length] = rows
        return residual

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)


FAMILY = Family(name="Llama", model=Llama, text=read_text)
