"""StableLM 2 and StableLM 3B: LayerNorms, a quarter of each head rotated; some have attention and MLP side by side."""

from __future__ import annotations

from engine.checkpoint.rope import RopeDefaults
from engine.checkpoint.section import Section
from engine.checkpoint.text import read_text, refuse
from engine.model_config import TextConfig
from engine.models.family import Family
from engine.models.llama import Llama


def text(body: Section, outer: Section) -> TextConfig:
    """The decoder."""
    refuse(body, qk_layernorm=False)
    parallel = body.boolean("use_parallel_residual", False)
    return read_text(
        body,
        outer,
        rope=RopeDefaults(partial=0.25),
        eps=1e-5,
        qkv_bias=body.boolean("use_qkv_bias", False),
        o_bias=False,
        layer_norm=True,
        norm_bias=True,
        parallel=parallel,
        shared_norm=parallel,
    )


FAMILY = Family(name="StableLM", model=Llama, text=text, keys={"layer_norm_eps": "rms_norm_eps"})
