"""The engine in this process without HTTP: `from server.offline import LLM, SamplingParams`."""

from server.offline.llm import LLM
from server.offline.prompts import SamplingParams

__all__ = ["LLM", "SamplingParams"]
