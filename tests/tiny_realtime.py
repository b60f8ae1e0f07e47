"""A tiny random Voxtral Realtime: its tower attends to the last 11 rows, its decoder to the last 24 tokens.

`folder()` gives a finished checkpoint, cached like those of tests/tiny_hearing.py; its tekken.json has the published
form, so that transformers' processor reads it.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np

from tests import tiny
from tests.tiny_hearing import cached_checkpoint

MELS, DELAY, BEFORE = 32, 2, 16  # DELAY: tokens of delay; BEFORE: tokens of silence before the sound
VOCAB = 1024  # more than the tekken.json of tests has
STREAMING = {
    "num_mel_bins": MELS, "transcription_format": "streaming", "transcription_delay_ms": 80.0 * DELAY,
    "streaming_look_ahead_ms": 2.5, "streaming_look_back_ms": 52.5, "streaming_n_left_pad_tokens": BEFORE,
}  # fmt: skip


def make(**more: Any) -> Any:
    """The model with its weights."""
    from transformers import VoxtralRealtimeConfig, VoxtralRealtimeForConditionalGeneration

    audio = {
        "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 24,
        "num_mel_bins": MELS, "sliding_window": 11, "rope_parameters": {"rope_type": "default", "rope_theta": 5e4},
    }  # fmt: skip
    text = {
        **tiny._SMALL, "vocab_size": VOCAB, "hidden_size": 96, "head_dim": 32, "sliding_window": 24, "bos_token_id": 1,
        "eos_token_id": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }  # fmt: skip
    config = VoxtralRealtimeConfig(audio_config=audio, text_config=text, default_num_delay_tokens=DELAY, **more)
    return tiny._model(VoxtralRealtimeForConditionalGeneration, config)


def _save(folder: Path) -> None:
    from tests.server.render import tekken

    with tiny.quiet():
        make().save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
    extractor = {"feature_extractor_type": "VoxtralRealtimeFeatureExtractor", "feature_size": MELS}
    (folder / "preprocessor_config.json").write_text(json.dumps(extractor))
    tekken.write_tekken(folder, "v13", image=False, streaming=STREAMING)


def folder() -> Path:
    """The checkpoint's folder; read only."""
    return cached_checkpoint("voxtral-realtime", _save, __file__)


@functools.cache
def oracle() -> Any:
    """The checkpoint loaded by transformers."""
    import torch
    from transformers import VoxtralRealtimeForConditionalGeneration

    with tiny.quiet():
        options = {"dtype": torch.float32, "attn_implementation": "eager"}
        return VoxtralRealtimeForConditionalGeneration.from_pretrained(folder(), **options).eval()


@functools.cache
def published() -> tuple[Any, Any]:
    """The feature extractor of transformers and the tokenizer of mistral-common."""
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
    from transformers import VoxtralRealtimeFeatureExtractor

    extractor = VoxtralRealtimeFeatureExtractor.from_pretrained(folder())
    return extractor, MistralTokenizer.from_file(str(folder() / "tekken.json")).instruct_tokenizer


def inputs(sound: np.ndarray) -> dict[str, Any]:
    """The model's inputs as VoxtralRealtimeProcessor makes them, without its audio file, which would need soundfile."""
    import torch

    extractor, tokenizer = published()
    encoder = tokenizer.audio_encoder
    made = extractor([encoder.pad(sound, 16000)], sampling_rate=16000, center=True, return_tensors="pt")
    return {
        "input_ids": torch.tensor([tokenizer.start() + encoder.encode_streaming_tokens()]),
        "input_features": made["input_features"],
        "num_delay_tokens": encoder.audio_config.get_num_delay_tokens(),
    }
