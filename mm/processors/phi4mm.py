"""Phi-4-multimodal: pictures (mm/processors/phi4mm_pictures.py), and sounds of any length, 12.5 rows a second.

Pool (`process`) and loop (`fill`, `positions`). A sound has one row for each started group of eight mel frames. Frames
lie inside the sound. Each frame gets pre-emphasis (a sample minus 0.97 of the sample before it) and a Hamming window;
the features are the natural logarithm of the mel energies.
"""

from __future__ import annotations

import functools
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np

from engine.base.request import Modality
from mm.item import MediaItem, MediaOptions, Part, Processed
from mm.processors.base import Filling, read_processor_files
from mm.processors.phi4mm_pictures import Pictures
from mm.processors.pictures import AS_DECODED
from mm.processors.qwen_vl import token_id
from mm.processors.whisper import Whisper
from mm.transform.image import Scale
from mm.transform.mel import mel_energies

RATE, WINDOW, HOP, N_FFT = 16000, 400, 160, 512
HIGHEST = 7690.0  # hertz
LOW_TONES = 0.97
LOUDNESS = 32768.0  # scales samples to 16-bit numbers
SHRINK = 8  # mel frames per row
AT_ONCE = 4096  # mel frames whose samples are copied at a time


class Phi4MM(Whisper):
    """Processor of Phi4MMForCausalLM and Phi4MultimodalForCausalLM."""

    modalities: frozenset[Modality] = frozenset(("image", "audio"))
    picture_bytes = AS_DECODED

    def __init__(self, folder: str | Path, config: dict[str, Any], picture_bytes: int = 0) -> None:
        vision, audio = config.get("vision_config") or {}, config.get("audio_config") or {}
        released = (config.get("audio_processor") or {}).get("config", {})
        self.mels = int({**released, **audio}.get("input_size", 80))
        self.pictures = Pictures(read_processor_files(folder).image, vision)
        self._ids: dict[Modality, int] = {
            "image": token_id({**vision, **config}, "image", 200010),
            "audio": token_id({**audio, **config}, "audio", 200011),
        }
        self.media_token_ids = frozenset(self._ids.values())

    def placeholder(self, modality: Modality) -> int:
        return self._ids[modality]

    def settings(self, modality: Modality, options: MediaOptions) -> bytes:
        if modality == "image":
            pictures = self.pictures
            sizes = astuple(pictures.patching), pictures.side, pictures.most, options.max_pixels
            return b"phi4mm" + repr(sizes).encode()
        return f"phi4mm{self.mels}".encode()

    def plan_image(self, height: int, width: int, options: MediaOptions) -> Scale:
        return self.pictures.scale(height, width, options)

    def cost(self, modality: Modality, item_bytes: int) -> int:
        if modality == "image":
            return self.pictures.cost(item_bytes)
        return item_bytes // 4 // HOP * self.mels * 8 * 3 + item_bytes + AT_ONCE * WINDOW * 8 * 2

    def process(self, item: MediaItem, digest: bytes, options: MediaOptions) -> Processed:
        if item.modality == "image":
            made, count = self.pictures.features(item, options)
            return Processed("image", (Part("image", digest, count, made),))
        features = self.log_mel(item.data)
        return Processed("audio", (Part("audio", digest, -(-len(features) // SHRINK), {"input_features": features}),))

    def log_mel(self, samples: np.ndarray) -> np.ndarray:
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
        (part,) = processed.parts
        ids = np.full(part.num_tokens, self._ids[part.modality], np.int32)
        return Filling(ids, (((0, part.num_tokens),),))


@functools.cache
def kaldi_filters(num_mels: int) -> np.ndarray:
    """Triangles that are linear on Kaldi's mel scale, each of height 1; float64 [mels, bins]."""
    bins = _mel(np.arange(N_FFT // 2 + 1) * RATE / N_FFT)
    edges = np.linspace(0.0, _mel(np.array(HIGHEST)), num_mels + 2)
    lower, centre, upper = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    return np.maximum(np.minimum((bins - lower) / (centre - lower), (upper - bins) / (upper - centre)), 0.0)


def _mel(hertz: np.ndarray) -> np.ndarray:
    return 1127.0 * np.log1p(hertz / 700.0)
