"""Makes a RopeConfig from the rotary settings of config.json, in all their spellings.

In: the text section. transformers 5 writes `rope_parameters`, flat or one object per layer type. Earlier versions wrote
`rope_theta`, and `rope_scaling` with `type` or `rope_type`; their layers with a window had a separate theta and no
scaling. Out: a frozen RopeConfig with all fields set, which layers/rope.py turns into frequencies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from engine.base.errors import ConfigError
from engine.base.model_config import RopeConfig
from engine.checkpoint.section import Section

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")
UNBOUNDED = 1 << 20  # tokens of context of a model without positions whose file gives no number
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class RopeDefaults:
    """A family's defaults for missing keys, and how its checkpoints store rotated pairs."""

    theta: float = 10_000.0
    partial: float = 1.0  # the share of a head that is rotated
    sections: tuple[int, ...] = ()  # M-RoPE's sections
    axes: tuple[int, ...] = (3,)  # allowed numbers of sections
    turns: bool = False  # M-RoPE's axes are interleaved
    interleaved: bool = False
    sliding_key: str = ""  # older files: the key of the unscaled theta of layers with a window; "": no separate theta
    sliding_theta: float = 10_000.0  # if the file lacks sliding_key


def no_rope(head_dim: int) -> RopeConfig:
    """Rotary settings of a decoder that does not rotate heads."""
    return RopeConfig(kind="none", theta=1.0, rotary_dim=head_dim // 2 * 2)


def read_rope(body: Section, layer_type: str, head_dim: int, default: RopeDefaults) -> RopeConfig:
    """The rotary settings of layers of one type."""
    given = _settings(body, layer_type)
    key, default_theta = "rope_theta", default.theta
    if layer_type == SLIDING and default.sliding_key:
        key, default_theta = default.sliding_key, default.sliding_theta
        given = given if body.values.get("rope_parameters") else {}
    rope = Section(given, f"{body.path}: rope settings")
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind == "mrope":  # the old name for "default, with sections"
        kind = "default"
    if kind not in KINDS:
        named = ", ".join(map(str, body.items("architectures", ()))) or body.values.get("model_type") or "this model"
        raise ConfigError(
            f"{body.path}: rope type {kind!r} of {named} is not supported; supported are {', '.join(KINDS)}"
        )
    theta = rope.number("rope_theta", body.number(key, default_theta))
    partial = rope.number("partial_rotary_factor", body.number("partial_rotary_factor", default.partial))
    if not 0 < partial <= 1:
        raise ConfigError(f"{body.path}: partial_rotary_factor={partial} must be larger than 0 and at most 1")
    rotary_dim = int(head_dim * partial)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ConfigError(f"{body.path}: {rotary_dim} rotated dimensions of head_dim={head_dim}; an even number fits")
    if theta <= 1:
        raise ConfigError(f"{body.path}: rope_theta={theta} must be larger than 1")
    extra: dict[str, Any] = {}
    if kind == "proportional":  # all pairs are rotated; the unrotated pairs have the angle 0
        extra = {"turning": rotary_dim // 2, "factor": _factor(rope, rope.number("factor", 1.0))}
        rotary_dim = head_dim
    elif kind == "linear":
        extra["factor"] = _factor(rope, rope.number("factor"))
    elif kind in ("llama3", "yarn", "longrope"):
        limit = body.size("max_position_embeddings")
        original = rope.size("original_max_position_embeddings", limit)
        extra["original_max_position"] = original = body.size("original_max_position_embeddings", original)
        extra["factor"] = _factor(rope, rope.number("factor", limit / max(original, 1)))
        if kind == "longrope":
            extra.update(_longrope(rope, extra.pop("factor"), original, rotary_dim // 2))
        else:
            extra.update(_llama3(rope) if kind == "llama3" else _yarn(rope, extra["factor"]))
    elif kind == "dynamic" and given.get("alpha"):  # HunYuan: alpha changes theta, at any context length
        alpha = rope.number("alpha")
        if not 0 < alpha <= 1e6 or rotary_dim < 4:
            raise ConfigError(f"{rope.path}: alpha={alpha} must be larger than 0 and at most a million, for heads of 4")
        theta *= alpha ** (rotary_dim / (rotary_dim - 2))
        kind = "default"
    extra["mrope_section"] = sections = _sections(body, given.get("mrope_section"), default, rotary_dim)
    extra["mrope_turns"] = "all" if sections and rope.boolean("mrope_interleaved", default.turns) else ""
    return RopeConfig(kind=kind, theta=theta, rotary_dim=rotary_dim, interleaved=default.interleaved, **extra)


def max_position(body: Section, rope: RopeConfig) -> int:
    """The context length in tokens. Files with YaRN may name the length before stretching."""
    if rope.kind == "none" and body.values.get("max_position_embeddings") is None:
        return UNBOUNDED
    limit = body.size("max_position_embeddings")
    if rope.kind == "yarn":
        limit = max(limit, int(rope.factor * rope.original_max_position))
    return limit


def _settings(body: Section, layer_type: str) -> dict[str, Any]:
    given = body.values.get("rope_parameters") or body.values.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise ConfigError(f"{body.path}: rope_parameters must be an object, got {type(given).__name__}")
    if FULL in given or SLIDING in given:
        nested = given.get(layer_type)
        if not isinstance(nested, dict):
            raise ConfigError(f"{body.path}: rope_parameters has no entry for layers of type {layer_type!r}")
        return nested
    return given


def _factor(rope: Section, value: float) -> float:
    if not 1.0 <= value <= 1e6:
        raise ConfigError(f"{rope.path}: factor={value} must be at least 1 and at most a million")
    return value


def _longrope(rope: Section, factor: float, original: int, pairs: int) -> dict[str, Any]:
    factors = {}
    for name in ("short", "long"):
        given = rope.items(f"{name}_factor", ())
        if len(given) != pairs or not all(type(value) in (int, float) and value > 0 for value in given):
            raise ConfigError(f"{rope.path}: {name}_factor must be {pairs} positive numbers, one for each rotated pair")
        factors[f"{name}_factors"] = tuple(map(float, given))
    stretched = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    return {**factors, "attention_factor": rope.number("attention_factor", stretched)}


def _llama3(rope: Section) -> dict[str, Any]:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if not 0 < low <= high:
        raise ConfigError(f"{rope.path}: 0 < low_freq_factor <= high_freq_factor is needed, got {low} and {high}")
    return {"low_freq_factor": low, "high_freq_factor": high}


def _yarn(rope: Section, factor: float) -> dict[str, Any]:
    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0

    numerator, denominator = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    derived = mscale(numerator) / mscale(denominator) if numerator and denominator else mscale(1.0)
    fast, slow = rope.number("beta_fast", 32.0), rope.number("beta_slow", 1.0)
    if not 0 < slow <= fast:
        raise ConfigError(f"{rope.path}: 0 < beta_slow <= beta_fast is needed, got {slow} and {fast}")
    return {
        "beta_fast": fast,
        "beta_slow": slow,
        "truncate": rope.boolean("truncate", True),
        "attention_factor": rope.number("attention_factor", derived),
    }


def _sections(body: Section, given: Any, default: RopeDefaults, rotary_dim: int) -> tuple[int, ...]:
    """M-RoPE sections; () for positions with one axis."""
    if given is None and not default.sections:
        return ()
    sections = list(default.sections) if given is None else given
    sizes = isinstance(sections, list) and all(type(size) is int and size >= 0 for size in sections)
    if not sizes or len(sections) not in default.axes or sum(sections) != rotary_dim // 2:
        counts = " or ".join(map(str, default.axes))
        raise ConfigError(
            f"{body.path}: mrope_section={sections} must be {counts} numbers that add up to {rotary_dim // 2} "
            "(half the rotated dimensions)"
        )
    return tuple(sections)
