"""Bodies of pooling models: which classes have one, which of them attend bidirectionally, and a decoder's config.

An encoder was never trained to generate. A decoder may have been trained further as an embedder; its files then say so
by `is_causal`, `use_bidirectional_attention`, or the name of a class. Thread: any; pure functions.
"""

from __future__ import annotations

from collections.abc import Mapping

from engine.base.errors import ConfigError
from engine.base.model_config import PoolingConfig, TextConfig, TowerConfig
from engine.checkpoint.pooling import Form
from engine.checkpoint.section import Section
from engine.checkpoint.text import every_layer
from engine.models.base.family import Family

USE_BIDIRECTIONAL = "use_bidirectional_attention"
BOTH_WAYS = "Bidirectional"  # in the names of classes that NVIDIA made of a decoder: LlamaBidirectionalModel
# Suffixes of class names whose head is not a language model's, and the kind of head; longer names first.
POOLED: dict[str, Form] = {
    "ForProcessRewardModel": "process",
    "ForRewardModel": "reward",
    "ForSequenceClassification": "score",
    "ForTokenClassification": "tokens",
    "Model": "embed",
}


def class_of_body(name: str) -> tuple[str, Form]:
    """The generating class of the same decoder, and the kind of result of the class `name`."""
    for ending, form in POOLED.items():
        if name.endswith(ending):
            return name.removesuffix(ending).removesuffix("Text").removesuffix(BOTH_WAYS) + "ForCausalLM", form
    return name, "generate"


def sees_all(family: Family, root: Section, body: Section) -> bool:
    """Whether each token attends to all tokens of its input."""
    said = root.values.get("is_causal") is False or attends_both_ways(body)
    return said or family.head is not None or any(BOTH_WAYS in str(name) for name in root.items("architectures", ()))


def attends_both_ways(body: Section) -> bool:
    """Whether a decoder attends bidirectionally to all tokens; Gemma 4 says "all", or "vision" for pictures only."""
    said = body.values.get(USE_BIDIRECTIONAL)
    return said == "all" if isinstance(said, str) else body.boolean(USE_BIDIRECTIONAL, False)


def pooled_text(
    text: TextConfig,
    pooling: PoolingConfig,
    towers: Mapping[str, TowerConfig],
    encoder_prefix: int,
    implementation: str,
) -> TextConfig:
    """The body of a pooling model; arguments as in ModelConfig. Raises ConfigError if pooling is not supported."""
    if pooling.two_towers:
        return text
    if implementation != "native":
        raise ConfigError("--runner pooling: the architecture has no file of its own here; it can only generate")
    if encoder_prefix:
        raise ConfigError("--runner pooling: this model writes down recordings; it can only generate")
    if not pooling.bidirectional:
        return text
    if towers:
        raise ConfigError(
            "is_causal=false: attention to later tokens is supported for texts; --language-model-only serves them"
        )
    if any(layer.softcap or layer.sinks for layer in text.layers):
        raise ConfigError("is_causal=false: attention to later tokens is not supported with capped scores or sinks")
    return every_layer(text, causal=False)
