"""Tokens in, tokens out: the public face of the engine. Knows nothing of text, HTTP or files of media."""

from engine.base.config import EngineConfig
from engine.base.request import Delta, FinishReason, MediaInput, Request, SamplingParams
from engine.base.stream import TokenStream
from engine.engine import Engine

__all__ = ["Delta", "Engine", "EngineConfig", "FinishReason", "MediaInput", "Request", "SamplingParams", "TokenStream"]
