"""Gemma 4's front end of sound: the natural logarithm of mel magnitudes, above a floor.

Pool only. In: float32 [samples]. Out: float32 [frames, mels]. Half a frame of silence precedes the first sample. Only
frames whose following sample still belongs to the sound are computed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from mm.errors import too_large
from mm.transform.mel import hann, htk_filters, mel_magnitudes

LONGEST = 480_000  # samples that the published extractor reads


@dataclass(frozen=True, slots=True)
class Front:
    """Values as in preprocessor_config.json of a Gemma4AudioFeatureExtractor."""

    mels: int
    rate: int
    frame: int  # length in samples
    hop: int  # in samples
    n_fft: int
    lowest: float  # hertz
    highest: float
    emphasis: float  # pre-emphasis: each sample minus this share of the sample before it
    htk: bool  # True: a frame's first sample is reduced and its last is used; False: the first sample is dropped
    gain: float
    floor: float
    mean: tuple[float, ...]  # per mel; empty: 0
    std: tuple[float, ...]  # per mel; empty: 1

    @classmethod
    def of(cls, raw: dict[str, Any]) -> Front:
        """Make it from the extractor's part of preprocessor_config.json; ValueError for settings that are not
        implemented.
        """
        if raw.get("dither"):
            raise ValueError(f"dither={raw['dither']}: noise is not added to audio items; set it to 0")
        rate = int(raw.get("sampling_rate") or 16000)
        frame, hop = (
            round(rate * float(raw.get(key) or usual) / 1000)
            for key, usual in (("frame_length_ms", 20.0), ("hop_length_ms", 10.0))
        )
        n_fft = 2 ** math.ceil(math.log2(frame)) * (2 if raw.get("fft_overdrive") else 1)
        return cls(
            int(raw.get("feature_size") or 128),
            rate,
            frame,
            hop,
            n_fft,
            float(raw.get("min_frequency") or 0.0),
            float(raw.get("max_frequency") or 8000.0),
            float(raw.get("preemphasis") or 0.0),
            bool(raw.get("preemphasis_htk_flavor", True)),
            float(raw.get("input_scale_factor") or 1.0),
            float(raw.get("mel_floor") or 1e-3),
            tuple(raw.get("per_bin_mean") or ()),
            tuple(raw.get("per_bin_stddev") or ()),
        )

    def cost(self, sound_bytes: int) -> int:
        """Bytes held at most: 64 MiB for the spectra of a piece, and all frames as float64 twice."""
        return sound_bytes + sound_bytes // 4 // self.hop * self.mels * 8 * 2 + (64 << 20)

    def log_mel(self, samples: np.ndarray) -> np.ndarray:
        """The sound's features, float32 [frames, mels]."""
        if len(samples) > LONGEST:
            raise too_large(
                f"the audio is longer than the {LONGEST / self.rate:g} seconds that this model takes at a "
                "time; send shorter audio, or the recording to /v1/audio/transcriptions, which cuts it"
            )
        ahead = self.frame // 2
        samples = np.pad(samples, (ahead, max(0, self.frame + 1 - ahead - len(samples)))) * np.float32(self.gain)
        frames = np.lib.stride_tricks.sliding_window_view(samples, self.frame + 1)[:: self.hop]
        window = hann(self.frame).astype(np.float32)
        filters = htk_filters(self.mels, self.rate, self.n_fft, self.lowest, self.highest)
        energies = mel_magnitudes(self._emphasised(frames), window, filters, self.n_fft).T
        made = np.log(energies + self.floor)
        if self.mean:
            made -= np.array(self.mean)
        if self.std:
            made /= np.array(self.std)
        return made.astype(np.float32)

    def _emphasised(self, frames: np.ndarray) -> np.ndarray:
        """Apply pre-emphasis: [frames, frame + 1] -> [frames, frame]."""
        if not self.emphasis:
            return frames[:, :-1]
        if self.htk:
            return np.concatenate(
                [frames[:, :1] * (1 - self.emphasis), frames[:, 1:-1] - self.emphasis * frames[:, :-2]], 1
            )
        return frames[:, 1:] - self.emphasis * frames[:, :-1]
