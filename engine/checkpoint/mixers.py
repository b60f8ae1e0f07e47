"""Reads the kinds of a hybrid decoder's layers, and the configurations of its mixers, from config.json.

In: the decoder's section. `layer_types` (older: `layers_block_type`) names the layers: `linear_attention` or, older,
`mamba` for layers with a state, `full_attention` or `attention` for the others. Out: frozen configurations with
checked sizes. Thread: any.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from engine.base.errors import ConfigError
from engine.base.mixers import DeltaConfig, Mamba1Config, Mamba2Config, MixerConfig
from engine.base.model_config import TextConfig
from engine.checkpoint.rope import FULL
from engine.checkpoint.section import MAX_LAYERS, Section

LINEAR, MLP, MOE = "linear_attention", "mlp", "moe"
SPELLED = {"mamba": LINEAR, "mamba2": LINEAR, "attention": FULL, "experts": MOE}  # older spellings
LETTERS = {"M": LINEAR, "*": FULL, "-": MLP, "E": MOE}  # letters of hybrid_override_pattern
KEYS = ("layer_types", "layers_block_type")


def layer_kinds(
    body: Section, allowed: Collection[str] = (FULL, LINEAR), default: Sequence[str] | None = None
) -> list[str]:
    """The kind of every layer; `default`: kinds if the file names none, None if the file must name them."""
    key = next((key for key in KEYS if body.values.get(key) is not None), "hybrid_override_pattern")
    pattern = body.values.get(key)
    if isinstance(pattern, str):
        named: Sequence[Any] = [LETTERS.get(letter, letter) for letter in pattern]
    else:
        named = body.items(key, () if default is None else default)
    kinds = [SPELLED.get(str(kind), str(kind)) for kind in named]
    for kind in kinds:
        if kind not in allowed:
            raise ConfigError(f"{body.path}: {key}: layer kind {kind!r}; supported are {', '.join(allowed)}")
    count = body.integer("num_hidden_layers", len(kinds), least=1, most=MAX_LAYERS)
    if len(kinds) != count:
        raise ConfigError(f"{body.path}: {key} has {len(kinds)} entries for num_hidden_layers={count}")
    return kinds


def without_kinds(body: Section, count: int, **said: Any) -> Section:
    """The section for `read_text`, without layer kinds; `said`: values that the file lacks or names by other keys."""
    values = {**body.values, **dict.fromkeys(KEYS), "num_hidden_layers": count, **said}
    return Section(values, body.path, body.outer)


def with_mixer(text: TextConfig, mixer: MixerConfig | None, layers: Collection[int]) -> TextConfig:
    """The same decoder; in the layers of these numbers `mixer` replaces attention."""
    changed = (replace(layer, mixer=mixer) if number in layers else layer for number, layer in enumerate(text.layers))
    return replace(text, layers=tuple(changed))


def numbers(kinds: Sequence[str], *wanted: str) -> set[int]:
    """Numbers of the layers of the `wanted` kinds."""
    return {number for number, kind in enumerate(kinds) if kind in wanted}


def read_delta(body: Section, by_key_head: bool = False) -> DeltaConfig:
    """The delta rule of Qwen3-Next and Qwen3.5. by_key_head: the family's files group input rows by key head."""
    gate = body.values.get("output_gate_type") or "silu"
    if gate not in ("silu", "swish", "sigmoid"):
        raise ConfigError(f"{body.path}: output_gate_type={gate!r}; supported are silu, swish and sigmoid")
    keys, values = body.size("linear_num_key_heads", 16), body.size("linear_num_value_heads", 32)
    check_heads(body, "linear_num_value_heads", values, "linear_num_key_heads", keys)
    check_state_dtype(body)
    check_activation(body)
    return DeltaConfig(
        key_heads=keys,
        value_heads=values,
        key_dim=body.size("linear_key_head_dim", 128),
        value_dim=body.size("linear_value_head_dim", 128),
        taps=body.size("linear_conv_kernel_dim", 4),
        eps=body.number("rms_norm_eps", 1e-6),
        gate="sigmoid" if gate == "sigmoid" else "silu",
        by_key_head=by_key_head,
    )


def read_mamba1(body: Section, prefix: str = "", **family: Any) -> Mamba1Config:
    """prefix: "mamba_" for Jamba's keys; "" for Mamba's, `state_size` ... family: fields without a key in the file."""
    state, taps, rank = ("d_state", "d_conv", "dt_rank") if prefix else ("state_size", "conv_kernel", "time_step_rank")
    hidden = body.size("hidden_size")
    check_state_dtype(body)
    check_activation(body)
    given = body.values.get(prefix + rank)
    return Mamba1Config(
        width=body.size("intermediate_size", 2 * hidden) if not prefix else body.size(f"{prefix}expand", 2) * hidden,
        state_size=body.size(prefix + state, 16),
        rank=-(-hidden // 16) if given in (None, "auto") else body.size(prefix + rank),
        taps=body.size(prefix + taps, 4),
        conv_bias=body.boolean(f"{prefix}conv_bias" if prefix else "use_conv_bias", True),
        bias=body.boolean(f"{prefix}proj_bias" if prefix else "use_bias", False),
        **family,
    )


# Keys of Mamba-2 in families that do not use Bamba's: Bamba's key -> the family's key.
NEMOTRON = {
    "mamba_n_heads": "mamba_num_heads", "mamba_d_head": "mamba_head_dim", "mamba_n_groups": "n_groups",
    "mamba_d_state": "ssm_state_size", "mamba_d_conv": "conv_kernel", "mamba_conv_bias": "use_conv_bias",
    "mamba_proj_bias": "use_bias",
}  # fmt: skip
MAMBA2 = {
    **NEMOTRON, "mamba_n_heads": "num_heads", "mamba_d_head": "head_dim", "mamba_d_state": "state_size",
}  # fmt: skip


def read_mamba2(
    body: Section,
    keys: dict[str, str] | None = None,
    bounded: bool = True,
    activation: str = "hidden_act",
    **family: Any,
) -> Mamba2Config:
    """keys: Bamba's key -> the file's key. bounded: refuse a time_step_limit that bounds dt.

    activation: key of the convolution's activation. family: fields without a key, and default sizes.
    """
    section = body.renamed({theirs: ours for ours, theirs in (keys or {}).items()})
    heads, groups = section.size("mamba_n_heads", 128), section.size("mamba_n_groups", family.pop("groups", 1))
    check_heads(section, (keys or {}).get("mamba_n_heads", "mamba_n_heads"), heads, "groups of B and C", groups)
    check_state_dtype(body)
    check_activation(body, activation)
    if bounded:
        refuse_bounds(body)
    width = section.size("mamba_d_ssm", section.size("mamba_expand", 2) * section.size("hidden_size"))
    given = section.values.get("mamba_d_head")
    head_dim = width // heads if given in (None, "auto") else section.size("mamba_d_head")
    if given in (None, "auto") and width % heads:
        raise ConfigError(f"{body.path}: {width} columns are no multiple of {heads} heads")
    return Mamba2Config(
        heads=heads,
        head_dim=head_dim,
        state_size=section.size("mamba_d_state", family.pop("state_size", 128)),
        groups=groups,
        taps=section.size("mamba_d_conv", 4),
        conv_bias=section.boolean("mamba_conv_bias", True),
        bias=section.boolean("mamba_proj_bias", False),
        eps=section.number("rms_norm_eps", 1e-5),
        **family,
    )


def check_heads(body: Section, key: str, heads: int, group_key: str, groups: int) -> None:
    """Raises ConfigError if heads are not a multiple of groups."""
    if heads % groups:
        raise ConfigError(f"{body.path}: {key}={heads} is no multiple of {group_key}={groups}")


def refuse_bounds(body: Section) -> None:
    """Raises ConfigError if time_step_limit bounds dt. transformers 5 writes infinity as {"__float__": "Infinity"}."""
    given = body.values.get("time_step_limit") or [0.0, "Infinity"]
    limit = [value.get("__float__") if isinstance(value, dict) else value for value in given]
    if limit[:1] != [0.0] or limit[1:] not in ([float("inf")], ["Infinity"]):
        raise ConfigError(f"{body.path}: time_step_limit={limit} bounds dt; supported is [0.0, Infinity]")


def check_state_dtype(body: Section) -> None:
    """Raises ConfigError for float16 states: their rounding errors grow until answers break."""
    for key in ("mamba_ssm_cache_dtype", "mamba_ssm_dtype"):
        named = str(body.values.get(key) or "float32").removeprefix("torch.")
        if named not in ("float32", "bfloat16"):
            raise ConfigError(f"{body.path}: {key}={named!r}: states are float32 or bfloat16")


def check_activation(body: Section, key: str = "hidden_act") -> None:
    """Raises ConfigError if the convolution's activation is not SiLU."""
    named = body.values.get(key) or "silu"
    if named not in ("silu", "swish"):
        raise ConfigError(f"{body.path}: {key}={named!r} of layers with a state; supported are silu and swish")
