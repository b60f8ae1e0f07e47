"""TransformersModel: a text decoder of transformers with the Model interface.

Thread: device. The module gets a step's tokens as one row of T tokens, without a mask or cache; our attention function
finds the rows (attention.py). The decoder computes hidden states. For logits, the module around the decoder runs with
the decoder replaced by these hidden states, so everything that the module does to logits is applied.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from engine.base.errors import ConfigError
from engine.base.model_config import LayerConfig, ModelConfig, RopeConfig, TextConfig
from engine.cache.spec import CacheSpec
from engine.cache.tokens import FullSpec
from engine.cache.window import SlidingSpec
from engine.checkpoint.section import Section
from engine.layers.batch import Batch
from engine.models.base.family import Family
from engine.models.base.model import Model
from engine.models.transformers_backend import skeleton
from engine.models.transformers_backend.calls import Call, step
from engine.models.transformers_backend.routing import check_router
from engine.models.transformers_backend.weights import await_all, parts_and_table
from engine.weights.table import Table


class Given(nn.Module):
    """Replaces the decoder in the module around it, and returns hidden states that were computed before."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = [decoder]  # in a list, so that its parameters are not registered twice
        self.hidden: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattribute__("__dict__")["decoder"][0], name)

    def forward(self, *_: Any, **__: Any) -> Any:
        return Found(self.hidden)


class Found:
    """A decoder's output that has only hidden states."""

    def __init__(self, hidden: Tensor | None) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, number: int) -> Tensor | None:
        return self.last_hidden_state if number == 0 else None

    def __getattr__(self, name: str) -> None:
        return None


class TransformersModel(Model):
    """A text decoder of transformers."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
        self.config, self.dtype, self.device = config, dtype, device
        self.towers = {}
        self._calls = skeleton.calls_of(self.built())
        self.sparse = self._calls.sparse
        kinds = {(call.num_heads, call.num_kv_heads, call.head_dim) for call in self._calls.attention}
        if device != "cpu" and len(kinds) > 1:
            raise ConfigError(
                f"{config.architecture}: layers with unlike heads (heads, KV heads, width: "
                f"{', '.join(map(str, sorted(kinds)))}) are served on a CPU only; --device cpu serves it"
            )
        self.module = self.built()
        parts, self._table = parts_and_table(self.module)
        self.parts = SimpleNamespace(**{f"p{number}": part for number, part in enumerate(parts)})
        await_all(parts, self._filled)
        self._decoder = skeleton.decoder_in(self.module)
        self._given = Given(getattr(self.module, self.module.base_model_prefix))

    def built(self) -> Any:
        """The module on the meta device."""
        return skeleton.build(self.config.architecture, skeleton.decoder_of(self.config.raw))

    def weight_table(self) -> Table:
        return self._table

    def cache_specs(self) -> list[CacheSpec]:
        return [self._spec(call) for call in self._calls.attention]

    def _spec(self, call: Call) -> CacheSpec:
        if call.window:
            return SlidingSpec(call.num_kv_heads, call.head_dim, self.dtype, call.window)
        return FullSpec(call.num_kv_heads, call.head_dim, self.dtype)

    def _filled(self) -> None:
        """Runs after all parameters are filled: ties parameters, fills buffers and frequencies, and replaces the
        decoder."""
        module, longest = self.module, self.config.max_model_len or self.config.max_position
        module.tie_weights()
        skeleton.fill_buffers(module, self.device)
        skeleton.settle_frequencies(module, longest, self.device)
        setattr(module, module.base_model_prefix, self._given)

    def forward(self, batch: Batch, out: Tensor | None = None) -> Tensor:
        with step(batch, self._calls):
            hidden = skeleton.run(self._decoder, batch.positions, **self.tokens_of(batch))
        if batch.sample_index is not None:
            hidden = hidden[batch.sample_index]
        return hidden if out is None else out.copy_(hidden)

    def tokens_of(self, batch: Batch) -> dict[str, Tensor]:
        """A step's tokens as the decoder's argument."""
        return {"input_ids": batch.token_ids[None]}

    def logits(self, hidden: Tensor, adapters: Tensor | None = None) -> Tensor:
        self._given.hidden = hidden[None]
        nothing = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        logits: Tensor = self.module(input_ids=nothing, use_cache=False, return_dict=True).logits[0]
        return logits.float() if hidden.is_cpu else logits


class ModelWithRows(TransformersModel):
    """A decoder that gets rows of items in place of the placeholders' embeddings."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
        super().__init__(config, dtype, device)
        self._embed = self._decoder.get_input_embeddings()
        outside = any(token >= self._embed.num_embeddings for token in config.media_token_ids.values())
        self._last_token = self._embed.num_embeddings - 1 if outside else None

    def tokens_of(self, batch: Batch) -> dict[str, Tensor]:
        """The embeddings, with the placeholders' replaced by rows of items, as the decoder's argument."""
        token_ids = batch.token_ids if self._last_token is None else batch.token_ids.clamp(max=self._last_token)
        embedded = self._embed(token_ids)
        if batch.overlay is not None:
            visible, rows = batch.overlay
            embedded = torch.where(visible, rows.to(embedded.dtype), embedded)
        for start, length, rows in batch.media:
            embedded[start : start + length] = rows
        return {"inputs_embeds": embedded[None]}


def read_text(body: Section, outer: Section) -> TextConfig:
    """The decoder's config, before the model is built."""
    values = skeleton.decoder_of(outer.values)
    return text_of(built(class_of(outer), values, outer))


def class_of(outer: Section) -> str:
    """The decoder's class: the one that config.json names, or the class of its decoder's model_type."""
    values = skeleton.decoder_of(outer.values)
    named = [name for name in outer.items("architectures", ()) if name in skeleton.known()]
    named += [name for name, kind in skeleton.known().items() if kind == values.get("model_type")]
    if not named:
        raise ConfigError(f"{outer.path}: model_type={values.get('model_type')!r} is no decoder of transformers")
    return named[0]


def built(architecture: str, values: Mapping[str, Any], outer: Section) -> Any:
    """The module on the meta device."""
    if outer.values.get("quantization_config") is not None:
        raise ConfigError(
            "its weights are quantised; what runs through transformers reads float32, float16 and bfloat16"
        )
    decoder = dict(skeleton.decoder_of(values))
    check_router(skeleton.kind_of(architecture, decoder), Section(decoder, outer.path))
    return skeleton.build(architecture, values)


def text_of(module: Any) -> TextConfig:
    """The TextConfig of a module on the meta device."""
    calls, config = skeleton.calls_of(module), module.config.get_text_config(decoder=True)
    widest = max(calls.attention, key=lambda call: call.num_heads * call.head_dim)
    tied = getattr(config, "tie_word_embeddings", False)  # some classes have it only in the decoder's config
    axes = skeleton.axes_of(getattr(module, module.base_model_prefix, None))
    rope = RopeConfig(
        kind="none", theta=1.0, rotary_dim=0, mrope_section=(1,) * axes if axes > 1 else ()
    )  # the module itself rotates
    return TextConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        num_heads=widest.num_heads,
        num_kv_heads=widest.num_kv_heads,
        head_dim=widest.head_dim,
        norm_eps=1e-6,
        qkv_bias=False,
        o_bias=False,
        qk_norm="none",
        mlp_bias=False,
        tie_embeddings=bool(getattr(module.config, "tie_word_embeddings", tied)),
        layers=tuple(LayerConfig(call.window, rope, call.scale, call.softcap, call.sinks) for call in calls.attention),
        module_routings=tuple(call.routing for call in calls.sparse.values()),
    )


FAMILY = Family(
    name="transformers",
    architectures=(),  # transformers lists them
    model=TransformersModel,
    text=read_text,
    keys={"n_positions": "max_position_embeddings", "n_ctx": "max_position_embeddings"},
)
