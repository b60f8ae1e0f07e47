"""InternVL in its publisher's layout (InternVLChatModel): the model of internvl.py with other names.

config.json calls the decoder's section llm_config, which is read as text_config (engine/checkpoint/files). Names and
formulas follow modeling_internvl_chat.py and modeling_intern_vit.py in these checkpoints, which are not executed.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from engine.base.errors import ConfigError
from engine.checkpoint.section import Section
from engine.encoders.vit.config import VitConfig
from engine.models.base.family import Family
from engine.models.media import internvl
from engine.models.media.seeing import outside, read_vision, seeing, text


def vision(section: Section) -> VitConfig:
    """The tower's config; the order of concatenated neighbours is that of version 2 of the published code."""
    outer = outside(section)
    version, image = outer.values.get("ps_version", "v1"), section.size("image_size", 224)
    if version != "v2":
        raise ConfigError(f"{outer.path}: ps_version={version!r}; how neighbours become rows is supported as 'v2'")
    forced = outer.size("force_image_size", image)
    if forced != image:
        raise ConfigError(f"{outer.path}: force_image_size={forced} must be the tower's image_size={image}")
    read = read_vision(
        section,
        feature_layer=outer.integer("select_layer", -1, least=-(2**31)),
        merge=internvl.neighbours(outer),
        norm="layer",
        norm_name="mlp1.0",
        inner_name="mlp1.1",
        outer_name="mlp1.3",
    )
    return replace(read, modalities=("image", "video"))


FAMILY = Family(
    name="InternVL Chat",
    architectures=("InternVLChatModel",),
    model=seeing,
    text=partial(text, tied=False),
    towers={"vision": vision},
    processor="internvl:InternVLChat",
)
