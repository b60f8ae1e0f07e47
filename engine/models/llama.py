"""Llama, and every family that is Llama but for flags: Mistral (windows), Qwen2 (biases), Qwen3 (per-head norms).

Thread: device. Pre-norm decoder: RMSNorm, grouped-query attention with rotary positions, SwiGLU.
"""

from __future__ import annotations

from torch import Tensor

from engine.attention.meta import AttentionMeta
from engine.cache.spec import LayerCache
from engine.checkpoint.text import read_text
from engine.kernels.activation import Activation
from engine.layers.attention import PagedSelfAttention, Rope
from engine.layers.linear import Linear
from engine.layers.mlp import GatedMLP
from engine.layers.norm import RMSNorm
from engine.layers.stream import Product, Stream
from engine.model_config import LayerConfig, TextConfig
from engine.models.decoder import Decoder, DecoderLayer
from engine.models.family import Family
from engine.weights.table import Row, Table

ATTENTION = "layers.*.self_attn."
DECODER_ROWS = (
    Row(("embed_tokens",), "embed"),
    Row(("layers.*.input_layernorm",), "layers.*.attention_norm"),
    Row((ATTENTION + "q_proj", ATTENTION + "k_proj", ATTENTION + "v_proj"), "layers.*.attention.qkv", "rows"),
    Row((ATTENTION + "q_norm",), "layers.*.attention.q_norm"),
    Row((ATTENTION + "k_norm",), "layers.*.attention.k_norm"),
    Row((ATTENTION + "o_proj",), "layers.*.o", "columns"),
    Row(("layers.*.post_attention_layernorm",), "layers.*.mlp_norm"),
    Row(("layers.*.mlp.gate_proj", "layers.*.mlp.up_proj"), "layers.*.mlp.gate_up", "rows"),
    Row(("layers.*.mlp.down_proj",), "layers.*.mlp.down", "columns"),
    Row(("norm",), "norm"),
    Row(("lm_head",), "head", "rows"),
)
# Frequencies are computed from config.json; old files hold them as well.
DECODER_IGNORE = ("layers.*.rotary_emb.inv_freq",)


class LlamaLayer(DecoderLayer):
    """Attention and MLP, a norm before each, and where the configuration has post_norms another one behind each."""

    def __init__(self, text: TextConfig, layer: LayerConfig) -> None:
        def norm() -> RMSNorm:
            return RMSNorm(text.hidden_size, text.norm_eps, text.norm_offset)

        self.attention_norm = norm()
        self.attention = PagedSelfAttention(text, layer)
        self.o = Linear(text.num_heads * text.head_dim, text.hidden_size, bias=text.o_bias)
        self.attention_post_norm = norm() if layer.post_norms else None
        self.mlp_norm = norm()
        self.mlp = GatedMLP(text.hidden_size, text.intermediate_size, text.mlp_bias, Activation.SILU)
        self.mlp_post_norm = norm() if layer.post_norms else None

    def __call__(self, x: Stream, rope: Rope, meta: AttentionMeta, cache: LayerCache, index: Tensor | None) -> None:
        attended = self.attention(x.normed(self.attention_norm), rope, meta, cache)  # [T, num_heads * head_dim]
        x.add(Product(self.o, x.keep(index, attended)), self.attention_post_norm)
        del attended  # the stream gives these rows back when they have been multiplied
        x.add(self.mlp(x.normed(self.mlp_norm)), self.mlp_post_norm)


class Llama(Decoder):
    """A text decoder; the base of every model whose text part is one of these families."""

    WEIGHTS = Table(DECODER_ROWS, ignore=DECODER_IGNORE)

    def layer(self, number: int) -> DecoderLayer:
        return LlamaLayer(self.config.text, self.config.text.layers[number])


FAMILY = Family(name="Llama", model=Llama, text=read_text)
