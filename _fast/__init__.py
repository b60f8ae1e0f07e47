"""Arithmetic on the host in Cython and C: scheduling in integers, and the CPU's kernels. Knows nobody above."""
