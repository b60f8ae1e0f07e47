"""Attention inside segments, without a cache: the face for towers of `engine/kernels/attention/dense.py`."""

from engine.kernels.attention.dense import dense_attention

__all__ = ["dense_attention"]
