"""FunAudioChat: sounds of up to five minutes; one row for each started fifth of a second.

Pool (`process`) and loop (`fill`, `positions`). Only the mel frames of the sound itself are computed. They are scaled
as in a window of five minutes that is filled with silence after the sound.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from engine.base.request import Modality
from mm.errors import too_large
from mm.item import MediaItem, MediaOptions, Part, Processed
from mm.processors.base import Filling, read_processor_files
from mm.processors.whisper import Whisper
from mm.transform.mel import MelSettings, log_mel

CODES_PER_S = 25  # codes per second of the speech tokenizer; they give the number of rows


class FunAudio(Whisper):
    """Processor of FunAudioChatForConditionalGeneration."""

    def __init__(self, folder: str | Path, config: dict[str, Any], picture_bytes: int = 0) -> None:
        tower, files = config.get("audio_config", {}), read_processor_files(folder)
        super().__init__(folder, {"num_mel_bins": tower.get("num_mel_bins", 128)}, picture_bytes)
        old = self.mel
        longest = int(files.audio.get("n_samples") or int(files.audio.get("chunk_length", 300)) * old.sample_rate)
        self.mel = MelSettings(old.num_mels, old.sample_rate, old.n_fft, old.hop, longest)
        self.seconds = self.longest_sound = longest / old.sample_rate
        self.group = int(tower.get("group_size", 5))
        if config.get("audio_token_index") is None:
            raise ValueError("config.json: audio_token_index is missing, the token that stands for audio")
        self._id = int(config["audio_token_index"])
        self.media_token_ids = frozenset((self._id,))

    def settings(self, modality: Modality, options: MediaOptions) -> bytes:
        return f"fun_audio{self.group}{self.mel!r}".encode()

    def cost(self, modality: Modality, item_bytes: int) -> int:
        return item_bytes // 4 // self.mel.hop * self.mel.num_mels * 8 * 3 + item_bytes

    def process(self, item: MediaItem, digest: bytes, options: MediaOptions) -> Processed:
        if len(item.data) > self.mel.chunk:
            raise too_large(
                f"the audio is longer than the {self.seconds:g} seconds that this model takes at a time; send "
                "shorter audio, or the recording to /v1/audio/transcriptions, which cuts it"
            )
        samples = np.pad(item.data, (0, max(0, self.mel.n_fft - len(item.data))))
        codes = max(1, int(len(samples) / self.mel.sample_rate * CODES_PER_S))
        rows = -(-codes // self.group)
        features = {"input_features": log_mel(samples, self.mel), "num_rows": np.array(rows, np.int64)}
        return Processed("audio", (Part("audio", digest, rows, features),))

    def fill(self, processed: Processed) -> Filling:
        rows = processed.parts[0].num_tokens
        return Filling(np.full(rows, self._id, np.int32), (((0, rows),),))
