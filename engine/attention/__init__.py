"""What attention reads of a step: where its rows lie, in the batch and in the paged cache (meta.py).

Thread: device. The arithmetic is in `engine/kernels/attention`.
"""
