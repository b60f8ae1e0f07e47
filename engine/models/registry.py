"""Architecture name of a checkpoint -> the class that computes it; imported only when it is asked for.

In: ModelConfig. Out: a Model without weights (engine/weights/load fills it). hf.load_model_config has refused unknown
names before; the two lists are compared by a test.
"""

from __future__ import annotations

import importlib

import torch

from engine.models.base import Model
from engine.models.config import ModelConfig

ARCHITECTURES = {
    "LlamaForCausalLM": "engine.models.llama:Llama",
    "MistralForCausalLM": "engine.models.llama:Llama",
    "Qwen2ForCausalLM": "engine.models.qwen2:Qwen2",
    "Qwen3ForCausalLM": "engine.models.qwen3:Qwen3",
    "Qwen2_5OmniThinkerForConditionalGeneration": "engine.models.qwen2_5_omni:Qwen25OmniThinker",
    "Qwen2_5OmniForConditionalGeneration": "engine.models.qwen2_5_omni:Qwen25OmniThinker",
    "Qwen2_5OmniModel": "engine.models.qwen2_5_omni:Qwen25OmniThinker",
}


def build_model(config: ModelConfig, dtype: torch.dtype, device: str = "cpu") -> Model:
    """The model of a checkpoint, its parts sized and empty."""
    module, _, name = ARCHITECTURES[config.architecture].partition(":")
    return getattr(importlib.import_module(module), name)(config, dtype, device)
