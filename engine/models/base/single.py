"""SingleLayer: a norm, then attention, a layer with a state, an MLP or experts. Thread: device."""

from __future__ import annotations

from torch import Tensor

from engine.base.mixers import WITH_STATE
from engine.base.model_config import LayerConfig, TextConfig
from engine.layers.attention import output_product, self_attention
from engine.layers.mlp import decoder_mlp
from engine.layers.moe import SparseMLP
from engine.layers.norm import stream_norm
from engine.layers.rope import Rope
from engine.layers.states import Recurrent, recurrent
from engine.layers.stream import Product, Stream
from engine.models.base.decoder import Caches, Decoder, DecoderLayer, Metas


class SingleLayer(DecoderLayer):
    """A norm, then exactly one part: attention, a layer with a state, an MLP or experts."""

    is_dealt = True

    def __init__(self, text: TextConfig, layer: LayerConfig, state: Recurrent | None) -> None:
        self.attention_norm = stream_norm(text)
        self.attention = self.o = self.mlp = None
        self.state = state
        self.output = None if state is None else state.o
        if state is not None:
            return
        if layer.mixer is None:
            self.attention = self_attention(text, layer)
            self.o = self.output = output_product(text)
        elif layer.experts is not None:
            self.experts = SparseMLP(text, layer.experts)
        else:
            self.mlp = decoder_mlp(text)

    def __call__(self, x: Stream, rope: Rope, metas: Metas, caches: Caches, index: Tensor | None) -> None:
        rows = x.normed(self.attention_norm)
        if self.output is not None:
            (mixer,), (meta,), (cache,) = self.mixers, metas, caches
            x.add(Product(self.output, x.keep(index, mixer(rows, rope, meta, cache))))
        elif self.experts is not None:
            x.add(self.experts(rows, x.count, x.capture))
        elif self.mlp is not None:
            x.add(self.mlp(rows))


class SingleDecoder(Decoder):
    """A decoder whose layers are all SingleLayer."""

    def layer(self, number: int) -> DecoderLayer:
        text, layer = self.config.text, self.config.text.layers[number]
        state = None
        if isinstance(layer.mixer, WITH_STATE):
            state = recurrent(text.hidden_size, layer.mixer, self.dtype, self.device)
        return SingleLayer(text, layer, state)
