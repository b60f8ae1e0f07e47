"""Qwen2 and Qwen2.5: Llama with biases of queries, keys and values, and none of the output projection.

config.json does not mention the biases, which always exist.
"""

from __future__ import annotations

from functools import partial

from engine.checkpoint.text import read_text
from engine.models.base.family import Family
from engine.models.text.llama import Llama

FAMILY = Family(
    name="Qwen2",
    architectures=("Qwen2ForCausalLM",),
    inside=True,
    model=Llama,
    text=partial(read_text, sliding="switch", qkv_bias=True),
)
