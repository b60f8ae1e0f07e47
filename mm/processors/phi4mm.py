"""Phi-4-multimodal: a sound of any length; a row for each eight mel frames begun, 12.5 a second.

Pool (`process`) and loop (`fill`, `positions`). Frames lie inside the sound; each is freed of its low tones (samples
less 0.97 of the sample before) and weighed by a Hamming window; of the mel energies the natural logarithm is taken.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np

from engine.request import Modality
from mm.item import MediaItem, MediaOptions, Part, Processed
from mm.processors.base import Filling
from mm.processors.qwen_vl import token_id
from mm.processors.whisper import Whisper
from mm.transform.mel import mel_energies

RATE, WINDOW, HOP, N_FFT = 16000, 400, 160, 512
HIGHEST = 7690.0  # hertz
LOW_TONES = 0.97
LOUDNESS = 32768.0  # samples as 16-bit numbers
SHRINK = 8  # frames of a row
AT_ONCE = 4096  # frames whose samples are copied together


class Phi4MM(Whisper):
    """Processor of Phi4MMForCausalLM."""

    def __init__(self, folder: str | Path, config: dict[str, Any], picture_bytes: int = 0) -> None:
        self.mels = int(config.get("audio_processor", {}).get("config", {}).get("input_size", 80))
        self._id = token_id(config, "audio", 200011)
        self.media_token_ids = frozenset((self._id,))

    def settings(self, modality: Modality, options: MediaOptions) -> bytes:
        return f"phi4mm{self.mels}".encode()

    def cost(self, modality: Modality, item_bytes: int) -> int:
        return item_bytes // 4 // HOP * self.mels * 8 * 3 + item_bytes + AT_ONCE * WINDOW * 8 * 2

    def process(self, item: MediaItem, digest: bytes, options: MediaOptions) -> Processed:
        features = self.heard(item.data)
        return Processed("audio", (Part("audio", digest, -(-len(features) // SHRINK), {"input_features": features}),))

    def heard(self, samples: np.ndarray) -> np.ndarray:
        """Mel frames, float32 [frames, mels]."""
        samples = np.pad(samples, (0, max(0, WINDOW - len(samples))))
        frames = np.lib.stride_tricks.sliding_window_view(samples, WINDOW)[::HOP]
        window, filters = np.hamming(WINDOW), kaldi_filters(self.mels)
        parts = []
        for first in range(0, len(frames), AT_ONCE):
            some = frames[first : first + AT_ONCE].astype(np.float64)
            some = (some - LOW_TONES * np.concatenate([some[:, :1], some[:, :-1]], axis=1)) * LOUDNESS
            parts.append(mel_energies(some, window, filters, N_FFT))
        energies = np.concatenate(parts, axis=1)
        return np.log(np.maximum(energies, 1.0, out=energies)).T.astype(np.float32)

    def fill(self, processed: Processed) -> Filling:
        rows = processed.parts[0].num_tokens
        return Filling(np.full(rows, self._id, np.int32), (((0, rows),),))


@functools.cache
def kaldi_filters(num_mels: int) -> np.ndarray:
    """Triangles that are straight on Kaldi's mel scale, each of height 1; float64 [mels, bins]."""
    bins = _mel(np.arange(N_FFT // 2 + 1) * RATE / N_FFT)
    edges = np.linspace(0.0, _mel(np.array(HIGHEST)), num_mels + 2)
    lower, centre, upper = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    return np.maximum(np.minimum((bins - lower) / (centre - lower), (upper - bins) / (upper - centre)), 0.0)


def _mel(hertz: np.ndarray) -> np.ndarray:
    return 1127.0 * np.log1p(hertz / 700.0)
