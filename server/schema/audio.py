"""The forms of /v1/audio/transcriptions and /v1/audio/translations (API.md section 14), beside their `file`."""

from __future__ import annotations

import msgspec


class SpeechForm(msgspec.Struct, kw_only=True):
    """What both routes take."""

    model: str | None = None
    prompt: str | None = None
    response_format: str | None = None
    temperature: float | None = None
    stream: bool | None = None
    stream_include_usage: bool | None = None
    stream_continuous_usage_stats: bool | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    max_completion_tokens: int | None = None
    hotwords: str | None = None
    n: int | None = None
    use_beam_search: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None


class TranscriptionForm(SpeechForm, kw_only=True):
    language: str | None = None
    timestamp_granularities: list[str] | None = None
    include: list[str] | None = None


class TranslationForm(SpeechForm, kw_only=True):
    language: str | None = None  # of the recording
    to_language: str | None = None
