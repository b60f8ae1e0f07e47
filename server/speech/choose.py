"""Chooses the Transcriber class for the served model.

Owner: loop. In: an exchange and its Task. Out: a Transcriber, or an ApiError if the model takes no audio.
"""

from __future__ import annotations

from server.errors import ApiError, not_here
from server.http.exchange import Exchange
from server.speech.qwen3_asr import Qwen3AsrTranscriber
from server.speech.transcriber import ChatTranscriber, Task, Transcriber
from server.speech.voxtral import VoxtralTranscriber
from server.speech.voxtral_realtime import VoxtralRealtimeTranscriber
from server.speech.whisper import WhisperTranscriber

# By model_type; other models use ChatTranscriber.
TRANSCRIBERS: dict[str, type[ChatTranscriber]] = {
    "qwen3_asr": Qwen3AsrTranscriber,
    "voxtral": VoxtralTranscriber,
    "voxtral_realtime": VoxtralRealtimeTranscriber,
}


def transcriber_of(exchange: Exchange, task: Task) -> Transcriber:
    """The transcriber of the served model. ApiError if the model takes no audio, or the server has no tokenizer."""
    state = exchange.state
    if state.media is None or "audio" not in state.engine.model.modalities:
        raise not_here(None, "the served model takes no audio; serve a model that does, such as Qwen2.5-Omni")
    if state.config.model.skip_tokenizer_init:
        raise ApiError(
            400,
            "no_tokenizer",
            "this server has no tokenizer, so it cannot return text; start it without --skip-tokenizer-init",
        )
    if state.whisper is not None:
        return WhisperTranscriber(exchange, task, state.whisper)
    kind = TRANSCRIBERS.get(str(state.engine.model.raw.get("model_type")), ChatTranscriber)
    return kind(exchange, task)
