"""OLMoE: norms over whole queries and keys, and experts in every layer."""

from __future__ import annotations

from engine.base.model_config import TextConfig
from engine.checkpoint.experts import read_experts, with_experts
from engine.checkpoint.section import Section
from engine.checkpoint.text import read_text
from engine.models.base.family import Family
from engine.models.text.sparse import Sparse


def text(body: Section, outer: Section) -> TextConfig:
    """The decoder's config; queries and keys are clipped after their norms."""
    read = read_text(body, outer, eps=1e-5, qk_norm="projection", qkv_clip=body.number("clip_qkv", 0.0))
    norm_topk_prob = body.boolean("norm_topk_prob", False)
    return with_experts(read, read_experts(body, width="intermediate_size", norm_topk_prob=norm_topk_prob))


FAMILY = Family(name="OLMoE", architectures=("OlmoeForCausalLM",), model=Sparse, text=text)
