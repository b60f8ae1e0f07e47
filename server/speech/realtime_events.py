"""Events of a realtime session: parses client events, and writes server events in either of two forms.

Pure functions. In OpenAI's form each turn is an item of a conversation. In vLLM's form the client begins with
`session.update {model}` and ends its audio with `input_audio_buffer.commit {final: true}`, and gets one text:

    OpenAI  session.created, speech_started, committed, ...transcription.delta, ...transcription.completed | error {..}
    vLLM    session.created,                            transcription.delta,    transcription.done         | error ".."
"""

from __future__ import annotations

import secrets
import struct
from typing import Any

import msgspec

from mm.sources import decode_base64, parse_base64
from server.errors import ApiError, from_validation, invalid, quoted
from server.schema.realtime import EVENT_TYPES, ONLY_VALUES, Append, Event, TurnDetection, read_event
from server.speech.turns import Vad

MISSING = object()
SAMPLE_BYTES = 2
PLAIN_RATE = 16000  # samples per second in vLLM's form
# our reasons -> vLLM's codes; other client errors are `invalid_event`
PLAIN_CODES = {
    "invalid_json": "invalid_json",
    "unknown_event": "unknown_event",
    "data_url_invalid": "invalid_audio",
    "not_found": "model_not_found",
}


def opened(text: str | bytes) -> tuple[Event, bytes]:
    """A client's event, and its decoded samples."""
    try:
        event = read_event(text)
    except msgspec.ValidationError as error:
        raise _as_event(from_validation(error), text) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise ApiError(400, "invalid_json", "a message must be one JSON object, nested a few levels deep") from None
    return event, decode_base64(parse_base64(event.audio)) if isinstance(event, Append) else b""


def _as_event(error: ApiError, text: str | bytes) -> ApiError:
    """The ApiError for an invalid event: errors about `type` and fields of ONLY_VALUES name the value and the allowed
    ones.
    """
    if error.param == "type":
        got = f"got {_got(text, 'type')}; must be one of {', '.join(EVENT_TYPES)}"
        return ApiError(400, "unknown_event", f"type: {got}", "type")
    known = next((value for field, value in ONLY_VALUES.items() if f".{error.param}".endswith(f".{field}")), None)
    if known is None or error.param is None:
        return error
    return invalid(error.param, f"{error.param}: got {_got(text, error.param)}; must be {known}")


def _got(text: str | bytes, path: str) -> str:
    """The value of an event's field, quoted for an error text."""
    value: Any = msgspec.json.decode(text)
    for name in path.split("."):
        value = value.get(name, MISSING) if isinstance(value, dict) else MISSING
    return "nothing" if value is MISSING else quoted(value) or '""'


def plain(kind: str, fields: dict[str, Any]) -> dict[str, Any] | None:
    """A server event in vLLM's form; None if this form has no such event."""
    if kind == "transcription.done":
        return {"type": kind, **fields}
    if kind.endswith("_transcription.delta"):
        return {"type": "transcription.delta", "delta": fields["delta"]}
    if kind == "error":
        error = fields["error"]
        return {"type": kind, "error": error["message"], "code": PLAIN_CODES.get(error["code"], "invalid_event")}
    if kind.endswith(".failed"):
        return {"type": "error", "error": fields["error"]["message"], "code": "processing_error"}
    return None


def vad_of(given: TurnDetection) -> Vad:
    """Checked settings of turn detection. Raises ApiError for a value out of range."""
    ranges = {"threshold": (0.0, 1.0), "prefix_padding_ms": (0, 5000), "silence_duration_ms": (100, 10000)}
    chosen = {name: getattr(given, name) for name in ranges if getattr(given, name) is not None}
    for name, value in chosen.items():
        low, high = ranges[name]
        if not low <= value <= high:
            path = f"session.audio.input.turn_detection.{name}"
            raise invalid(path, f"{name}: got {value}; allowed is {low} to {high}")
    return Vad(**chosen)


def described(error: ApiError) -> dict[str, Any]:
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"type": kind, "code": error.reason, "message": error.message, "param": error.param}


def wave(pcm: bytes, rate: int) -> bytes:
    """The samples as a WAV file."""
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, rate, rate * SAMPLE_BYTES, SAMPLE_BYTES, 16)
    return b"RIFF" + struct.pack("<I", 36 + len(pcm)) + b"WAVE" + form + struct.pack("<4sI", b"data", len(pcm)) + pcm


def new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"
