"""Gemma 4 (text): Gemma 3 with two head widths, layers that read other layers' keys, and per-layer inputs.

    full layers            wider heads, with the leading quarter of the pairs rotated; in the large models the key
                           projection also makes the values
    values                 pass an RMSNorm without weights, and scores are not scaled: queries and keys are normalised
    the last layers        of the small models have queries only: they read the keys and values of the last layer of
                           the same type that has keys, and their MLP is twice as wide
    per-layer inputs       of the small models: layer(x) += norm(project(act(gate(x)) * input)), where `input` depends
                           on token and layer; it comes from a second embedding table and from the embeddings
    experts                of one of the large models run in parallel with each MLP, with separate norms
    a number per layer     multiplies the stream after each layer

Thread: device.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from engine.base.model_config import ModelConfig, TextConfig
from engine.layers.bare import Bare
from engine.layers.batch import Batch
from engine.layers.linear import Linear
from engine.layers.moe import SparseMLP
from engine.layers.norm import Norm, RMSNorm, stream_norm
from engine.layers.per_layer import PerLayerInput, PerLayerTable
from engine.layers.rope import Rope
from engine.layers.stream import Addend, Made, Stream
from engine.models.base.decoder import Caches, DecoderLayer, Metas
from engine.models.base.family import Family
from engine.models.text.gemma import KEYS, SANDWICH_ROWS
from engine.models.text.gemma4_attention import Attention
from engine.models.text.gemma4_config import text
from engine.models.text.llama import DECODER_IGNORE, Llama, LlamaLayer
from engine.models.text.sparse import as_stored
from engine.weights.table import Row, Table

KEPT = ("k_proj", "v_proj", "k_norm", "v_norm")  # also in released files of layers that do not use them


class Gemma4Layer(LlamaLayer):
    """Attention and MLP between norms, the term of the per-layer input, and a factor per layer."""

    is_dealt = True

    def __init__(self, text: TextConfig, number: int) -> None:
        layer = text.layers[number]
        super().__init__(text, replace(layer, experts=None))
        self.attention = Attention(text.of_layer(layer), layer)
        self.per_layer_input = PerLayerInput(text, number) if text.hidden_size_per_layer_input else None
        self.scalar = Bare("layer_scalar", 1)
        self.experts = None if layer.experts is None else SparseMLP(text, layer.experts)
        has = self.experts is not None
        self.experts_norm, self.of_mlp_norm, self.of_experts_norm = (stream_norm(text) if has else None for _ in "123")

    def __call__(self, x: Stream, rope: Rope, metas: Metas, caches: Caches, index: Tensor | None) -> None:
        super().__call__(x, rope, metas, caches, index)
        if self.per_layer_input is not None:
            self.per_layer_input.add_to(x)
        x.rows().mul_(self.scalar.value)

    def fed(self, x: Stream, norm: Norm | None) -> Addend:
        """The MLP's result, plus the experts' result if the layer has experts, each through a norm."""
        if self.experts is None:
            return super().fed(x, norm)
        assert self.mlp is not None
        assert self.of_mlp_norm is not None
        assert self.of_experts_norm is not None
        dense = self.of_mlp_norm(x.summed(self.mlp(x.normed(norm))))
        sparse = x.summed(self.experts(x.normed(self.experts_norm), x.count, x.capture))
        return Made(dense.add_(self.of_experts_norm(sparse)))


class Gemma4(Llama):
    """The decoder, and the embeddings of its per-layer inputs."""

    WEIGHTS = Table(
        (
            *SANDWICH_ROWS,
            Row(("layers.*",), "layers.*.scalar"),
            Row(("layers.*.per_layer_input_gate",), "layers.*.per_layer_input.gate"),
            Row(("layers.*.per_layer_projection",), "layers.*.per_layer_input.project"),
            Row(("layers.*.post_per_layer_input_norm",), "layers.*.per_layer_input.norm"),
            Row(("layers.*.pre_feedforward_layernorm_2",), "layers.*.experts_norm"),
            Row(("layers.*.post_feedforward_layernorm_1",), "layers.*.of_mlp_norm"),
            Row(("layers.*.post_feedforward_layernorm_2",), "layers.*.of_experts_norm"),
            Row(("layers.*.router.proj",), "layers.*.experts.router"),
            Row(("layers.*.router",), "layers.*.experts.router_norm"),
            Row(("layers.*.router",), "layers.*.experts.expert_scale"),
            Row(("layers.*.experts",), "layers.*.experts.gate_up", "rows"),
            Row(("layers.*.experts",), "layers.*.experts.down", "columns"),
            Row(("embed_tokens_per_layer",), "per_layer_embed"),
            Row(("per_layer_model_projection",), "per_layer_projection"),
            Row(("per_layer_projection_norm",), "per_layer_norm"),
        ),
        ignore=DECODER_IGNORE,
        spelled=((".moe.experts.", ".experts."),),
    )

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
        super().__init__(config, dtype, device)
        text = config.text
        self.per_layer_embed = self.per_layer_projection = self.per_layer_norm = None
        self.scales = [1.0, 1.0, 1.0]
        if width := text.hidden_size_per_layer_input:
            self.per_layer_embed = PerLayerTable(text.vocab_size, len(text.layers) * width)
            self.per_layer_projection = Linear(text.hidden_size, len(text.layers) * width)
            self.per_layer_norm = RMSNorm(width, text.norm_eps)
            scales = torch.tensor([width**0.5, text.hidden_size**-0.5, 2.0**-0.5])
            self.scales = [float(scales[0].to(dtype)), *scales[1:].tolist()]  # rounded as in training
        read_nowhere = (number for number, layer in enumerate(text.layers) if layer.kv_shared_with is not None)
        ignored = (f"layers.{number}.self_attn.{name}.*" for number in read_nowhere for name in KEPT)
        self.table = replace(self.table, ignore=(*self.table.ignore, *ignored))

    def weight_table(self) -> Table:
        return as_stored(super().weight_table(), self.config.text)

    def layer(self, number: int) -> DecoderLayer:
        return Gemma4Layer(self.config.text, number)

    def per_layer_inputs(self, batch: Batch, rows: Tensor) -> Tensor | None:
        if self.per_layer_embed is None or self.per_layer_projection is None or self.per_layer_norm is None:
            return None
        of_token, of_rows, of_both = self.scales
        shape = len(rows), len(self.layers), self.config.text.hidden_size_per_layer_input
        projected = self.per_layer_norm((self.per_layer_projection(rows) * of_rows).view(-1, shape[2])).view(shape)
        return projected.add_(self.per_layer_embed(batch.token_ids).mul_(of_token).view(shape)).mul_(of_both)


FAMILY = Family(name="Gemma 4", architectures=("Gemma4ForCausalLM",), inside=True, model=Gemma4, text=text, keys=KEYS)
