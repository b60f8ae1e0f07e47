"""The routes of Ollama's protocol."""

from __future__ import annotations

from server.dialects.ollama import about, chat, embed, generate

ROUTES = [line for family in (chat, generate, embed, about) for line in family.ROUTES]
