"""Arithmetic on the host in Cython and C: the scheduler on integers, and the CPU's kernels. Imports no folder above."""
