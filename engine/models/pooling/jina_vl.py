"""jina-reranker-m0: Qwen2-VL with a special last token, whose hidden state becomes a score by two layers.

A pair is plain text (server/pooling/written). Bias and lengths are from modeling.py in
https://huggingface.co/jinaai/jina-reranker-m0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.base.errors import ConfigError
from engine.base.model_config import HeadLayer, PoolingConfig
from engine.checkpoint.section import Section
from engine.models.base.family import Family
from engine.models.media.qwen2_vl import FAMILY as QWEN2_VL

LONGEST = 10_240  # tokens of a pair in training
BIAS = -2.65  # added to the logit


def pooling(folder: Path, body: Section, root: Section, given: Mapping[str, Any]) -> PoolingConfig:
    """The pooling config: one score per pair."""
    if given:
        raise ConfigError("--pooler-config: this reranker has nothing to choose; leave the flag out")
    hidden = body.size("hidden_size")
    inner = HeadLayer("score.0", hidden, hidden, bias=True, activation="relu")
    return PoolingConfig(
        task="classify",
        kind="last",
        activation="sigmoid",
        layers=(inner, HeadLayer("score.2", hidden, 1, bias=True, offset=BIAS)),
        labels=("LABEL_0",),
        max_tokens=LONGEST,
        dimensions=None,
        template="jina_vl",
    )


FAMILY: Family = replace(
    QWEN2_VL,
    name="Jina reranker m0",
    architectures=("JinaVLForRanking",),
    processor="qwen_vl:JinaPages",
    pooling=pooling,
)
