"""ColQwen2 and ColQwen2.5: page retrievers based on Qwen2-VL and Qwen2.5-VL, as `vlm_config` says.

Pages keep their aspect ratio, and larger pages have more vectors. Pictures have Qwen2-VL's three position axes, as in
training (colpali-engine, and the first release of transformers' class). Since transformers 5, ColQwen2ForRetrieval
gives pictures the positions of text unless `position_ids` are passed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from engine.base.errors import ConfigError
from engine.base.model_config import ModelConfig, PoolingConfig, TowerConfig
from engine.checkpoint.files import INSIDE
from engine.checkpoint.section import Section
from engine.models.base.decoder import Decoder
from engine.models.base.family import Family
from engine.models.media.qwen2_5_vl import FAMILY as QWEN2_5
from engine.models.media.qwen2_vl import FAMILY as QWEN2
from engine.models.media.qwen2_vl import text
from engine.models.media.seeing import outside
from engine.models.pooling.page_retriever import below_vlm, placeholder, said, vectors

INNER = {"qwen2_vl": QWEN2, "qwen2_5_vl": QWEN2_5}  # model_type of `vlm_config` -> family


def inner(values: Mapping[str, Any]) -> Family:
    """The family of the retriever's base model."""
    kind = values.get(INSIDE, {}).get("model_type", "qwen2_vl")
    if kind not in INNER:
        raise ConfigError(
            f"config.json: {INSIDE}: model_type={kind!r} is not supported; supported are {', '.join(INNER)}"
        )
    return INNER[kind]


def model(config: ModelConfig, dtype: torch.dtype, device: str) -> Decoder:
    """The decoder and its tower."""
    made = inner(config.raw).model(config, dtype, device)
    assert isinstance(made, Decoder)
    return made


def vision(section: Section) -> TowerConfig:
    """The tower."""
    return inner(outside(section).values).towers["vision"](section)


def pooling(folder: Path, body: Section, root: Section, given: Mapping[str, Any]) -> PoolingConfig:
    """The pooling config; texts have no begin token."""
    visible = f"<|vision_start|>{placeholder(folder, root)}<|vision_end|>"
    page = f"<|im_start|>user\n{visible}Describe the image.<|im_end|><|endoftext|>"
    page = said(folder, "visual_prompt_prefix", page)
    return vectors(folder, body, root, given, said(folder, "query_prefix", "Query: "), page)


FAMILY = Family(
    name="ColQwen2, ColQwen2.5",
    architectures=("ColQwen2ForRetrieval",),
    model=below_vlm(model),
    text=text,
    towers={"vision": vision},
    processor="qwen_vl:QwenPages",
    pooling=pooling,
)
