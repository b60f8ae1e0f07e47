"""Qwen3-Omni (thinker): pictures, films, sound, and films with their sound, on one time axis.

Pool (`process`) and loop (`fill`, `positions`). The time axis has 13 positions per second. Sound is processed as in
Qwen3-ASR. In a film with its sound, each pair of frames is placed among the rows of sound at the time where the pair
begins. transformers gives frames fractions of positions for some frame rates; here fractions are dropped.

    slot of a film with sound   [audio bos] V V V V  A A .. A   V V V V   A A .. A   [audio eos]
    time axis                               0        0 1 .. 12  13        13 14 ..
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from mm.item import Part
from mm.processors.base import Placed
from mm.processors.qwen3_asr import num_rows
from mm.processors.qwen3_vl import HALF
from mm.processors.qwen_omni import QwenOmni
from mm.transform.image import PatchSettings
from mm.transform.mel import log_mel


class Qwen3Omni(QwenOmni):
    """Processor of Qwen3OmniMoeThinkerForConditionalGeneration and the full Qwen3OmniMoe checkpoint's thinker."""

    patching: ClassVar[PatchSettings] = PatchSettings(patch_size=16, mean=HALF, std=HALF)
    film: ClassVar[dict[str, Any]] = {"size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32}}

    def __init__(self, folder: str | Path, config: dict[str, Any], picture_bytes: int = 0) -> None:
        super().__init__(folder, config, picture_bytes)
        thinker = config.get("thinker_config", config)
        self._chunk = 2 * int(thinker.get("audio_config", {}).get("n_window", 50))

    def _sound(self, samples: np.ndarray, digest: bytes) -> Part:
        # The front end mirrors half a window after the end; a sound without a whole hop would have no frame.
        samples = np.pad(samples, (0, max(0, self.mel.n_fft - len(samples))))
        features = log_mel(samples, replace(self.mel, chunk=len(samples)))
        return Part("audio", digest, num_rows(features.shape[1], self._chunk), {"input_features": features})

    def _turns(self, film: Part, num_sound: int) -> list[tuple[int, int, int]]:
        """The order of rows in a film with sound: (0 film or 1 sound, first row, end row)."""
        frames = int(film.features["grid_thw"][0][0])
        each, interval = film.num_tokens // frames, float(self._interval(film))
        turns, until_sound = [], 0
        for frame in range(frames):
            until = min(num_sound, math.ceil(frame * interval))
            if until > until_sound:
                turns.append((1, until_sound, until))
                until_sound = until
            turns.append((0, frame * each, (frame + 1) * each))
        if until_sound < num_sound:
            turns.append((1, until_sound, num_sound))
        return turns

    def _film_with_sound(self, out: np.ndarray, token_ids: np.ndarray, item: Placed, following: int) -> int:
        """Write the positions of a film with sound, between its bos and its eos."""
        start, end = item.start, item.start + len(item.filling.token_ids)
        out[:, start] = following
        return self._in_turns(out, item, following + 1, end) + 1
