"""Qwen3-ASR: a sound of any length, with features of the sound alone; 13 rows a second.

Pool (`process`) and loop (`fill`, `positions`). A second of sound is a chunk of the encoder and makes 13 rows; an
incomplete last second makes a row for each started group of eight frames.
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
from mm.transform.mel import log_mel

_SHORTEST = 8000  # samples; a shorter sound is padded with silence


class Qwen3Asr(Whisper):
    """Processor of Qwen3ASRForConditionalGeneration."""

    def __init__(self, folder: str | Path, config: dict[str, Any], picture_bytes: int = 0) -> None:
        body = config.get("thinker_config", config)
        tower = body.get("audio_config", {})
        super().__init__(folder, {"num_mel_bins": tower.get("num_mel_bins", 128)}, picture_bytes)
        self.chunk = 2 * int(tower.get("n_window", 50))
        self._id = token_id(body, "audio", 151676)
        self.media_token_ids = frozenset((self._id,))

    def settings(self, modality: Modality, options: MediaOptions) -> bytes:
        return f"qwen3_asr{self.chunk}{self.mel!r}".encode()

    def cost(self, modality: Modality, item_bytes: int) -> int:
        return item_bytes // 4 // self.mel.hop * self.mel.num_mels * 8 * 2 + item_bytes

    def process(self, item: MediaItem, digest: bytes, options: MediaOptions) -> Processed:
        samples = np.pad(item.data, (0, max(0, _SHORTEST - len(item.data))))
        features = log_mel(samples, replace(self.mel, chunk=len(samples)))  # mirrored at the end of the samples
        rows = num_rows(features.shape[1], self.chunk)
        return Processed("audio", (Part("audio", digest, rows, {"input_features": features}),))

    def fill(self, processed: Processed) -> Filling:
        rows = processed.parts[0].num_tokens
        return Filling(np.full(rows, self._id, np.int32), (((0, rows),),))


def num_rows(frames: int, chunk: int) -> int:
    """Number of rows of `frames` mel frames: three convolutions halve each chunk's length, each time rounded up."""
    return frames // chunk * -(-chunk // 8) + -(-(frames % chunk) // 8)
