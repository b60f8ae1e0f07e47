"""VoxtralRealtimeTranscriber: requests to Voxtral Realtime, which consist only of the sound.

Owner: loop. In: windows of a recording, or of a growing sound (server/speech/live). Out: Said. The model's processor
makes the whole prompt of a window (mm/processors/voxtral_realtime.py), and the answer ends with the window's sound. The
model detects the language itself, and its prompt has no place for a client's text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mm.item import Processed
from mm.processors.voxtral_realtime import VoxtralRealtime
from server.errors import not_here
from server.http.exchange import Exchange
from server.jobs.job import Job
from server.render.prompt import Prompt
from server.speech.transcriber import ChatTranscriber, Task


class VoxtralRealtimeTranscriber(ChatTranscriber):
    """One transcription's requests to Voxtral Realtime."""

    def __init__(self, exchange: Exchange, task: Task) -> None:
        if task.name == "translate":
            text = "Voxtral Realtime transcribes and does not translate; use /v1/audio/transcriptions"
            raise not_here(None, text)
        if task.prompt:
            raise not_here("prompt", "prompt: Voxtral Realtime takes audio and no text; leave the field out")
        super().__init__(exchange, task)

    @property
    def processor(self) -> VoxtralRealtime:
        media = self._state.media
        assert media is not None, "the model takes audio"
        assert isinstance(media.processor, VoxtralRealtime), "its own"
        return media.processor

    def question(self, processed: Processed, token_ids: Sequence[int]) -> Job:
        """A request for the text of a window after its known tokens."""
        job = self._job(processed, self._asked(), self._task.asked)
        ids = np.concatenate([job.request.prompt_token_ids, np.array(token_ids, np.int32)])
        return replace(job, request=replace(job.request, prompt_token_ids=ids))

    async def _rendered(self) -> Prompt:
        return self._asked()

    def _asked(self) -> Prompt:
        return Prompt(np.array([self.processor.placeholder("audio")], np.int32), slots=(0,))
