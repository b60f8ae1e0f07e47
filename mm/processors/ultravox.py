"""Ultravox: a sound of any length, cut into windows of Whisper's front end; 6.25 rows a second.

Pool (`process`) and loop (`fill`, `positions`). The floor of the logarithm depends on the whole sound.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from engine.base.request import Modality
from mm.item import MediaItem, MediaOptions, Part, Processed
from mm.processors.base import Filling
from mm.processors.whisper import Whisper
from mm.transform.mel import log_mel


class Ultravox(Whisper):
    """Processor of UltravoxModel."""

    def __init__(self, folder: str | Path, config: dict[str, Any], picture_bytes: int = 0) -> None:
        super().__init__(folder, config.get("audio_config", {}), picture_bytes)
        self.stack = 2 * int(config.get("stack_factor", 8))  # mel frames per row
        self._id = int(config.get("text_config", {}).get("vocab_size", 32000)) - 1
        self.media_token_ids = frozenset((self._id,))

    def settings(self, modality: Modality, options: MediaOptions) -> bytes:
        return f"ultravox{self.stack}{self.mel!r}".encode()

    def cost(self, modality: Modality, item_bytes: int) -> int:
        return item_bytes // 4 // self.mel.hop * self.mel.num_mels * 8 * 3 + item_bytes

    def process(self, item: MediaItem, digest: bytes, options: MediaOptions) -> Processed:
        hop = self.mel.hop
        length = max(2 * hop, -(-len(item.data) // hop) * hop)
        mel = log_mel(np.pad(item.data, (0, length - len(item.data))), replace(self.mel, chunk=length))
        frames, most = mel.shape[1], self.mel.chunk // hop
        count = -(-frames // most)
        padded = np.pad(mel, ((0, 0), (0, count * most - frames if count > 1 else 0)))
        windows = np.ascontiguousarray(padded.reshape(len(mel), count, -1).swapaxes(0, 1))
        rows = (count - 1) * -(-most // self.stack) + -(-(frames - (count - 1) * most) // self.stack)
        made = {"input_features": windows, "num_frames": np.array(frames, np.int64)}
        return Processed("audio", (Part("audio", digest, rows, made),))

    def fill(self, processed: Processed) -> Filling:
        rows = processed.parts[0].num_tokens
        return Filling(np.full(rows, self._id, np.int32), (((0, rows),),))
