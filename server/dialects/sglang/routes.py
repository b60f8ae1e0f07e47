"""The routes of SGLang's protocol."""

from __future__ import annotations

from server.dialects.sglang import about, generate

ROUTES = [line for family in (generate, about) for line in family.ROUTES]
