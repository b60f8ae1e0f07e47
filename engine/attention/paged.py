"""Causal attention over the paged cache: the face for models of `engine/kernels/attention/paged.py`."""

from engine.attention.base import AttentionMeta
from engine.kernels.attention.paged import paged_attention

__all__ = ["AttentionMeta", "paged_attention"]
