"""Imports triton before any kernel file is, in the mode that the environment names (TRITON_INTERPRET)."""

import triton  # noqa: F401
