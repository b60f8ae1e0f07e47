"""Tiny random models that hear sounds of any length, and each one's prompts as transformers computes them.

A `Sounds` is one family: the folder of a finished checkpoint (kept as tests/tiny_hearing.py keeps its own), and the
features that the published processor makes of a sound. Windows have two seconds.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests import tiny
from tests.tiny_hearing import kept

AUDIO, MELS, SECONDS = tiny.IDS["<|AUDIO|>"], 32, 2
TEXT = {**tiny._SMALL, "model_type": "llama", "hidden_size": 96, "max_position_embeddings": 1024, "head_dim": 32}
TOWER = {
    "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_mel_bins": MELS,
}  # fmt: skip
QWEN3_TOWER = {  # windows of two seconds, too
    "num_mel_bins": MELS, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 112, "d_model": 64,
    "n_window": 50, "n_window_infer": SECONDS * 100, "downsample_hidden_size": 24, "output_dim": 96,
}  # fmt: skip
Features = tuple[dict[str, Any], int]  # a sound's arguments of the oracle, and its rows


@dataclass(frozen=True, eq=False)
class Sounds:
    """One family."""

    name: str
    make: Callable[[], Any]  # the model with its weights
    features: Callable[[Path, np.ndarray], Features]
    extractor: dict[str, Any]

    @property
    def folder(self) -> Path:
        """Read only."""
        return kept(self.name, self._save, __file__)

    def _save(self, folder: Path) -> None:
        tiny.save(self.make(), folder)
        (folder / "preprocessor_config.json").write_text(json.dumps({**EXTRACTOR, **self.extractor}))

    @functools.cached_property
    def oracle(self) -> Any:
        """The checkpoint as transformers computes it."""
        import torch

        with tiny.quiet():
            options = {"dtype": torch.float32, "attn_implementation": "eager"}
            return type(self.make()).from_pretrained(self.folder, **options).eval()


EXTRACTOR = {
    "feature_extractor_type": "WhisperFeatureExtractor", "feature_size": MELS, "sampling_rate": 16000,
    "hop_length": 160, "n_fft": 400, "chunk_length": SECONDS, "n_samples": SECONDS * 16000,
    "nb_max_frames": SECONDS * 100, "padding_side": "right", "padding_value": 0.0, "return_attention_mask": False,
}  # fmt: skip


def voxtral() -> Any:
    from transformers import VoxtralConfig, VoxtralForConditionalGeneration

    tower = {**TOWER, "max_source_positions": SECONDS * 50}
    text = {**TEXT, "vocab_size": 1024}  # as many as the tekken.json of tests has
    config = VoxtralConfig(audio_config=tower, text_config=text, audio_token_id=AUDIO, tie_word_embeddings=False)
    return tiny._model(VoxtralForConditionalGeneration, config)


def voxtral_features(folder: Path, sound: np.ndarray) -> Features:
    """As VoxtralProcessor._retrieve_input_features."""
    import torch
    from transformers import WhisperFeatureExtractor

    extractor = WhisperFeatureExtractor.from_pretrained(folder)
    made = extractor(
        sound, sampling_rate=16000, padding=True, truncation=False, pad_to_multiple_of=SECONDS * 16000,
        return_tensors="pt",
    )  # fmt: skip
    windows = made.input_features.reshape(MELS, -1, SECONDS * 100).transpose(0, 1)
    return {"input_features": windows.to(torch.float32)}, len(windows) * SECONDS * 50 // 4


def glm_asr() -> Any:
    from transformers import GlmAsrConfig, GlmAsrForConditionalGeneration

    tower = {**TOWER, "max_position_embeddings": SECONDS * 50}
    config = GlmAsrConfig(audio_config=tower, text_config=TEXT, audio_token_id=AUDIO, tie_word_embeddings=False)
    return tiny._model(GlmAsrForConditionalGeneration, config)


def glm_asr_features(folder: Path, sound: np.ndarray) -> Features:
    from transformers import GlmAsrProcessor, WhisperFeatureExtractor

    return processed(GlmAsrProcessor, WhisperFeatureExtractor, folder, sound, audio_token="<|AUDIO|>")


def qwen3_asr() -> Any:
    from transformers import Qwen3ASRConfig, Qwen3ASRForConditionalGeneration

    text = {**TEXT, "model_type": "qwen3", "tie_word_embeddings": True}
    config = Qwen3ASRConfig(audio_config=QWEN3_TOWER, text_config=text, audio_token_id=AUDIO, tie_word_embeddings=True)
    return tiny._model(Qwen3ASRForConditionalGeneration, config)


def qwen3_asr_features(folder: Path, sound: np.ndarray) -> Features:
    from transformers import Qwen3ASRFeatureExtractor, Qwen3ASRProcessor

    return processed(Qwen3ASRProcessor, Qwen3ASRFeatureExtractor, folder, sound)


def processed(kind: Any, extractor: Any, folder: Path, sound: np.ndarray, **options: Any) -> Features:
    """By a processor of transformers."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    made = kind(extractor.from_pretrained(folder), tokenizer, **options)(
        text="<|AUDIO|>", audio=[sound], sampling_rate=16000
    )
    rows = int((made.pop("input_ids") == AUDIO).sum())
    return {key: made[key] for key in ("input_features", "input_features_mask")}, rows


SOUNDS = (
    Sounds("voxtral", voxtral, voxtral_features, {}),
    Sounds("glm-asr", glm_asr, glm_asr_features, {}),
    Sounds("qwen3-asr", qwen3_asr, qwen3_asr_features, {"feature_extractor_type": "Qwen3ASRFeatureExtractor"}),
)
