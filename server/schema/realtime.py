"""Client events of /v1/realtime, in the form of OpenAI's transcription sessions or of vLLM's; others are refused.

Clients change one field of the session that the server sent and send all of it back, so unknown fields are passed over
and null means absent, except for turn_detection. A value that would change what is transcribed is refused by its name.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class Transcription(msgspec.Struct):
    """The model, the language and the prompt of a transcription."""

    model: str | None = None
    language: str | None = None
    prompt: str | None = None


class TurnDetection(msgspec.Struct):
    """Detection of turns by energy. Fields about model answers, which a transcription does not have, are not read."""

    type: Literal["server_vad"] | None = None
    threshold: float | None = None
    prefix_padding_ms: int | None = None
    silence_duration_ms: int | None = None


class Format(msgspec.Struct):
    """Samples of 16 bits, little-endian, one channel."""

    type: Literal["audio/pcm"] | None = None
    rate: int | None = None


class Input(msgspec.Struct):
    """Absent fields do not change; turn_detection null: the client commits turns."""

    format: Format | None = None
    transcription: Transcription | None = None
    turn_detection: TurnDetection | msgspec.UnsetType | None = msgspec.UNSET
    noise_reduction: None = None


class Audio(msgspec.Struct):
    input: Input | None = None


class Session(msgspec.Struct):
    """The newer form of a session."""

    type: Literal["transcription"] | None = None
    audio: Audio | None = None
    include: list[str] | None = None

    @property
    def input(self) -> Input:
        return (self.audio.input if self.audio is not None else None) or Input()


class OldSession(msgspec.Struct):
    """The form of transcription_session.update."""

    input_audio_format: Literal["pcm16"] | None = None
    input_audio_transcription: Transcription | None = None
    turn_detection: TurnDetection | msgspec.UnsetType | None = msgspec.UNSET
    input_audio_noise_reduction: None = None
    include: list[str] | None = None

    @property
    def input(self) -> Input:
        return Input(transcription=self.input_audio_transcription, turn_detection=self.turn_detection)


class Update(msgspec.Struct, tag_field="type", tag="session.update"):
    """`model` without a session begins vLLM's form."""

    session: Session | None = None
    model: str | None = None
    event_id: str | None = None


class OldUpdate(msgspec.Struct, tag_field="type", tag="transcription_session.update"):
    session: OldSession | None = None
    event_id: str | None = None


class Append(msgspec.Struct, tag_field="type", tag="input_audio_buffer.append"):
    audio: str  # base64
    event_id: str | None = None


class Commit(msgspec.Struct, tag_field="type", tag="input_audio_buffer.commit"):
    final: bool | None = None  # sent by vLLM's clients: the audio has ended
    event_id: str | None = None


class Clear(msgspec.Struct, tag_field="type", tag="input_audio_buffer.clear"):
    event_id: str | None = None


Event = Update | OldUpdate | Append | Commit | Clear
EVENT_TYPES = (
    "session.update", "transcription_session.update", "input_audio_buffer.append", "input_audio_buffer.commit",
    "input_audio_buffer.clear",
)  # fmt: skip
# Keyed by the end of a field's path.
ONLY_VALUES = {
    "session.type": "transcription",
    "format.type": "audio/pcm: 16 bits, little end first, one channel, at a `rate` of 8,000 to 48,000",
    "turn_detection.type": "server_vad, or turn_detection null if the client commits",
    "input_audio_format": "pcm16",
    "noise_reduction": "null: audio is processed as it is received",
    "input_audio_noise_reduction": "null: audio is processed as it is received",
}


def read_event(text: str | bytes) -> Event:
    """Parse a client event. Raises msgspec.ValidationError naming the field, or msgspec.DecodeError if it is
    not JSON.
    """
    event: Any = msgspec.json.decode(text, type=Event)
    return event
