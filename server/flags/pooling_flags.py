"""PoolingFlags: the operator's settings for models that compute vectors and scores; a group of Config."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class PoolingFlags:
    """Models that compute a vector or scores of each input."""

    runner: Literal["auto", "generate", "pooling"] = field(
        default="auto",
        metadata={"help": "generate: text; pooling: vectors or scores; auto: the checkpoint's"},
    )
    pooler_config: dict[str, Any] = field(
        default_factory=dict,
        metadata={"help": 'settings over the checkpoint\'s, such as {"pooling_type": "MEAN", "use_activation": false}'},
    )
    max_inputs: int = field(default=2048, metadata={"help": "inputs of an embeddings or pooling request", "low": 1})
    max_documents: int = field(default=1024, metadata={"help": "documents of a score or rerank request", "low": 1})
