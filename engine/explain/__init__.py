"""Explains the model of a configuration: its parts, their shapes and caches, and the kernels that steps launch."""
