"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values, and none on the output product."""

from __future__ import annotations

from engine.models.llama import Llama


class Qwen2(Llama):
    """config.json does not mention the biases: they are always there."""

    QKV_BIAS = True
