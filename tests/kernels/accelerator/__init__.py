"""Triton kernels on the CPU: in Triton's interpreter against their references, and cross-compiled for real targets.

These files need `triton` imported before any kernel file, with the interpreter on: tests/kernels/test_triton.py runs
them in a process of their own.
"""
