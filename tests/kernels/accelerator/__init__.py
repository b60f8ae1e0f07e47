"""Triton kernels on the CPU: in Triton's interpreter against their references, and cross-compiled for real targets.

These files import `triton` before any kernel file. tests/kernels/test_triton.py runs each file in a separate process,
in the mode that the file needs.
"""
