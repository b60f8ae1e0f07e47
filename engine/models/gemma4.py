"""Gemma 4 (text): Gemma 3 with heads of two widths, layers that read other layers' keys, and embeddings per layer.

    layers that see all    wider heads, of which the leading quarter of the pairs turns; the large models make their
                           values by the product of the keys
    values                 pass an RMSNorm without weights, and scores are not scaled: queries and keys are normalised
    the last layers        of the small models have queries only: they read the keys and values of the last layer of
                           their kind that has some, and their MLP is twice as wide
    embeddings per layer   of the small models: layer(x) += norm(project(act(gate(x)) * beside)), where `beside` is of
                           this token and layer, from a table of its own and from the stream's first rows
    a number per layer     multiplies the stream behind each layer

Thread: device.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from engine.attention.meta import AttentionMeta
from engine.batch import Batch
from engine.cache.spec import LayerCache
from engine.checkpoint.rope import FULL, SLIDING, RopeDefaults, read_rope
from engine.checkpoint.section import Section
from engine.checkpoint.text import every_layer, read_text, refuse
from engine.errors import ConfigError
from engine.kernels.activation import BY_NAME, pointwise
from engine.kernels.gemm.pack import Placement
from engine.kernels.projection_norm import normalise_projections
from engine.kernels.rotate import apply_rope
from engine.layers.attention import PagedSelfAttention
from engine.layers.bare import Bare
from engine.layers.embed import Embedding
from engine.layers.linear import Linear
from engine.layers.norm import Normed, RMSNorm, stream_norm
from engine.layers.rope import Rope
from engine.layers.stream import Product, Stream
from engine.model_config import LayerConfig, ModelConfig, TextConfig
from engine.models.both_ways import AHEAD, attends_ahead
from engine.models.decoder import DecoderLayer
from engine.models.family import Family
from engine.models.gemma import KEYS, SANDWICH_ROWS
from engine.models.llama import DECODER_IGNORE, Llama, LlamaLayer
from engine.weights.table import Row, Table, Wanted

KEPT = ("k_proj", "v_proj", "k_norm", "v_norm")  # released files have them of layers that never read them, too
BESIDE = "hidden_size_per_layer_input"
PERIOD = 6  # where a file has no layer_types: every so many layers one sees all
ROPES: dict[str, Any] = {  # rope_parameters of a file that has none
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}


class Projections(Linear):
    """Queries, keys and values, of which a checkpoint may have fewer: `stored` says which matrix makes which piece."""

    __slots__ = ("ones", "stored")

    ones: Tensor  # [values] float32: the weights of a norm without weights

    def __init__(self, hidden_size: int, sizes: tuple[int, ...], stored: tuple[int, ...], bias: bool) -> None:
        super().__init__(hidden_size, *sizes, bias=bias)
        self.stored = stored

    def expects(self) -> dict[str, tuple[Wanted | None, ...]]:
        wanted = super().expects()
        return {
            kind: tuple(pieces[self.stored.index(n)] if n in self.stored else None for n in range(3))
            for kind, pieces in wanted.items()
        }

    def fill(self, pieces: dict[str, list[Tensor | None]], placement: Placement) -> None:
        super().fill({kind: [given[n] for n in self.stored] for kind, given in pieces.items()}, placement)
        self.ones = torch.ones(self.out_features[-1], device=placement.device)


class Attention(PagedSelfAttention):
    """Values are normalised; a layer that reads another one's keys and values has queries only."""

    __slots__ = ("queries_only",)

    qkv: Projections

    def __init__(self, text: TextConfig, layer: LayerConfig) -> None:
        super().__init__(text, layer)
        self.queries_only = layer.keys_of is not None
        kv_size = self.num_kv_heads * self.head_dim
        sizes: tuple[int, ...] = (self.num_heads * self.head_dim, kv_size, kv_size)
        stored: tuple[int, ...] = (0, 1, 2)
        if self.queries_only:
            sizes, stored = sizes[:1], (0,)
            self.k_norm = None
        elif layer.values_are_keys:
            stored = (0, 1, 1)
        self.qkv = Projections(text.hidden_size, sizes, stored, text.qkv_bias)

    def __call__(self, x: Normed, rope: Rope, meta: AttentionMeta, cache: LayerCache) -> Tensor:
        if not self.window and meta.last_keys is not None:  # a picture's tokens see later ones in windows alone
            meta = replace(meta, last_keys=None)
        return super().__call__(x, rope, meta, cache)

    def store(self, x: Normed, rope: Rope, meta: AttentionMeta, cache: LayerCache) -> Tensor:
        if not self.queries_only:
            return super().store(x, rope, meta, cache)
        assert isinstance(self.q_norm, RMSNorm), "queries have a norm"
        heads = self.qkv.of_normed(x).unflatten(1, (self.num_heads, self.head_dim))
        return apply_rope(heads, rope.cos, rope.sin, self.q_norm.weight, self.q_norm.eps)

    def _projected(self, x: Normed) -> Tensor:
        qkv = super()._projected(x)
        assert isinstance(self.k_norm, RMSNorm), "keys have a norm"
        ones = self.qkv.ones
        normalise_projections(qkv[:, -len(ones) :], ones, ones[:0], self.head_dim, 1, self.k_norm.eps, centre=False)
        return qkv


class BesideTable(Embedding):
    """The embeddings of all layers."""

    __slots__ = ("marks", "pad")

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__(vocab_size, width, None)
        self.pad = 0
        self.marks: list[int] = []  # tokens of media, which read the row of `pad`

    def fill(self, pieces: dict[str, list[Tensor | None]], placement: Placement) -> None:
        super().fill(pieces, placement)
        for mark in self.marks:
            self.table[mark : mark + 1] = self.table[self.pad]


class Beside:
    """What a layer adds from its own embedding of each token."""

    def __init__(self, text: TextConfig, number: int) -> None:
        self.number = number
        self.activation = BY_NAME[text.activation]
        self.gate = Linear(text.hidden_size, text.beside_width)
        self.project = Linear(text.beside_width, text.hidden_size)
        self.norm = stream_norm(text)

    def add_to(self, x: Stream) -> None:
        assert x.beside is not None, "the decoder makes it before the first layer"
        gated = pointwise(self.gate(x.rows()), self.activation)
        x.add(Product(self.project, gated * x.beside[:, self.number]), self.norm)


class Gemma4Layer(LlamaLayer):
    """Attention and MLP between norms, what the layer reads beside the stream, and the layer's number."""

    def __init__(self, text: TextConfig, number: int) -> None:
        layer = text.layers[number]
        super().__init__(text, layer)
        self.attention = Attention(text.of_layer(layer), layer)
        self.beside = Beside(text, number) if text.beside_width else None
        self.scalar = Bare("layer_scalar", 1)

    def __call__(self, x: Stream, rope: Rope, meta: AttentionMeta, cache: LayerCache, index: Tensor | None) -> None:
        super().__call__(x, rope, meta, cache, index)
        if self.beside is not None:
            self.beside.add_to(x)
        x.rows().mul_(self.scalar.value)


class Gemma4(Llama):
    """The decoder, and the embeddings that its layers read beside the stream."""

    WEIGHTS = Table(
        (
            *SANDWICH_ROWS,
            Row(("layers.*",), "layers.*.scalar"),
            Row(("layers.*.per_layer_input_gate",), "layers.*.beside.gate"),
            Row(("layers.*.per_layer_projection",), "layers.*.beside.project"),
            Row(("layers.*.post_per_layer_input_norm",), "layers.*.beside.norm"),
            Row(("embed_tokens_per_layer",), "beside_embed"),
            Row(("per_layer_model_projection",), "beside_projection"),
            Row(("per_layer_projection_norm",), "beside_norm"),
        ),
        ignore=DECODER_IGNORE,
    )

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
        super().__init__(config, dtype, device)
        text = config.text
        self.beside_embed = self.beside_projection = self.beside_norm = None
        self.scales = [1.0, 1.0, 1.0]
        if width := text.beside_width:
            self.beside_embed = BesideTable(text.vocab_size, len(text.layers) * width)
            self.beside_projection = Linear(text.hidden_size, len(text.layers) * width)
            self.beside_norm = RMSNorm(width, text.norm_eps)
            scales = torch.tensor([width**0.5, text.hidden_size**-0.5, 2.0**-0.5])
            self.scales = [float(scales[0].to(dtype)), *scales[1:].tolist()]  # the table's is rounded as trained
        read_nowhere = (number for number, layer in enumerate(text.layers) if layer.keys_of is not None)
        ignored = (f"layers.{number}.self_attn.{name}.*" for number in read_nowhere for name in KEPT)
        self.table = replace(self.table, ignore=(*self.table.ignore, *ignored))

    def layer(self, number: int) -> DecoderLayer:
        return Gemma4Layer(self.config.text, number)

    def beside(self, batch: Batch, rows: Tensor) -> Tensor | None:
        if self.beside_embed is None or self.beside_projection is None or self.beside_norm is None:
            return None
        of_token, of_rows, of_both = self.scales
        shape = len(rows), len(self.layers), self.config.text.beside_width
        projected = self.beside_norm((self.beside_projection(rows) * of_rows).view(-1, shape[2])).view(shape)
        return projected.add_(self.beside_embed(batch.token_ids).mul_(of_token).view(shape)).mul_(of_both)


def text(body: Section, outer: Section) -> TextConfig:
    """The decoder."""
    beside = 0 if body.values.get(BESIDE, 256) is None else body.integer(BESIDE, 256)
    refuse(body, enable_moe_block=False, **({"vocab_size_per_layer_input": body.size("vocab_size")} if beside else {}))
    if attends_ahead(body):
        raise ConfigError(
            f"{body.path}: use_bidirectional_attention={body.values[AHEAD]!r} of Gemma 4 is not supported; supported "
            "are null and 'vision'"
        )
    if not body.values.get("rope_parameters"):
        body = Section({**body.values, "rope_parameters": ROPES}, body.path, body.outer)
    count = body.size("num_hidden_layers")
    kinds = list(body.items("layer_types", [FULL if n % PERIOD == 5 else SLIDING for n in range(count)]))
    kinds[-1:] = [FULL]  # whatever the file says
    body = Section({"sliding_window": 512, **body.values, "layer_types": kinds}, body.path, body.outer)
    as_near = {**body.values, "rope_parameters": body.values["rope_parameters"].get(SLIDING) or ROPES[SLIDING]}
    read = read_text(
        Section(as_near, body.path, body.outer), outer, sliding="layers", head_dim=256, tied=True, qk_norm="head",
        activation="gelu_pytorch_tanh",
    )  # fmt: skip
    layers = tuple(
        replace(layer, **_sizes(body, number, kind), **_sharing(body, kinds, number))
        for number, (layer, kind) in enumerate(zip(read.layers, kinds))
    )
    read = replace(
        read,
        layers=layers,
        embedding_scale=read.hidden_size**0.5,
        logit_softcap=body.number("final_logit_softcapping", 0.0),
        beside_width=beside,
    )
    return every_layer(read, scale=1.0, post_norms=True)


def _sizes(body: Section, number: int, kind: str) -> dict[str, Any]:
    """The heads of a layer and how they turn."""
    if kind == SLIDING:
        return {}
    own = body.section("per_layer_config").values if body.values.get("per_layer_config") else None
    same = body.boolean("attention_k_eq_v", False)
    if own is None:
        heads = body.integer("num_global_key_value_heads", 0) if same else 0
        width = body.size("global_head_dim", 512)
    else:
        given = Section(own.get(str(number)) or {}, f"{body.path}: per_layer_config")
        heads, width = given.integer("num_key_value_heads", 0), given.size("head_dim", body.size("head_dim", 256))
    if heads and body.size("num_attention_heads") % heads:
        raise ConfigError(
            f"{body.path}: num_attention_heads={body.values['num_attention_heads']} is no multiple of the "
            f"{heads} KV heads of layer {number}"
        )
    rope = read_rope(body, FULL, width, RopeDefaults())
    return {"head_dim": width, "num_kv_heads": heads, "rope": rope, "values_are_keys": same}


def _sharing(body: Section, kinds: list[str], number: int) -> dict[str, Any]:
    """Whose keys and values a layer reads, and how wide its MLP is."""
    first = len(kinds) - body.integer("num_kv_shared_layers", 0, most=len(kinds))
    if number < first:
        return {}
    before = [place for place in range(first) if kinds[place] == kinds[number]]
    if not before:
        raise ConfigError(
            f"{body.path}: num_kv_shared_layers={len(kinds) - first}: no layer before the layer {first} makes the keys "
            f"that layers of type {kinds[number]!r} read"
        )
    wide = 2 * body.size("intermediate_size") if body.boolean("use_double_wide_mlp", False) else 0
    return {"keys_of": before[-1], "intermediate_size": wide}


FAMILY = Family(name="Gemma 4", model=Gemma4, text=text, keys=KEYS)
