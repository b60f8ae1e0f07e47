"""VoxtralRealtimeHearer: how Voxtral Realtime is asked: with the sound alone.

Owner: loop. In: windows of a recording. Out: Said. The model's processor makes the whole prompt of a window (mm/
processors/voxtral_realtime.py), and the answer ends with the window's sound. The model finds out the language itself,
and there is no place in its prompt for a client's words.
"""

from __future__ import annotations

import numpy as np

from server.errors import not_here
from server.http.exchange import Exchange
from server.render.prompt import Prompt
from server.speech.hearer import ChatHearer, Task


class VoxtralRealtimeHearer(ChatHearer):
    """One request's questions to Voxtral Realtime."""

    def __init__(self, exchange: Exchange, task: Task) -> None:
        if task.name == "translate":
            text = "Voxtral Realtime writes down what is said and translates nothing; use /v1/audio/transcriptions"
            raise not_here(None, text)
        if task.prompt:
            raise not_here("prompt", "prompt: Voxtral Realtime hears the sound and reads no text; leave the field out")
        super().__init__(exchange, task)

    async def _rendered(self) -> Prompt:
        media = self._state.media
        processor = None if media is None else media.processor
        assert processor is not None, "the model hears"
        return Prompt(np.array([processor.placeholder("audio")], np.int32), slots=(0,))
