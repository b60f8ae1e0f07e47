"""Client events of /v1/realtime, in the form of OpenAI's transcription sessions or of vLLM's; others are refused."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class Transcription(msgspec.Struct, forbid_unknown_fields=True):
    """The model, the language and the prompt of a transcription."""

    model: str | None = None
    language: str | None = None
    prompt: str | None = None


class TurnDetection(msgspec.Struct, forbid_unknown_fields=True):
    """Detection of turns by energy. The last two fields concern model answers, which a transcription does not have."""

    type: Literal["server_vad"]
    threshold: float | None = None
    prefix_padding_ms: int | None = None
    silence_duration_ms: int | None = None
    create_response: bool | None = None
    interrupt_response: bool | None = None


class Format(msgspec.Struct, forbid_unknown_fields=True):
    """Samples of 16 bits, little-endian, one channel."""

    type: Literal["audio/pcm"]
    rate: int = 24000


class Input(msgspec.Struct, forbid_unknown_fields=True):
    """Absent fields do not change; turn_detection null: the client commits turns."""

    format: Format | msgspec.UnsetType = msgspec.UNSET
    transcription: Transcription | msgspec.UnsetType | None = msgspec.UNSET
    turn_detection: TurnDetection | msgspec.UnsetType | None = msgspec.UNSET
    noise_reduction: None = None


class Audio(msgspec.Struct, forbid_unknown_fields=True):
    input: Input = msgspec.field(default_factory=Input)


class Session(msgspec.Struct, forbid_unknown_fields=True):
    """The newer form of a session."""

    type: Literal["transcription"] = "transcription"
    audio: Audio = msgspec.field(default_factory=Audio)
    include: list[str] | None = None


class OldSession(msgspec.Struct, forbid_unknown_fields=True):
    """The form of transcription_session.update."""

    input_audio_format: Literal["pcm16"] = "pcm16"
    input_audio_transcription: Transcription | msgspec.UnsetType | None = msgspec.UNSET
    turn_detection: TurnDetection | msgspec.UnsetType | None = msgspec.UNSET
    input_audio_noise_reduction: None = None
    include: list[str] | None = None

    @property
    def input(self) -> Input:
        return Input(transcription=self.input_audio_transcription, turn_detection=self.turn_detection)


class Update(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="session.update"):
    """`model` without a session begins vLLM's form."""

    session: Session = msgspec.field(default_factory=Session)
    model: str | None = None
    event_id: str | None = None


class OldUpdate(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="transcription_session.update"):
    session: OldSession
    event_id: str | None = None


class Append(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="input_audio_buffer.append"):
    audio: str  # base64
    event_id: str | None = None


class Commit(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="input_audio_buffer.commit"):
    final: bool | None = None  # sent by vLLM's clients: the audio has ended
    event_id: str | None = None


class Clear(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="input_audio_buffer.clear"):
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
