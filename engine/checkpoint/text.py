"""The decoder's section of config.json -> TextConfig, for every family whose keys are Llama's.

In: the section that describes the decoder, and what the family takes where its file is silent. Out: a frozen TextConfig
in which nothing is optional that a model computes with. A family with other keys wraps `read_text`, or replaces it.
Thread: any.
"""

from __future__ import annotations

from typing import Literal

from engine.checkpoint.rope import read_rope
from engine.checkpoint.section import MAX_LAYERS, Section
from engine.errors import ConfigError
from engine.model_config import LayerConfig, TextConfig

FULL, SLIDING = "full_attention", "sliding_attention"

# Which layers have a window: none, whatever the file says; all; those that use_sliding_window switches on; those that
# layer_types names.
Sliding = Literal["none", "always", "switch", "layers"]


def read_text(
    body: Section,
    outer: Section,
    *,
    sliding: Sliding = "none",
    head_dim: int | None = None,
    theta: float = 10_000.0,
    mrope_section: tuple[int, ...] = (),
    qkv_bias: bool = False,
    qk_norm: bool = False,
) -> TextConfig:
    """A decoder; `outer` is the object that holds `body`, or `body` itself.

    head_dim, theta, mrope_section: where the file is silent (head_dim None: hidden_size / num_heads). qkv_bias: always
    on queries, keys and values and never on the output product; else both are as attention_bias says. qk_norm: an
    RMSNorm on every head of queries and keys.
    """
    activation = body.values.get("hidden_act", "silu")
    if activation != "silu":
        raise ConfigError(f"{body.path}: hidden_act={activation!r}; this architecture is supported with 'silu'")
    hidden = body.size("hidden_size")
    heads = body.size("num_attention_heads")
    kv_heads = body.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ConfigError(f"{body.path}: num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}")
    if body.values.get("head_dim") is None and head_dim is None and hidden % heads:
        raise ConfigError(f"{body.path}: hidden_size={hidden} is no multiple of num_attention_heads={heads}")
    width = body.size("head_dim", head_dim or hidden // heads)
    attention_bias = body.boolean("attention_bias", False)
    window = _window(body, sliding)
    kinds = _kinds(body, sliding, window)
    ropes = {kind: read_rope(body, kind, width, theta, mrope_section) for kind in set(kinds)}
    return TextConfig(
        vocab_size=body.size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=body.size("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=width,
        norm_eps=body.number("rms_norm_eps", 1e-6),
        qkv_bias=qkv_bias or attention_bias,
        o_bias=attention_bias and not qkv_bias,
        qk_norm=qk_norm,
        mlp_bias=body.boolean("mlp_bias", False),
        tie_embeddings=outer.boolean("tie_word_embeddings", False),
        layers=tuple(LayerConfig(window if kind == SLIDING else 0, ropes[kind], width**-0.5) for kind in kinds),
    )


def _window(body: Section, sliding: Sliding) -> int:
    """Tokens that layers with a window see; 0: no layer has one."""
    if sliding == "always":
        # A missing key is the 4,096 of the first release; later ones write null.
        return 4096 if "sliding_window" not in body.values else body.integer("sliding_window", 0)
    if sliding == "layers" or (sliding == "switch" and body.boolean("use_sliding_window", False)):
        return body.integer("sliding_window", 0)
    return 0


def _kinds(body: Section, sliding: Sliding, window: int) -> list[str]:
    """The type of every layer."""
    count = body.integer("num_hidden_layers", least=1, most=MAX_LAYERS)
    kinds = list(body.items("layer_types", ()))
    if not kinds:
        first = body.integer("max_window_layers", 28) if sliding == "switch" else 0
        kinds = [SLIDING if window and number >= first else FULL for number in range(count)]
    elif sliding == "always":
        kinds = [SLIDING if window else FULL] * count
    if len(kinds) != count:
        raise ConfigError(f"{body.path}: layer_types has {len(kinds)} entries for num_hidden_layers={count}")
    for kind in kinds:
        if kind not in (FULL, SLIDING):
            raise ConfigError(f"{body.path}: layer type {kind!r} is not supported by this architecture")
    return kinds
