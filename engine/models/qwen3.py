"""Qwen3: Llama with an RMSNorm on every head of queries and keys before rotation; `head_dim` is a key of its own."""

from __future__ import annotations

from engine.models.llama import Llama


class Qwen3(Llama):
    """The per-head norms are part of the kernel that rotates and stores."""

    QK_NORM = True
