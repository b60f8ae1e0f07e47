"""EXAONE 4: norms after attention and MLP only, norms of heads; if there are windows, full layers do not rotate."""

from __future__ import annotations

from dataclasses import replace

from engine.base.model_config import TextConfig
from engine.checkpoint.rope import no_rope
from engine.checkpoint.section import Section
from engine.checkpoint.text import every_layer, read_text
from engine.models.base.family import Family
from engine.models.text.olmo2 import PostNormDecoder


def text(body: Section, outer: Section) -> TextConfig:
    """The decoder."""
    read = read_text(body, outer, sliding="layers", pattern=4, eps=1e-5, qk_norm="head")
    read = every_layer(read, pre_norms=False, post_norms=True)
    if body.values.get("sliding_window", 0) is None:
        return read
    none = no_rope(read.head_dim)
    return replace(read, layers=tuple(each if each.window else replace(each, rope=none) for each in read.layers))


FAMILY = Family(name="EXAONE 4", architectures=("Exaone4ForCausalLM",), model=PostNormDecoder, text=text)
