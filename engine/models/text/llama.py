"""Llama, and the layers of all families that differ from Llama only in configuration, names and order of parts.

Thread: device. Llama itself is a pre-norm decoder: RMSNorm, grouped-query attention with rotary positions, SwiGLU.
engine/base/model_config.py lists the alternatives that families may declare.
"""

from __future__ import annotations

from torch import Tensor

from engine.base.mixers import WITH_STATE, ConvolutionConfig
from engine.base.model_config import LayerConfig, TextConfig
from engine.checkpoint.text import read_text
from engine.layers.attention import output_product, self_attention
from engine.layers.convolution import GatedConvolution
from engine.layers.linear import Linear
from engine.layers.mlp import GatedMLP, PlainMLP, decoder_mlp
from engine.layers.moe import SparseMLP
from engine.layers.norm import Norm, stream_norm
from engine.layers.rope import Rope
from engine.layers.states import Recurrent, recurrent
from engine.layers.stream import Addend, Product, Stream
from engine.models.base.decoder import Caches, Decoder, DecoderLayer, Metas
from engine.models.base.family import Family
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
# Frequencies are computed from config.json; old files also hold them.
DECODER_IGNORE = ("layers.*.rotary_emb.inv_freq",)


class LlamaLayer(DecoderLayer):
    """Attention, then MLP or experts, with norms before each (pre_norms), after each (post_norms), or both.

    `mlp`: replaces the MLP that the configuration describes. `state`: replaces attention.
    """

    is_dealt = True
    o: Linear | None  # attention's output projection
    mlp: GatedMLP | PlainMLP | None  # None: the layer has experts
    experts: SparseMLP | None

    def __init__(
        self,
        text: TextConfig,
        layer: LayerConfig,
        mlp: GatedMLP | PlainMLP | None = None,
        state: Recurrent | None = None,
    ) -> None:
        def norm(has: bool) -> Norm | None:
            return stream_norm(text) if has else None

        text = text.of_layer(layer)
        self.attention_norm = norm(layer.pre_norms)
        self.attention = self.o = None
        if state is not None:
            self.state = state
            self.output = state.o
        elif not isinstance(layer.mixer, ConvolutionConfig):
            self.attention = self_attention(text, layer)
            self.o = self.output = output_product(text)
        else:
            self.convolution = GatedConvolution(text.hidden_size, layer.mixer)
            self.output = self.convolution.o
        self.attention_post_norm = norm(layer.post_norms)
        self.mlp_norm = norm(layer.pre_norms)
        self.experts = None if layer.experts is None else SparseMLP(text, layer.experts)
        self.mlp = mlp or decoder_mlp(text) if self.experts is None else None
        self.mlp_post_norm = norm(layer.post_norms)

    def __call__(self, x: Stream, rope: Rope, metas: Metas, caches: Caches, index: Tensor | None) -> None:
        attended = self.mixed(x, rope, metas, caches)  # [T, num_heads * head_dim]
        x.add(Product(self.output, x.keep(index, attended)), self.attention_post_norm)
        del attended  # the stream frees these rows after the multiplication
        x.add(self.fed(x, self.mlp_norm), self.mlp_post_norm)

    def mixed(self, x: Stream, rope: Rope, metas: Metas, caches: Caches) -> Tensor:
        """The output of the layer's single mixer."""
        (mixer,), (meta,), (cache,) = self.mixers, metas, caches
        return mixer(x.normed(self.attention_norm), rope, meta, cache)

    def fed(self, x: Stream, norm: Norm | None) -> Addend:
        """The output of the MLP or the experts, which read the stream through `norm`."""
        rows = x.normed(norm)
        if self.experts is not None:
            return self.experts(rows, x.count, x.capture)
        assert self.mlp is not None
        return self.mlp(rows)


class ParallelLayer(LlamaLayer):
    """Attention and MLP in parallel: both read the layer's input, through one shared norm or two norms."""

    is_dealt = True

    def __init__(self, text: TextConfig, layer: LayerConfig) -> None:
        super().__init__(text, layer)
        if text.shared_norm:
            self.mlp_norm = None

    def __call__(self, x: Stream, rope: Rope, metas: Metas, caches: Caches, index: Tensor | None) -> None:
        attended = self.mixed(x, rope, metas, caches)  # [T, num_heads * head_dim]
        attended = x.keep(index, attended)
        mlp = self.fed(x, self.mlp_norm or self.attention_norm)
        x.add(Product(self.output, attended))
        x.add(mlp)


class Llama(Decoder):
    """The base of every model with Llama's layers."""

    WEIGHTS = Table(DECODER_ROWS, ignore=DECODER_IGNORE)

    def layer(self, number: int) -> DecoderLayer:
        text, layer = self.config.text, self.config.text.layers[number]
        if isinstance(layer.mixer, WITH_STATE):
            return LlamaLayer(text, layer, state=recurrent(text.hidden_size, layer.mixer, self.dtype, self.device))
        return (ParallelLayer if text.parallel else LlamaLayer)(text, layer)


FAMILY = Family(name="Llama", architectures=("LlamaForCausalLM",), inside=True, model=Llama, text=read_text)
