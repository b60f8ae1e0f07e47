"""The forms of /v1/audio/transcriptions and /v1/audio/translations (API.md section 14), without their `file`."""

from __future__ import annotations

from typing import Annotated

import msgspec

from server.schema import fields
from server.schema.fields import said


class SampledForm(msgspec.Struct, kw_only=True):
    """How the text of a recording is sampled."""

    temperature: fields.Temperature = None
    top_p: fields.TopP = None
    top_k: fields.TopK = None
    min_p: fields.MinP = None
    seed: fields.Seed = None
    frequency_penalty: fields.FrequencyPenalty = None
    presence_penalty: fields.PresencePenalty = None
    repetition_penalty: fields.RepetitionPenalty = None


class SpeechForm(SampledForm, kw_only=True):
    """The fields that both routes take."""

    model: fields.Model = None
    prompt: Annotated[str | None, said("Words before the recording, or an instruction to models that take one.")] = None
    response_format: Annotated[
        str | None, said("The form of the answer: json, text, srt, vtt or verbose_json.", "json")
    ] = None
    stream: Annotated[bool | None, said("Whether the text comes as server-sent events while it is made.")] = None
    stream_include_usage: Annotated[bool | None, said("Whether a last event holds the token counts.")] = None
    stream_continuous_usage_stats: Annotated[bool | None, said("Whether each event holds the token counts so far.")] = (
        None
    )
    max_completion_tokens: Annotated[int | None, said("Most tokens to generate for a piece of the recording.")] = None
    hotwords: Annotated[str | None, said("Refused: models here take no such list; put the words into prompt.")] = None
    n: Annotated[int | None, said("Number of answers; 1 is the only one.", 1)] = None
    use_beam_search: Annotated[bool | None, said("Refused where it is set: transcriptions are sampled.")] = None
    cache_salt: fields.CacheSalt = None
    priority: fields.Priority = None
    return_progress: fields.ReturnProgress = None


class TranscriptionForm(SpeechForm, kw_only=True):
    language: fields.Language = None
    timestamp_granularities: Annotated[
        list[str] | None, said("Times in verbose_json: segment or word.", ["segment"])
    ] = None
    include: Annotated[list[str] | None, said("Parts to add: logprobs.")] = None


class TranslationForm(SpeechForm, kw_only=True):
    language: fields.Language = None
    to_language: Annotated[str | None, said("The language of the answer as an ISO 639-1 code.", "en")] = None
