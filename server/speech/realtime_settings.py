"""Settings of a realtime session: the client's checked choices, and their description in server events.

Owner: none, frozen values. In: a form with the model's name, a rate, the turn detection. Out: the `session` object of
server events.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from server.schema.audio import TranscriptionForm
from server.speech.turns import Vad

LOGPROBS = "item.input_audio_transcription.logprobs"  # value in a session's `include`


@dataclass(frozen=True, slots=True)
class Settings:
    """The checked choices of a session's client."""

    form: TranscriptionForm
    rate: int = 24000
    vad: Vad | None = field(default_factory=Vad)  # None: the client commits turns

    def described(self, session_id: str) -> dict[str, Any]:
        """The `session` object for clients."""
        detection = None
        if self.vad is not None:
            detection = {"type": "server_vad", **msgspec.to_builtins(self.vad)}
        form = self.form
        audio = {
            "format": {"type": "audio/pcm", "rate": self.rate},
            "transcription": {"model": form.model, "language": form.language, "prompt": form.prompt},
            "turn_detection": detection,
            "noise_reduction": None,
        }
        include = [LOGPROBS] if form.include else []
        session = {"object": "realtime.session", "type": "transcription", "include": include}
        return {"id": session_id, **session, "audio": {"input": audio}}


def form_with(form: TranscriptionForm, **changes: Any) -> TranscriptionForm:
    return msgspec.structs.replace(form, **changes)
