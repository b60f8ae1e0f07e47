"""PhiMoE (Phi-3.5-MoE, Phi-mini-MoE): Mixtral's names, LayerNorms, biases, and sparse-mixer routing."""

from __future__ import annotations

from engine.base.errors import ConfigError
from engine.base.model_config import TextConfig
from engine.checkpoint.experts import read_experts, with_experts
from engine.checkpoint.section import Section
from engine.checkpoint.text import read_text
from engine.models.base.family import Family
from engine.models.text.mixtral import ROPE, Mixtral


def text(body: Section, outer: Section) -> TextConfig:
    """The decoder's config; with longrope the file names the factors of cos and sin."""
    values = dict(body.values)
    for key in ("rope_parameters", "rope_scaling"):
        given = values.get(key)
        if isinstance(given, dict) and given.get("long_mscale") is not None:
            short, long = given.get("short_mscale", given["long_mscale"]), given["long_mscale"]
            if short != long:
                raise ConfigError(
                    f"{body.path}: {key} has short_mscale={short!r} and long_mscale={long!r}; one number for both is "
                    "supported"
                )
            values[key] = {**given, "attention_factor": long}
    body = Section(values, body.path)
    read = read_text(
        body,
        outer,
        sliding="given",
        rope=ROPE,
        eps=1e-5,
        layer_norm=True,
        norm_bias=True,
        head_bias=body.boolean("lm_head_bias", False),
    )
    near = 2 * body.number("router_jitter_noise", 0.01)
    return with_experts(read, read_experts(body, width="intermediate_size", score="near", nearness=near))


FAMILY = Family(name="PhiMoE", architectures=("PhiMoEForCausalLM", "PhimoeForCausalLM"), model=Mixtral, text=text)
