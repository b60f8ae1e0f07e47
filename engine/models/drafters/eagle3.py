"""EAGLE-3 and 3.1: one decoder layer over a token's embedding and the feature of the token before.

    feature = fc(cat(streams))                        of the target's token; later the layer's own output
    x = cat(input_norm(embed), hidden_norm(feature))  r = norm_before_residual ? hidden_norm(feature) : feature
    a = r + attention(x);  out = a + mlp(mlp_norm(a));  logits = head(norm(out))
    next feature = norm_output ? norm(out) : out

Thread: device. Source: arXiv:2503.01840 and the files
of SafeAILab/EAGLE; options of 3.1 as in vllm-project/speculators.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from engine.attention.meta import AttentionMeta
from engine.base.drafts import FLAG
from engine.base.errors import ConfigError
from engine.base.model_config import ModelConfig, TextConfig
from engine.cache.spec import CacheSpec, LayerCache
from engine.kernels.gemm.pack import Placement
from engine.layers.attention import qkv_product, self_attention
from engine.layers.embed import Embedding, Head
from engine.layers.linear import Linear
from engine.layers.mlp import decoder_mlp
from engine.layers.norm import Normed, RMSNorm
from engine.layers.rope import Rope, RopeTable
from engine.layers.stream import Product, Stream
from engine.models.base.decoder import Decoder
from engine.models.drafters.base import guest_spec, places_before
from engine.models.drafters.settings import DrafterConfig
from engine.weights.files import Shard
from engine.weights.table import Row, Table, Wanted

UNLIKELY = -1e30  # logit of the target's tokens that the drafter's head lacks; finite, as the samplers want it
LAYER = "layers.0."
ROWS = (
    Row(("embed_tokens",), "embed"),
    Row(("fc",), "fc"),
    Row(("input_norm",), "joined_norm"),
    Row(("fc_norm.*",), "stream_norms.*"),
    Row((LAYER + "input_layernorm",), "layer.input_norm"),
    Row((LAYER + "hidden_norm",), "layer.hidden_norm"),
    Row(tuple(f"{LAYER}self_attn.{name}_proj" for name in "qkv"), "layer.attention.qkv", "rows"),
    Row((LAYER + "self_attn.o_proj",), "layer.o", "columns"),
    Row((LAYER + "post_attention_layernorm",), "layer.mlp_norm"),
    Row((LAYER + "mlp.gate_proj", LAYER + "mlp.up_proj"), "layer.mlp.gate_up", "rows"),
    Row((LAYER + "mlp.down_proj",), "layer.mlp.down", "columns"),
    Row(("norm",), "norm"),
    Row(("lm_head",), "head", "rows"),
    Row(("",), "token_map"),
)
IGNORED = ("t2d", "layers.0.self_attn.rotary_emb.inv_freq", "rotary_emb.inv_freq")


class TokenMap:
    """`d2t`: the target's token of each token of the drafter's head, less the token's own number."""

    tokens: Tensor  # [D] int64

    def __init__(self, count: int, vocab_size: int) -> None:
        self.count, self.vocab_size = count, vocab_size

    def expects(self) -> dict[str, tuple[Wanted | None, ...]]:
        return {"d2t": (Wanted((self.count,), (torch.int64,)),)}

    def fill(self, pieces: dict[str, list[Tensor | None]], placement: Placement) -> None:
        piece = pieces["d2t"][0]
        assert piece is not None
        tokens = piece + torch.arange(self.count, device=piece.device)
        wrong = ((tokens < 0) | (tokens >= self.vocab_size)).nonzero().flatten()
        if len(wrong):
            entry = int(wrong[0])
            raise ConfigError(
                f"{FLAG}: d2t[{entry}]={int(piece[entry])} leads to token {int(tokens[entry])}; the target has tokens "
                f"0 to {self.vocab_size - 1}"
            )
        self.tokens = tokens.to(placement.device)

    def widened(self, logits: Tensor) -> Tensor:
        """Logits [n, D] -> [n, vocabulary of the target]."""
        wide = logits.new_full((len(logits), self.vocab_size), UNLIKELY)
        return wide.index_copy_(1, self.tokens, logits)


class Layer:
    """The decoder layer, whose attention reads a token's embedding and the feature of the token before."""

    def __init__(self, config: DrafterConfig) -> None:
        text = config.text
        hidden = text.hidden_size
        self.input_norm, self.hidden_norm, self.mlp_norm = (RMSNorm(hidden, text.norm_eps) for _ in range(3))
        self.attention = self_attention(text, text.layers[0])
        self.attention.qkv = qkv_product(replace(text, hidden_size=2 * hidden), text.layers[0])
        self.o = Linear(text.num_heads * text.head_dim, hidden, bias=text.o_bias)
        self.mlp = decoder_mlp(text)
        self._norm_before_residual = config.norm_before_residual

    def joined(self, embedded: Tensor, before: Tensor) -> tuple[Normed, Tensor]:
        """The input of the attention's projection, [T, 2 H], and a new residual stream [T, H]."""
        normed = self.hidden_norm(before)
        rows = torch.cat([self.input_norm(embedded), normed], 1)
        return Normed(None, rows), normed if self._norm_before_residual else before.clone()

    def __call__(self, embedded: Tensor, before: Tensor, rope: Rope, meta: AttentionMeta, cache: LayerCache) -> Tensor:
        """The layer's output, a new [T, H]; writes the tokens' keys and values."""
        rows, residual = self.joined(embedded, before)
        x = Stream(residual)
        x.add(Product(self.o, self.attention(rows, rope, meta, cache)))
        x.add(self.mlp(x.normed(self.mlp_norm)))
        return x.rows()


class Eagle3:
    """One drafter; the target lends its embedding and head if the files have none."""

    def __init__(self, config: DrafterConfig, target: Decoder, shards: list[Shard]) -> None:
        text = config.text
        self.options, self.dtype, self.device, self._target = config, target.dtype, target.device, target
        self.config = config_of(config, target.config.max_model_len or target.config.max_position)
        table = self.weight_table()
        names = {table.canonical(name) for shard in shards for name in shard.tensors}
        hidden, fits = text.hidden_size, text.hidden_size == target.config.text.hidden_size
        maps, heads = "d2t" in names or config.vocab_size != text.vocab_size, "lm_head.weight" in names
        heads |= maps or not fits or target.head is None
        self.embed = Embedding(text.vocab_size, hidden, None) if "embed_tokens.weight" in names or not fits else None
        self.head = Head(config.vocab_size, hidden, False) if heads else None
        self.token_map = TokenMap(config.vocab_size, text.vocab_size) if maps else None
        count, width = len(config.streams), config.stream_width
        self.fc = Linear(count * width, hidden)
        self.joined_norm = RMSNorm(count * width, text.norm_eps) if config.norm_before_fc else None
        self.stream_norms = [RMSNorm(width, text.norm_eps) for _ in range(count) if config.fc_norm]
        self.layer = Layer(config)
        self.norm = RMSNorm(hidden, text.norm_eps)
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
    def described(self) -> str:
        """See DraftModel."""
        options = self.options
        return (
            f"EAGLE-3 with {options.vocab_size:,} of {options.text.vocab_size:,} tokens, over the inputs of layers "
            f"{', '.join(map(str, options.streams))}"
        )

    @property
    def warning(self) -> str:
        """See DraftModel."""
        options = self.options
        if options.names_streams:
            return ""
        return (
            f"{options.folder} names no layers: the drafter reads the inputs of the target's layers "
            f"{', '.join(map(str, options.streams))}, which may not be those of its training"
        )

    def weight_table(self) -> Table:
        """The tensors, by the names of speculators; flat files call the layer `midlayer`."""
        return Table(ROWS, ("model.",), IGNORED, (("midlayer.", LAYER),))

    def cache_specs(self) -> list[CacheSpec]:
        """One cache of keys and values."""
        return [guest_spec(self._target, self.text)]

    def feature(self, streams: list[Tensor]) -> Tensor:
        """See DraftModel."""
        if self.stream_norms:
            streams = [norm(stream) for norm, stream in zip(self.stream_norms, streams, strict=True)]
        joined = torch.cat(streams, 1)
        return self.fc(joined if self.joined_norm is None else self.joined_norm(joined))

    def store(
        self, token_ids: Tensor, before: Tensor, positions: Tensor, meta: AttentionMeta, caches: list[LayerCache]
    ) -> None:
        """See DraftModel."""
        rows, _ = self.layer.joined(self._embedded(token_ids), before)
        self.layer.attention.store(rows, self._rope(places_before(positions)), meta, caches[0])

    def step(
        self, token_ids: Tensor, before: Tensor, positions: Tensor, meta: AttentionMeta, caches: list[LayerCache]
    ) -> tuple[Tensor, Tensor]:
        """See DraftModel."""
        rope = self._rope(places_before(positions))
        out = self.layer(self._embedded(token_ids), before, rope, meta, caches[0])
        hidden = self.norm(out)
        logits = self._target.logits(hidden) if self.head is None else self.head(hidden)
        if self.token_map is not None:
            logits = self.token_map.widened(logits)
        return logits, hidden if self.options.norm_output else out

    def _embedded(self, token_ids: Tensor) -> Tensor:
        return (self._target.embed if self.embed is None else self.embed)(token_ids)


def config_of(config: DrafterConfig, longest: int) -> ModelConfig:
    """The drafter's configuration as the loader reads it; `longest`: tokens of context of the target."""
    return ModelConfig(
        architecture="Eagle3",
        implementation="native",
        folder=config.folder,
        text=config.text,
        towers={},
        processor="",
        media_token_ids={},
        eos_token_ids=(),
        max_position=longest,
        torch_dtype=config.torch_dtype,
    )
