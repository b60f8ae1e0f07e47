"""OLMoE: norms over whole queries and keys, and experts in every layer."""

from __future__ import annotations

from engine.checkpoint.experts import read_experts, with_experts
from engine.checkpoint.section import Section
from engine.checkpoint.text import read_text, refuse
from engine.model_config import TextConfig
from engine.models.family import Family
from engine.models.sparse import Sparse


def text(body: Section, outer: Section) -> TextConfig:
    """Queries, keys and values that a file wants clipped are refused: no release has them."""
    refuse(body, clip_qkv=None)
    read = read_text(body, outer, eps=1e-5, qk_norm="projection")
    renormalise = body.boolean("norm_topk_prob", False)
    return with_experts(read, read_experts(body, width="intermediate_size", renormalise=renormalise))


FAMILY = Family(name="OLMoE", model=Sparse, text=text)
