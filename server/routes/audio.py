"""/v1/audio/transcriptions and /v1/audio/translations (API.md section 14): recordings in, texts out.

Owner: loop. In: a multipart form with a file. Out: a transcript in one of five formats, or a stream of its text.
Everything that can be refused is refused before the file is decoded.

    form, counted | checks | place | decode, cut | windows through the engine | transcript
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
import orjson
from starlette.requests import Request
from starlette.responses import Response

from mm.recording import Recording
from server.errors import from_validation, invalid, not_here, quoted
from server.http.exchange import Exchange, exchange_of
from server.http.uploads import Form, uploaded
from server.http.watch import client_present
from server.jobs.job import scope_of
from server.jobs.sampling import Asked, in_range, priority_of, resolve, salt_of
from server.routes.endpoint import gateway_priority, generating_route, one_of, served_model
from server.schema.audio import SpeechForm, TranscriptionForm, TranslationForm
from server.schema.common import SamplingFields
from server.speech.choose import transcriber_of
from server.speech.languages import code_of, separator
from server.speech.listening import Listening, all_logprobs
from server.speech.segments import FORMATS, MEDIA_TYPES, Transcript, Word, body, joined
from server.speech.speech_stream import SpeechStream
from server.speech.transcriber import Said, Task, Transcriber

Kind = TypeVar("Kind", bound=SpeechForm)
LISTS = ("timestamp_granularities", "include")
NUMBERS = ("temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty",
           "repetition_penalty", "stream", "cache_salt", "priority", "return_progress")  # fmt: skip
MAX_PROMPT_BYTES = 16384
UNSERVED = {
    "known_speaker_names": "no served model identifies speakers; leave the field out",
    "known_speaker_references": "no served model identifies speakers; leave the field out",
    "keywords": "is not supported; write the words into prompt",
    "languages": "is not supported; send one language, or leave the field out",
    "chunking_strategy": "only auto is supported: long recordings are cut at quiet places",
}  # fields of OpenAI's client that would change the transcript or its metadata


async def transcribe(request: Request) -> Response | None:
    """Transcribe a recording in its own language."""
    return await listen(request, TranscriptionForm)


async def translate(request: Request) -> Response | None:
    """Translate a recording into English, or into `to_language` if the model can."""
    return await listen(request, TranslationForm)


async def listen(request: Request, kind: type[Kind]) -> Response | None:
    """The handler of both routes."""
    exchange = exchange_of(request)
    state = exchange.state
    most = state.config.media.audio_max_bytes
    async with uploaded(request, "file", min(most, state.config.limits.max_upload_bytes or most)) as form:
        fields = typed(form, kind)
        model = await served_model(exchange, fields.model)
        task = task_of(exchange, fields, gateway_priority(request))
        transcriber = transcriber_of(exchange, task)
        if form.file is None or not (data := form.file.getvalue()):
            raise invalid("file", "file: is missing or empty; send a recording as the form's file")
        form.file = None
        async with client_present(request):
            with exchange.hold(1, "speech"):
                assert state.media is not None
                scope = scope_of(exchange, task.salt)
                async with state.media.recording(data, transcriber.cutting(), scope) as recording:
                    del data
                    return await answer(exchange, fields, task, transcriber, recording, model)


async def answer(
    exchange: Exchange, fields: SpeechForm, task: Task, transcriber: Transcriber, recording: Recording, model: str
) -> Response | None:
    """A stream, or a body in the requested format."""
    listening = Listening(exchange, task, transcriber)
    if task.asked.stream:
        name = f"trsc-{exchange.request_id}"
        await SpeechStream(listening, name, model, lambda: separator(transcriber.language), fields).run(recording)
        return None
    said = await listening.run(recording)
    logprobs = all_logprobs(exchange.state.tokenizer, said) if task.with_logprobs else None
    form = fields.response_format or "json"
    content = body(transcript(task, transcriber, recording, said), form)
    if logprobs is not None and isinstance(content, dict):
        content["logprobs"] = logprobs
    if isinstance(content, str):
        return Response(content, media_type=MEDIA_TYPES[form])
    return Response(orjson.dumps(content), media_type="application/json")


def transcript(task: Task, transcriber: Transcriber, recording: Recording, said: list[Said]) -> Transcript:
    """The transcript of all windows."""
    windows = list(zip(recording.windows, said))
    segments = [segment for window, found in windows for segment in transcriber.segments(window, found)]
    text = joined((found.text for found in said), separator(transcriber.language))
    words = [
        Word(word.text, window.start + word.start, window.start + word.end)
        for window, found in windows
        for word in found.words
    ]
    return Transcript(
        task.name,
        transcriber.language,
        recording.seconds,
        text,
        segments if task.with_segments else None,
        words if task.with_words else None,
    )


def typed(form: Form, kind: type[Kind]) -> Kind:
    """The form's texts as fields. Raises ApiError."""
    for name, values in form.texts.items():
        field = name.partition("[")[0]  # the client writes an object as chunking_strategy[type], one part per member
        if field in UNSERVED and any(values) and (name, values) != ("chunking_strategy", ["auto"]):
            raise invalid(field, f"{field}: not supported on this route; {UNSERVED[field]}")
    known = {name: values for name, values in form.texts.items() if name in kind.__struct_fields__}
    for name, values in known.items():
        if len(values) > 1 and name not in LISTS:
            raise invalid(name, f"{name}: came {len(values)} times; send it once")
    given: dict[str, Any] = {
        name: values if name in LISTS else values[0] for name, values in known.items() if name in LISTS or values[0]
    }
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        raise from_validation(error) from None


def task_of(exchange: Exchange, fields: SpeechForm, header: str) -> Task:
    """The form's task, checked."""
    state = exchange.state
    translates = isinstance(fields, TranslationForm)
    one_of("response_format", fields.response_format, (*FORMATS, "diarized_json"))
    if fields.response_format == "diarized_json":
        raise not_here(
            "response_format",
            "response_format: diarized_json needs a model that identifies speakers; send json or verbose_json",
        )
    if fields.stream and (fields.response_format or "json") != "json":
        raise invalid("stream", f"stream: only with response_format json, not {fields.response_format}")
    for name in ("hotwords", "use_beam_search"):
        if getattr(fields, name):
            raise not_here(name, f"{name}: not supported on this route; leave it out")
    if fields.n not in (None, 1):
        raise not_here("n", f"n: got {fields.n}; this route makes one transcript")
    if fields.prompt and (size := len(fields.prompt.encode())) > MAX_PROMPT_BYTES:
        raise invalid("prompt", f"prompt: has {size} bytes; at most {MAX_PROMPT_BYTES} are read, so shorten it")
    told = granularities_of(fields, state.whisper is not None)
    common = SamplingFields(**{name: getattr(fields, name) for name in NUMBERS})
    target = code_of("to_language", fields.to_language) if isinstance(fields, TranslationForm) else ""
    return Task(
        name="translate" if translates else "transcribe",
        language=code_of("language", getattr(fields, "language", None)),
        to_language=(target or "en") if translates else "",
        prompt=(fields.prompt or "").strip(),
        with_times=fields.response_format in ("srt", "vtt", "verbose_json"),
        with_segments="segment" in told,
        with_words="word" in told,
        with_logprobs=wants_logprobs(fields),
        asked=asked_of(exchange, fields, common),
        salt=salt_of(common),
        priority=priority_of(common, state.config, header),
    )


def wants_logprobs(fields: SpeechForm) -> bool:
    """Whether the answer has each token's log-probability. Raises ApiError."""
    asked: Sequence[str] = getattr(fields, "include", None) or ()
    for word in asked:
        if word != "logprobs":
            raise invalid("include", f"include: got {quoted(word)}; must be logprobs")
    if asked and (fields.response_format or "json") != "json":
        raise invalid("include", f"include: logprobs come with response_format json, not {fields.response_format}")
    return bool(asked)


def granularities_of(fields: SpeechForm, has_word_times: bool) -> Sequence[str]:
    """The units with times in the answer. Raises ApiError for units for which the model gives no times."""
    asked: Sequence[str] = getattr(fields, "timestamp_granularities", None) or ()
    for word in asked:
        if word not in ("segment", "word"):
            text = f"timestamp_granularities: got {quoted(word)}; must be segment or word"
            raise invalid("timestamp_granularities", text)
    if asked and fields.response_format != "verbose_json":
        raise invalid("timestamp_granularities", "timestamp_granularities: only with response_format verbose_json")
    if "word" in asked and not has_word_times:
        text = "timestamp_granularities: word: this model has times of segments only; send segment, or use Whisper"
        raise not_here("timestamp_granularities", text)
    return asked or ("segment",)


def asked_of(exchange: Exchange, fields: SpeechForm, common: SamplingFields) -> Asked:
    """The sampling, greedy by default; a window may take the rest of the context."""
    state = exchange.state
    if common.temperature is None:
        common.temperature = 0.0
    most = fields.max_completion_tokens
    if most is not None:
        in_range("max_completion_tokens", most, 1, 2**31 - 1)
    if not fields.stream and (fields.stream_include_usage or fields.stream_continuous_usage_stats):
        raise invalid("stream_include_usage", "stream_include_usage: only with stream: true")
    with_logprobs = 0 if fields.response_format == "verbose_json" or wants_logprobs(fields) else None
    return resolve(common, with_logprobs, most, state.defaults, state.config, state.vocabulary)


ROUTES = [
    generating_route("/v1/audio/transcriptions", transcribe),
    generating_route("/v1/audio/translations", translate),
]
