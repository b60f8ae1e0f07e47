"""MiniCPM-V 4.5: Qwen3, and SigLIP for pictures and frames of any shape, which learned queries summarise.

The published files are for code in the checkpoint, which never runs: the decoder is `llm`, the tower `vpm`. Earlier
versions have other decoders, and queries that attend in another way; they are refused.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.base.errors import ConfigError
from engine.base.model_config import ModelConfig, TextConfig
from engine.checkpoint.section import Section
from engine.encoders.resampler import HEAD, ResampledConfig, ResampledTower
from engine.encoders.tower import by_modality
from engine.encoders.vit.config import ProjectorConfig, read_vit
from engine.encoders.vit.names import with_tower
from engine.models.base.family import Family
from engine.models.media.seeing import outside
from engine.models.text import qwen3
from engine.models.text.llama import Llama
from engine.weights.table import Row

VERSION = "4.5"
PLACEHOLDER = 128_244  # <unk> of the released tokenizer, which stands for a row of a picture
ENDING = (
    Row(("resampler",), "vision.projector.query"),
    Row(("resampler.kv_proj",), "vision.projector.reduce"),
    Row(("resampler.attn",), "vision.projector.projections"),
    Row(("resampler.attn.out_proj",), "vision.projector.out"),
    Row(("resampler.ln_q",), "vision.projector.query_norm"),
    Row(("resampler.ln_kv",), "vision.projector.norm"),
    Row(("resampler.ln_post",), "vision.projector.post_norm"),
    Row(("resampler",), "vision.projector.project"),
)


class MiniCPMV(Llama):
    """Text, pictures and films in; text out."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
        super().__init__(config, dtype, device)
        vision = config.towers.get("vision")
        self.table = replace(self.table, prefixes=("llm.", "model."))
        if isinstance(vision, ResampledConfig):
            self.vision = ResampledTower(vision, dtype, device)
            self.towers = by_modality(self.vision)
            own = [row for row in with_tower(replace(self.table, rows=()), vision).rows if _is_ours(row)]
            rows = (Row(tuple(f"vpm.{name}" for name in row.names), row.target, row.split) for row in own)
            self.table = replace(self.table, rows=(*self.table.rows, *rows, *ENDING))


def _is_ours(row: Row) -> bool:
    """Whether a row of the plain tower exists here: the ending is another one, and there is no newline."""
    return not row.target.startswith(("vision.projector", "vision.newline"))


def text(body: Section, outer: Section) -> TextConfig:
    """The decoder's config, at the top level of the file."""
    version = str(outer.values.get("version"))
    if version != VERSION:
        raise ConfigError(f"{outer.path}: version={version}; this family is served in version {VERSION}")
    return qwen3.FAMILY.text(body, outer)


def vision(section: Section) -> ResampledConfig:
    """The tower's config."""
    outer = outside(section)
    width = outer.size("hidden_size")
    if width % HEAD or outer.boolean("drop_vision_last_layer", False):
        raise ConfigError(
            f"{outer.path}: hidden_size={width}, drop_vision_last_layer={outer.values.get('drop_vision_last_layer')}; "
            f"supported are multiples of {HEAD}, and false"
        )
    named = Section({**section.values, "model_type": "minicpmv"}, section.path, outer)
    tower = replace(read_vit(named, ProjectorConfig(width)), modalities=("image", "video"))
    return ResampledConfig.of(tower, outer.size("query_num", 64))


def media_token_ids(outer: Section) -> dict[str, int]:
    """The placeholder of pictures and films; released files do not name it."""
    return dict.fromkeys(("image", "video"), outer.integer("image_token_id", PLACEHOLDER))


FAMILY = Family(
    name="MiniCPM-V 4.5",
    architectures=("MiniCPMV",),
    model=MiniCPMV,
    text=text,
    towers={"vision": vision},
    processor="minicpmv:MiniCPMV",
    media_token_ids=media_token_ids,
)
