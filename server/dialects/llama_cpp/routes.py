"""The routes of llama.cpp's protocol."""

from __future__ import annotations

from server.dialects.llama_cpp import about, completion, embedding, infill

ROUTES = [line for family in (completion, infill, embedding, about) for line in family.ROUTES]
