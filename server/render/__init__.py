"""Prompts: from messages and text to token ids and media references; chat.py is the entry point, the rest its parts."""

from server.render.errors import RenderError
from server.render.prompt import Prompt

__all__ = ["Prompt", "RenderError"]
