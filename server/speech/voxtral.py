"""VoxtralTranscriber: requests to Voxtral, with its own transcription marker in place of an instruction.

Owner: loop. In: windows of a recording. Out: Said. A task with a client's prompt or a translation goes through chat
instead, since the marker's form has only a language. The form is mistral-common's
(InstructTokenizerV7.encode_transcription).

    <s>[INST][BEGIN_AUDIO][AUDIO]..[/INST]lang:de[TRANSCRIBE]
"""

from __future__ import annotations

import numpy as np

from server.render.prompt import Prompt
from server.speech.transcriber import ChatTranscriber

MARKS = ("<s>", "[INST]", "[BEGIN_AUDIO]", "[AUDIO]", "[/INST]")


class VoxtralTranscriber(ChatTranscriber):
    """One transcription's requests to Voxtral."""

    async def _rendered(self) -> Prompt:
        tokenizer, task = self._state.tokenizer, self._task
        ids = [tokenizer.id_of(mark) for mark in (*MARKS, "[TRANSCRIBE]")]
        if task.name == "translate" or task.prompt or None in ids:
            return await super()._rendered()
        *before, asks = ids
        language = tokenizer.encode(f"lang:{task.language}") if task.language else []
        return Prompt(np.array([*before, *language, asks], np.int32), slots=(MARKS.index("[AUDIO]"),))
