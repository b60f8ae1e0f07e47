"""Chooses the Hearer class for the served model.

Owner: loop. In: an exchange and its Task. Out: a Hearer, or an ApiError if the model takes no audio.
"""

from __future__ import annotations

from server.errors import ApiError, not_here
from server.http.exchange import Exchange
from server.speech.hearer import ChatHearer, Hearer, Task
from server.speech.qwen3_asr import Qwen3AsrHearer
from server.speech.voxtral import VoxtralHearer
from server.speech.voxtral_realtime import VoxtralRealtimeHearer
from server.speech.whisper import WhisperHearer

# By model_type; other models use ChatHearer.
HEARERS: dict[str, type[ChatHearer]] = {
    "qwen3_asr": Qwen3AsrHearer,
    "voxtral": VoxtralHearer,
    "voxtral_realtime": VoxtralRealtimeHearer,
}


def hearer_of(exchange: Exchange, task: Task) -> Hearer:
    """The hearer of the served model. Raises ApiError if the model takes no audio or the server has no tokenizer."""
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
        return WhisperHearer(exchange, task, state.whisper)
    kind = HEARERS.get(str(state.engine.model.raw.get("model_type")), ChatHearer)
    return kind(exchange, task)
