"""Qwen2-Audio: a sound of at most one window of Whisper's front end; its features cover the whole window.

Pool (`process`) and loop (`fill`, `positions`). A sound has 25 rows a second.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from engine.base.request import Modality
from mm.errors import too_large
from mm.item import MediaItem, MediaOptions, Part, Processed
from mm.processors.base import Filling
from mm.processors.qwen_vl import token_id
from mm.processors.whisper import Whisper
from mm.transform.mel import log_mel, num_frames

_MIN_FRAMES = 3  # mel frames; fewer make no row


class Qwen2Audio(Whisper):
    """Processor of Qwen2AudioForConditionalGeneration."""

    def __init__(self, folder: str | Path, config: dict[str, Any], picture_bytes: int = 0) -> None:
        super().__init__(folder, config.get("audio_config", {}), picture_bytes)
        self.longest_sound = self.seconds
        self._id = token_id(config, "audio", 151646)
        self.media_token_ids = frozenset((self._id,))

    def settings(self, modality: Modality, options: MediaOptions) -> bytes:
        return b"qwen2_audio" + repr(self.mel).encode()

    def process(self, item: MediaItem, digest: bytes, options: MediaOptions) -> Processed:
        samples, window = item.data, self.mel.chunk
        if len(samples) > window:
            raise too_large(
                f"the audio is longer than the {self.seconds:g} seconds that this model takes at a time; send "
                "shorter audio, or the recording to /v1/audio/transcriptions, which cuts it"
            )
        frames = max(_MIN_FRAMES, num_frames(len(samples), self.mel))
        features = {
            "input_features": log_mel(np.pad(samples, (0, window - len(samples))), self.mel),
            "num_frames": np.array(frames, np.int64),
        }
        return Processed("audio", (Part("audio", digest, (frames + 1) // 2 // 2, features),))

    def fill(self, processed: Processed) -> Filling:
        rows = processed.parts[0].num_tokens
        return Filling(np.full(rows, self._id, np.int32), (((0, rows),),))
