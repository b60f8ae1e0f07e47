"""Attention as models call it: the rows of a step described by AttentionMeta, and one function per kind of cache.

Thread: device. In: rotated queries, caches and AttentionMeta. Out: attended values, [num_tokens, heads * head_dim].
Models import from here; the arithmetic is in `engine/kernels/attention`.
"""
