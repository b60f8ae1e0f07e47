"""Makes a TextConfig from the decoder's section of config.json, for every family that uses Llama's keys.

In: the section that describes the decoder, and the family's defaults for missing keys. Out: a frozen TextConfig with
every value that a model computes with. Family.keys translates the keys of a family with other names. A family with
other rules wraps `read_text` and replaces the fields that differ. Thread: any.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from engine.base.errors import ConfigError
from engine.base.model_config import LayerConfig, TextConfig
from engine.checkpoint.rope import FULL, SLIDING, RopeDefaults, read_rope
from engine.checkpoint.section import MAX_LAYERS, Section
from engine.kernels.activation import BY_NAME

# Which layers have a window. "none": none, for any values in the file. "always": all. "given": all, if the file names a
# window. "switch": the layers that use_sliding_window switches on. "layers": the layers that layer_types names.
Sliding = Literal["none", "always", "given", "switch", "layers"]
PLAIN_ROPE = RopeDefaults()


def read_text(
    body: Section,
    outer: Section,
    *,
    sliding: Sliding = "none",
    pattern: int = 0,
    head_dim: int | None = None,
    rope: RopeDefaults = PLAIN_ROPE,
    qkv_bias: bool = False,
    tied: bool = False,
    activation: str = "silu",
    eps: float = 1e-6,
    **family: Any,
) -> TextConfig:
    """A decoder; `outer` is the object that holds `body`, or `body` itself.

    pattern, head_dim, rope, tied, activation, eps: defaults for missing keys (head_dim None: hidden_size / num_heads;
    pattern: for sliding="layers", every pattern-th layer has no window). qkv_bias: queries, keys and values always have
    biases and the output projection has none; else attention_bias decides both. family: further fields of TextConfig.
    """
    named = body.values.get("hidden_act") or activation
    if named not in (*BY_NAME, activation):
        raise ConfigError(
            f"{body.path}: hidden_act={named!r} of {_named(outer)} is not supported; supported are "
            f"{', '.join(dict.fromkeys((*BY_NAME, activation)))}"
        )
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
    if sliding in ("always", "given") and window >= body.size("max_position_embeddings"):
        window = 0  # a window of the whole context hides nothing, as in Phi-3's long-context releases
    kinds = _kinds(body, sliding, window, pattern)
    ropes = {kind: read_rope(body, kind, width, rope) for kind in set(kinds)}
    fields = {
        "qkv_bias": qkv_bias or attention_bias,
        "o_bias": attention_bias and not qkv_bias,
        "qk_norm": "none",
        "mlp_bias": body.boolean("mlp_bias", False),
        "activation": named,
    }
    return TextConfig(
        vocab_size=body.size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=body.size("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=width,
        norm_eps=body.number("rms_norm_eps", eps),
        tie_embeddings=outer.boolean("tie_word_embeddings", tied),
        layers=tuple(LayerConfig(window if kind == SLIDING else 0, ropes[kind], width**-0.5) for kind in kinds),
        **{**fields, **family},
    )


# model_type -> the defaults of transformers' class, for decoder sections of vision models that leave these keys out.
UNSAID: dict[str, dict[str, Any]] = {
    "clip_text_model": {
        "vocab_size": 49_408, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12,
        "num_attention_heads": 8, "max_position_embeddings": 77,
    },
    "siglip_text_model": {
        "vocab_size": 32_000, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
        "num_attention_heads": 12, "max_position_embeddings": 64,
    },
    "gemma": {
        "vocab_size": 256_000, "hidden_size": 3072, "intermediate_size": 24_576, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 8192,
    },
    "gemma2": {
        "vocab_size": 256_000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 8192,
    },
    "gemma3_text": {
        "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131_072,
    },
    "llama": {
        "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "max_position_embeddings": 2048,
    },
    "mistral": {
        "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131_072,
    },
    "voxtral_realtime_text": {
        "vocab_size": 131_072, "hidden_size": 3072, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5, "sliding_window": 8192,
    },
}  # fmt: skip


def complete(section: Section) -> Section:
    """A decoder's section, completed with the defaults of UNSAID."""
    unsaid = UNSAID.get(str(section.values.get("model_type")), {})
    return Section({**unsaid, **section.values}, section.path, section.outer)


def every_layer(text: TextConfig, **changes: Any) -> TextConfig:
    """The same decoder with these fields changed in every LayerConfig."""
    return replace(text, layers=tuple(replace(layer, **changes) for layer in text.layers))


def refuse(section: Section, **allowed: Any) -> None:
    """ConfigError if a key of `allowed` has another value than the only supported value, which `allowed` gives."""
    for key, value in allowed.items():
        got = section.values.get(key)
        if got is not None and got != value:
            raise ConfigError(
                f"{section.path}: {key}={got!r} of {_named(section)} is not supported; supported is {value!r}"
            )


def _named(section: Section) -> str:
    """The architecture, for messages."""
    named = section.values.get("architectures") or [section.values.get("model_type") or "this architecture"]
    return str(named[0]) if isinstance(named, list) else str(named)


def _window(body: Section, sliding: Sliding) -> int:
    """Tokens that layers with a window see; 0: no layer has one."""
    if sliding in ("always", "layers"):
        # A missing key means the 4,096 of the first releases; later releases write null.
        return 4096 if "sliding_window" not in body.values else body.integer("sliding_window", 0)
    if sliding == "given" or (sliding == "switch" and body.boolean("use_sliding_window", False)):
        return body.integer("sliding_window", 0)
    return 0


def _kinds(body: Section, sliding: Sliding, window: int, pattern: int) -> list[str]:
    """The type of every layer."""
    count = body.integer("num_hidden_layers", least=1, most=MAX_LAYERS)
    kinds = list(body.items("layer_types", ()))
    if sliding in ("always", "given"):
        kinds = [SLIDING if window else FULL] * count
    elif not kinds and sliding == "layers":
        kinds = [FULL if fits else SLIDING for fits in _pattern(body, count, pattern)] if window else [FULL] * count
    elif not kinds:
        first = body.integer("max_window_layers", 28) if sliding == "switch" else 0
        kinds = [SLIDING if window and number >= first else FULL for number in range(count)]
    if len(kinds) != count:
        raise ConfigError(f"{body.path}: layer_types has {len(kinds)} entries for num_hidden_layers={count}")
    for kind in kinds:
        if kind not in (FULL, SLIDING):
            raise ConfigError(f"{body.path}: layer type {kind!r} is not supported by this architecture")
    return kinds


def _pattern(body: Section, count: int, default: int) -> list[bool]:
    """Which layers have no window: sliding_window_pattern is a period, or a string in which G marks such a layer."""
    given = body.values.get("sliding_window_pattern")
    if isinstance(given, str) and given and not set(given) - {"L", "G"}:
        return [given[number % len(given)] == "G" for number in range(count)]
    period = body.size("sliding_window_pattern", default)
    return [(number + 1) % period == 0 for number in range(count)]
