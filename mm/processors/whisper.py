"""Whisper: a prompt begins with a window of sound, padded with silence to the window's length.

Pool (`process`) and loop (`fill`, `positions`). No token of the vocabulary stands for sound. The window's place in the
prompt is filled with the end-of-text token, which prompts contain nowhere else, and whose embedding is not read.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from engine.base.request import Modality
from mm.decode.frames import FilmPlan
from mm.item import MediaItem, MediaOptions, Part, Processed
from mm.limits import MediaLimits
from mm.processors.base import Filling, Placed, read_processor_files
from mm.transform.image import Scale
from mm.transform.mel import MelSettings, log_mel

ALIGNED = 32  # rows are padded to multiples of this, as in engine/encoders/whisper.py


class Whisper:
    """Processor of WhisperForConditionalGeneration."""

    modalities: frozenset[Modality] = frozenset(("audio",))
    picture_bytes = 0
    longest_sound: float = math.inf
    writes_texts: ClassVar[bool] = False

    def __init__(self, folder: str | Path, config: dict[str, Any], picture_bytes: int = 0) -> None:
        files = read_processor_files(folder)
        rate, positions = int(files.audio.get("sampling_rate", 16000)), int(config.get("max_source_positions", 1500))
        mels = int(config.get("num_mel_bins", 80))
        hop = int(files.audio.get("hop_length", 160))
        self.mel = MelSettings(mels, rate, int(files.audio.get("n_fft", 400)), hop, 2 * positions * hop)
        if int(files.audio.get("feature_size", mels)) != mels:
            raise ValueError(
                f"the feature extractor makes {files.audio['feature_size']} mels; the encoder reads {mels}"
            )
        self.seconds = self.mel.chunk / rate  # the length of one window
        self._rows = -(-positions // ALIGNED) * ALIGNED
        eos = config.get("eos_token_id", 50257)
        self._id = int(eos[0] if isinstance(eos, list) else eos)
        self.media_token_ids = frozenset((self._id,))

    def placeholder(self, modality: Modality) -> int:
        return self._id

    def settings(self, modality: Modality, options: MediaOptions) -> bytes:
        return b"whisper" + repr(self.mel).encode()

    def cost(self, modality: Modality, item_bytes: int) -> int:
        return self.mel.chunk // self.mel.hop * self.mel.num_mels * 8 * 2 + self.mel.chunk * 4

    def plan_image(self, height: int, width: int, options: MediaOptions) -> Scale:
        raise AssertionError("the model sees nothing")

    def plan_film(
        self, num_frames: int, fps: float, height: int, width: int, options: MediaOptions, limits: MediaLimits
    ) -> FilmPlan:
        raise AssertionError("the model sees nothing")

    def process(self, item: MediaItem, digest: bytes, options: MediaOptions) -> Processed:
        samples = item.data[: self.mel.chunk]
        features = log_mel(np.pad(samples, (0, self.mel.chunk - len(samples))), self.mel)
        return Processed("audio", (Part("audio", digest, self._rows, {"input_features": features}),))

    def fill(self, processed: Processed) -> Filling:
        return Filling(np.full(self._rows, self._id, np.int32), (((0, self._rows),),))

    def positions(self, length: int, token_ids: np.ndarray, placed: list[Placed]) -> tuple[np.ndarray | None, int]:
        return None, 0
