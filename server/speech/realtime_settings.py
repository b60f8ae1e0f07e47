"""Settings of a realtime session: what its client has chosen, checked, and how the server describes that.

Owner: none, frozen values. In: a form with the model's name, a rate, how turns are found. Out: the `session` object of
server events.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from server.schema.audio import TranscriptionForm
from server.speech.turns import Vad

LOGPROBS = "item.input_audio_transcription.logprobs"  # of a session's `include`


@dataclass(frozen=True, slots=True)
class Settings:
    """See above."""

    form: TranscriptionForm
    rate: int = 24000
    vad: Vad | None = field(default_factory=Vad)  # None: the client commits

    def described(self, session_id: str) -> dict[str, Any]:
        """The session as clients see it."""
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
