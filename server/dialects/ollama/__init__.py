"""Ollama's protocol at /api: chat, generate, embed, and facts about the served model (its docs/api.md)."""
