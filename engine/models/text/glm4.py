"""GLM-4-0414 and GLM-Z1: GLM with norms also after attention and MLP."""

from __future__ import annotations

from engine.base.model_config import TextConfig
from engine.checkpoint.section import Section
from engine.checkpoint.text import every_layer
from engine.models.base.family import Family
from engine.models.text import glm
from engine.models.text.llama import DECODER_IGNORE, Llama
from engine.weights.table import Row, Table


class Glm4(Llama):
    """Four norms in each layer."""

    WEIGHTS = Table(
        (
            *glm.ROWS,
            Row(("layers.*.post_self_attn_layernorm",), "layers.*.attention_post_norm"),
            Row(("layers.*.post_mlp_layernorm",), "layers.*.mlp_post_norm"),
        ),
        ignore=DECODER_IGNORE,
    )


def text(body: Section, outer: Section) -> TextConfig:
    """The decoder."""
    return every_layer(glm.text(body, outer), post_norms=True)


FAMILY = Family(name="GLM-4", architectures=("Glm4ForCausalLM",), model=Glm4, text=text)
