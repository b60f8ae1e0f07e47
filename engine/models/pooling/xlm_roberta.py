"""XLM-R (BGE-M3's dense vectors, e5-multilingual, bge-reranker-v2): RoBERTa's layers, or the layers of Jina's code.

Jina's checkpoints (jina-embeddings-v3, jina-reranker-v2) name the same classes in config.json, and their own code.
"""

from __future__ import annotations

import torch

from engine.base.model_config import ModelConfig, TextConfig
from engine.checkpoint.section import Section
from engine.models.base.encoder import Encoder
from engine.models.base.family import Family
from engine.models.pooling import bert, jina_embeddings_v3, roberta
from engine.models.pooling.classes import ALL, classes


def of_jina(body: Section) -> bool:
    """Whether the checkpoint uses Jina's code and names."""
    told = body.values.get("lora_adaptations") or "XLMRobertaFlashConfig" in str(body.values.get("auto_map"))
    return bool(told) or body.values.get("position_embedding_type") == "rotary"


def model(config: ModelConfig, dtype: torch.dtype, device: str) -> Encoder:
    """The encoder."""
    kind = jina_embeddings_v3.JinaV3 if of_jina(Section(config.raw, "config.json")) else roberta.Roberta
    return kind(config, dtype, device)


def text(body: Section, outer: Section) -> TextConfig:
    """The encoder's config, for either layout."""
    return (jina_embeddings_v3 if of_jina(body) else bert).text(body, outer)


def first_position(body: Section) -> int:
    """Unused rows at the start of the position table."""
    return (jina_embeddings_v3 if of_jina(body) else roberta).first_position(body)


FAMILY = Family(
    name="XLM-R",
    architectures=(*classes("XLMRoberta", *ALL), "XLMRobertaLoRA"),
    model=model,
    text=text,
    head=roberta.head,
    keys=jina_embeddings_v3.KEYS,
    first_position=first_position,
)
