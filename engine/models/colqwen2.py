"""ColQwen2: a retriever of pages over Qwen2-VL; pages keep their shape, and a larger one has more vectors.

Pictures have Qwen2-VL's three axes of positions, as in training (colpali-engine, and transformers' first release of
the class). Since transformers 5 its ColQwen2ForRetrieval counts them like text unless `position_ids` are given.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.checkpoint.section import Section
from engine.encoders.qwen_vl.config import read_vision2
from engine.model_config import PoolingConfig
from engine.models.family import Family
from engine.models.page_retriever import below_vlm, placeholder, said, vectors
from engine.models.qwen2_vl import Qwen2VL, text


def pooling(folder: Path, body: Section, root: Section, given: Mapping[str, Any]) -> PoolingConfig:
    """Texts begin with no token of their own."""
    shown = f"<|vision_start|>{placeholder(folder, root)}<|vision_end|>"
    page = f"<|im_start|>user\n{shown}Describe the image.<|im_end|><|endoftext|>"
    page = said(folder, "visual_prompt_prefix", page)
    return vectors(folder, body, root, given, said(folder, "query_prefix", "Query: "), page)


FAMILY = Family(
    name="ColQwen2",
    model=below_vlm(Qwen2VL),
    text=text,
    towers={"vision": read_vision2},
    processor="qwen_vl:QwenPages",
    pooling=pooling,
)
