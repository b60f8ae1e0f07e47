"""Tokens in, tokens out: the public face of the engine. Knows nothing of text, HTTP or files of media."""

from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import Delta, FinishReason, MediaInput, Request, SamplingParams
from engine.stream import TokenStream

__all__ = ["Delta", "Engine", "EngineConfig", "FinishReason", "MediaInput", "Request", "SamplingParams", "TokenStream"]
