"""Prompts: messages and text in, token ids and media references out; chat.py is the whole, the rest its parts."""

from server.render.errors import RenderError
from server.render.prompt import Prompt

__all__ = ["Prompt", "RenderError"]
