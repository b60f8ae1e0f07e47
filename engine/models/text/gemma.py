"""Gemma, Gemma 2 and Gemma 3 (text): GeGLU, weights of norms stored as weight - 1, embeddings times sqrt(hidden_size).

Gemma 2 and 3 also have a norm after attention and MLP, windows in most layers and a configured scale of scores. Gemma 2
caps scores and logits. Gemma 3 normalises the heads of queries and keys, and its layers with a window have a separate
theta. Embedding and head are tied, which released files do not say.
"""

from __future__ import annotations

from dataclasses import replace

from engine.base.errors import ConfigError
from engine.base.model_config import QKNorm, TextConfig
from engine.checkpoint.rope import RopeDefaults
from engine.checkpoint.section import Section
from engine.checkpoint.text import every_layer, read_text, refuse
from engine.models.base.family import Family
from engine.models.text.llama import DECODER_IGNORE, DECODER_ROWS, Llama
from engine.weights.table import Row, Table

KEYS = {"hidden_activation": "hidden_act"}  # most files have both; hidden_activation counts
SANDWICH_ROWS = (
    *(row for row in DECODER_ROWS if row.target != "layers.*.mlp_norm"),
    Row(("layers.*.post_attention_layernorm",), "layers.*.attention_post_norm"),
    Row(("layers.*.pre_feedforward_layernorm",), "layers.*.mlp_norm"),
    Row(("layers.*.post_feedforward_layernorm",), "layers.*.mlp_post_norm"),
)
PLAIN_ROPE = RopeDefaults()
GEMMA3_ROPE = RopeDefaults(1_000_000.0, sliding_key="rope_local_base_freq", sliding_theta=10_000.0)


class SandwichGemma(Llama):
    """Gemma 2 and Gemma 3: four norms in each layer."""

    WEIGHTS = Table(SANDWICH_ROWS, ignore=DECODER_IGNORE)


def gemma_text(
    body: Section,
    outer: Section,
    pattern: int = 0,
    qk_norm: QKNorm = "none",
    rope: RopeDefaults = PLAIN_ROPE,
) -> TextConfig:
    """The config that all three share; `pattern`: every pattern-th layer has no window, 0: no layer has a window."""
    text = read_text(
        body,
        outer,
        sliding="layers" if pattern else "none",
        pattern=pattern,
        head_dim=256,
        rope=rope,
        tied=True,
        activation="gelu_pytorch_tanh",
        norm_offset=1.0,
        qk_norm=qk_norm,
    )
    # The first release says "gelu", but was trained with the tanh approximation.
    activation = "gelu_pytorch_tanh" if text.activation == "gelu" else text.activation
    return replace(text, activation=activation, embedding_scale=text.hidden_size**0.5)


def sandwich_text(
    body: Section, outer: Section, pattern: int, cap: float, qk_norm: QKNorm, rope: RopeDefaults
) -> TextConfig:
    """The config of Gemma 2 and 3; `cap`: 1: missing keys mean the release's caps, 0: missing keys mean no caps."""
    text = gemma_text(body, outer, pattern, qk_norm, rope)
    scalar = body.number("query_pre_attn_scalar", 256)
    if scalar <= 0:
        raise ConfigError(f"{body.path}: query_pre_attn_scalar={scalar} must be larger than 0")
    text = every_layer(
        text,
        scale=scalar**-0.5,
        softcap=_cap(body, "attn_logit_softcapping", cap * 50.0),
        post_norms=True,
    )
    return replace(text, logit_softcap=_cap(body, "final_logit_softcapping", cap * 30.0))


def gemma2_text(body: Section, outer: Section) -> TextConfig:
    """Gemma 2's config; every other layer has a window."""
    refuse(body, use_bidirectional_attention=False)
    return sandwich_text(body, outer, 2, 1.0, "none", PLAIN_ROPE)


def gemma3_text(body: Section, outer: Section) -> TextConfig:
    """Gemma 3's config; five of six layers have a window. EmbeddingGemma's windows are centred on the token."""
    text = sandwich_text(body, outer, 6, 0.0, "head", GEMMA3_ROPE)
    if not body.boolean("use_bidirectional_attention", False):
        return text
    return replace(text, layers=tuple(replace(layer, window=half(layer.window)) for layer in text.layers))


def half(window: int) -> int:
    """Tokens on each side, including the own, of a window centred on the token; 0: all."""
    return window and window // 2 + 1


def _cap(body: Section, key: str, default: float) -> float:
    """A cap; null means no cap, a missing key means `default`."""
    return body.number(key, 0.0) if key in body.values else default


FAMILY = Family(name="Gemma", architectures=("GemmaForCausalLM",), inside=True, model=Llama, text=gemma_text, keys=KEYS)
