"""Public interface of the engine: tokens in, tokens out. It does not handle text, HTTP or media files."""

from engine.base.config import EngineConfig
from engine.base.request import Delta, FinishReason, MediaInput, Request, SamplingParams
from engine.base.stream import TokenStream
from engine.engine import Engine

__all__ = ["Delta", "Engine", "EngineConfig", "FinishReason", "MediaInput", "Request", "SamplingParams", "TokenStream"]
