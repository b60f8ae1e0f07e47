"""Metadata that attention reads in a step: where the rows lie in the batch and in the paged cache (meta.py).

Thread: device. The arithmetic is in `engine/kernels/attention`.
"""
