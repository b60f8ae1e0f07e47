"""Gemma 3 with pictures: SigLIP, an average over neighbours, a norm and a linear layer, before Gemma 3's decoder.

The tokens of a picture see each other; in layers with a window, as far as the window reaches.
"""

from __future__ import annotations

import math
from dataclasses import replace

from engine.base.errors import ConfigError
from engine.base.model_config import TextConfig
from engine.checkpoint.section import Section
from engine.encoders.vit.config import VitConfig
from engine.models.base.family import Family
from engine.models.media.seeing import outside, read_vision, seeing
from engine.models.media.seeing import text as seeing_text

PROJECTOR = "multi_modal_projector"


def text(body: Section, outer: Section) -> TextConfig:
    """The decoder's config; embedding and head are tied, which released files do not say."""
    return seeing_text(body, outer, tied=True)


def vision(section: Section) -> VitConfig:
    """The tower's config; mm_tokens_per_image is the number of rows per picture."""
    outer = outside(section)
    tokens = outer.size("mm_tokens_per_image", 256)
    side = math.isqrt(tokens)
    config = read_vision(
        section,
        norm="rms",
        norm_eps=section.number("layer_norm_eps", 1e-6),
        norm_offset=1.0,
        products=1,
        bias=False,
        norm_name=f"{PROJECTOR}.mm_soft_emb_norm",
        outer_name=PROJECTOR,
        turned="mm_input_projection_weight",
    )
    if side * side != tokens or config.side % side:
        raise ConfigError(
            f"{outer.path}: mm_tokens_per_image={tokens} of {config.side} x {config.side} patches; a square number "
            "whose root divides the patches along a side is needed"
        )
    return replace(config, post_norm=True, projector=replace(config.projector, pool=config.side // side))


def media_token_ids(outer: Section) -> dict[str, int]:
    """A template writes the token that begins a picture."""
    return {"image": outer.integer("boi_token_index", 255_999)}


FAMILY = Family(
    name="Gemma 3 with pictures",
    architectures=("Gemma3ForConditionalGeneration",),
    model=seeing,
    text=text,
    towers={"vision": vision},
    processor="gemma:Gemma3",
    bidirectional="items",
    media_token_ids=media_token_ids,
)
