"""InternLM3: Llama with other keys for its biases. The code in its checkpoints is not executed."""

from __future__ import annotations

from engine.base.model_config import TextConfig
from engine.checkpoint.section import Section
from engine.checkpoint.text import read_text
from engine.models.base.family import Family
from engine.models.text.llama import Llama


def text(body: Section, outer: Section) -> TextConfig:
    """The decoder's config; "bias" applies to the output projection and the MLP."""
    biased, others = body.boolean("qkv_bias", False), body.boolean("bias", False)
    return read_text(body, outer, qkv_bias=biased, o_bias=others, mlp_bias=others)


FAMILY = Family(name="InternLM3", architectures=("InternLM3ForCausalLM",), model=Llama, text=text)
