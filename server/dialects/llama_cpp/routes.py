"""The routes of llama.cpp's protocol."""

from __future__ import annotations

from server.dialects.llama_cpp import about, completion, infill

ROUTES = [line for family in (completion, infill, about) for line in family.ROUTES]
