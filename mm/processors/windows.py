"""Voxtral, GLM-ASR and Audio Flamingo: a sound of any length, cut into windows of Whisper's front end.

Pool (`process`) and loop (`fill`, `positions`). Voxtral pads the last window with silence and also encodes the silence:
375 rows for each started window of thirty seconds. GLM-ASR has 12.5 rows a second, Audio Flamingo 25; both compute the
logarithm's floor per window.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from engine.base.request import Modality
from mm.item import MediaItem, MediaOptions, Part, Processed
from mm.processors.base import Filling
from mm.processors.qwen_vl import token_id
from mm.processors.whisper import Whisper
from mm.transform.mel import log_mel, num_frames


class Voxtral(Whisper):
    """Processor of VoxtralForConditionalGeneration."""

    audio_id = 24

    def __init__(self, folder: str | Path, config: dict[str, Any], picture_bytes: int = 0) -> None:
        tower = config.get("audio_config", {})
        positions = tower.get("max_source_positions", tower.get("max_position_embeddings", 1500))
        own = {"num_mel_bins": tower.get("num_mel_bins", 128), "max_source_positions": positions}
        super().__init__(folder, own, picture_bytes)
        self.stack = int(tower.get("intermediate_size", 5120)) // int(tower.get("hidden_size", 1280))
        self._id = token_id(config, "audio", self.audio_id)
        self.media_token_ids = frozenset((self._id,))

    def settings(self, modality: Modality, options: MediaOptions) -> bytes:
        return f"{type(self).__name__}{self.stack}{self.mel!r}".encode()

    def cost(self, modality: Modality, item_bytes: int) -> int:
        windows = -(-item_bytes // (4 * self.mel.chunk))
        return max(1, windows) * super().cost(modality, item_bytes)

    def process(self, item: MediaItem, digest: bytes, options: MediaOptions) -> Processed:
        features, rows = self.log_mel(item.data)
        row_counts = self.row_counts(rows, len(item.data))
        made = {"input_features": np.ascontiguousarray(features), **row_counts}
        return Processed("audio", (Part("audio", digest, rows, made),))

    def log_mel(self, samples: np.ndarray) -> tuple[np.ndarray, int]:
        """Mel frames [windows, mels, frames], and the number of rows that the encoder makes of them."""
        chunk = self.mel.chunk
        count = max(1, -(-len(samples) // chunk))
        whole = replace(self.mel, chunk=count * chunk)
        mel = log_mel(np.pad(samples, (0, count * chunk - len(samples))), whole)
        windows = mel.reshape(len(mel), count, -1).swapaxes(0, 1)
        return windows, count * (windows.shape[2] // 2 // self.stack)

    def row_counts(self, rows: int, num_samples: int) -> dict[str, np.ndarray]:
        """The feature that marks the end of the sound for the encoder."""
        return {"num_rows": np.array(rows, np.int64)}

    def fill(self, processed: Processed) -> Filling:
        rows = processed.parts[0].num_tokens
        return Filling(np.full(rows, self._id, np.int32), (((0, rows),),))


class GlmAsr(Voxtral):
    """Processor of GlmAsrForConditionalGeneration."""

    audio_id = 59260

    def log_mel(self, samples: np.ndarray) -> tuple[np.ndarray, int]:
        chunk = self.mel.chunk
        frames = max(2 * self.stack - 1, num_frames(len(samples), self.mel))  # fewer make no row
        rows = (frames + 1) // 2 // self.stack
        of_window = chunk // self.mel.hop // 2 // self.stack
        count = -(-rows // of_window)  # a last window without a row is left out
        padded = np.pad(samples, (0, max(0, count * chunk - len(samples))))[: count * chunk]
        return np.stack([log_mel(window, self.mel) for window in padded.reshape(count, chunk)]), rows


class AudioFlamingo(GlmAsr):
    """Processor of AudioFlamingo3ForConditionalGeneration."""

    audio_id = 151669

    def __init__(self, folder: str | Path, config: dict[str, Any], picture_bytes: int = 0) -> None:
        super().__init__(folder, config, picture_bytes)
        self.stack = 2

    def row_counts(self, rows: int, num_samples: int) -> dict[str, np.ndarray]:
        # The frames of a last window that makes no row are left out with this window.
        window = self.mel.chunk // self.mel.hop
        frames = max(2 * self.stack - 1, num_frames(num_samples, self.mel))
        return {"num_frames": np.array(min(frames, -(-rows // (window // 4)) * window), np.int64)}
