"""Granite Speech: a sound of any length; 3 rows for each started group of 15 pairs of mel frames, ten rows a second.

Pool (`process`) and loop (`fill`, `positions`). The sound is mirrored at both ends. The encoder reads its mel frames in
pairs; a last frame without a partner is dropped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from engine.base.request import Modality
from mm.item import MediaItem, MediaOptions, Part, Processed
from mm.processors.base import Filling, read_processor_files
from mm.processors.qwen_vl import token_id
from mm.processors.whisper import Whisper
from mm.transform.mel import hann, htk_filters, mel_energies, scaled_log

PAIR = 2  # mel frames joined into one input
# Settings of the mel frames under the names in the family's files, and defaults for missing settings.
USUAL = {"sample_rate": 16000, "n_fft": 512, "win_length": 400, "hop_length": 160, "n_mels": 80}


class GraniteSpeech(Whisper):
    """Processor of GraniteSpeechForConditionalGeneration."""

    def __init__(self, folder: str | Path, config: dict[str, Any], picture_bytes: int = 0) -> None:
        files = read_processor_files(folder)
        self.frames = {**USUAL, **(files.audio.get("melspec_kwargs") or {})}
        wide = int(config.get("encoder_config", {}).get("input_dim", PAIR * self.frames["n_mels"]))
        if wide != PAIR * self.frames["n_mels"]:
            raise ValueError(
                f"the feature extractor makes {self.frames['n_mels']} mels, of which the encoder reads pairs; its "
                f"input_dim={wide} must be {PAIR * self.frames['n_mels']}"
            )
        self.window = int(config.get("window_size", 15))
        self.per_window = self.window // int(config.get("downsample_rate", 5))
        self._id = token_id(config, "audio", 49155)
        self.media_token_ids = frozenset((self._id,))

    def settings(self, modality: Modality, options: MediaOptions) -> bytes:
        return f"granite_speech{self.window}{self.per_window}{self.frames}".encode()

    def cost(self, modality: Modality, item_bytes: int) -> int:
        return item_bytes // 4 // self.frames["hop_length"] * self.frames["n_mels"] * 8 * 3 + 2 * item_bytes

    def process(self, item: MediaItem, digest: bytes, options: MediaOptions) -> Processed:
        features = self.log_mel(item.data)
        rows = -(-len(features) // self.window) * self.per_window
        return Processed("audio", (Part("audio", digest, rows, {"input_features": features}),))

    def log_mel(self, samples: np.ndarray) -> np.ndarray:
        """Pairs of mel frames, float32 [pairs, 2 * mels]."""
        of, half = self.frames, self.frames["win_length"] // 2
        samples = np.pad(samples, (0, max(0, of["n_fft"] // 2 + 1 - len(samples))))  # shorter sounds cannot be mirrored
        mirrored = np.pad(samples, half, mode="reflect")
        frames = np.lib.stride_tricks.sliding_window_view(mirrored, of["win_length"])[:: of["hop_length"]]
        filters = htk_filters(of["n_mels"], of["sample_rate"], of["n_fft"])
        mel = scaled_log(mel_energies(frames, hann(of["win_length"]), filters, of["n_fft"]))
        pairs = mel.shape[1] // PAIR
        return mel.T[: PAIR * pairs].reshape(pairs, -1).astype(np.float32)

    def fill(self, processed: Processed) -> Filling:
        rows = processed.parts[0].num_tokens
        return Filling(np.full(rows, self._id, np.int32), (((0, rows),),))
