"""Sound to log-mel features, as Whisper's front end computes them.

Pool only. In: float32 [samples], mono, at the model's rate. Out: float32 [mels, frames], one frame per hop, valid
frames only. The published extractor pads sounds with silence to its window; here only the padding's effect on the last
frames is computed. The work is done in pieces of a few thousand frames, to bound the memory of temporary arrays.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

_PIECE = 4096  # frames per piece: 4096 x 201 complex doubles are 13 MB
_FLOOR = 1e-10  # smallest energy in the logarithm
_RANGE = 8.0  # decades from the loudest value down to the floor


@dataclass(frozen=True, slots=True)
class MelSettings:
    """Values as in preprocessor_config.json of a Whisper feature extractor."""

    num_mels: int = 128
    sample_rate: int = 16000
    n_fft: int = 400
    hop: int = 160
    chunk: int = 480000  # samples of the extractor's window; sounds may be longer
    loudest: float | None = None  # log10 of the energy that is the top of the decades; None: each sound's own loudest


def num_frames(num_samples: int, settings: MelSettings) -> int:
    """Number of frames that start inside the sound."""
    return -(-num_samples // settings.hop)


def log_mel(samples: np.ndarray, settings: MelSettings) -> np.ndarray:
    """log10 mel energies, clamped to eight decades and scaled to about [-1, 1.5]; float32 [mels, frames].

    Frame k is centred on sample k * hop. Frames that start after the end but overlap the sound count for the loudest
    value, and are then dropped.
    """
    hop = settings.hop
    valid = num_frames(len(samples), settings)
    padded, total = _padded(samples, valid, settings)
    frames = np.lib.stride_tricks.sliding_window_view(padded, settings.n_fft)[::hop][:total]  # [total, n_fft]
    window = hann(settings.n_fft)
    filters = mel_filters(settings)
    mels = mel_energies(frames, window, filters, settings.n_fft)
    return scaled_log(mels, settings.loudest)[:, :valid].astype(np.float32)


def mel_energies(frames: np.ndarray, window: np.ndarray, filters: np.ndarray, n_fft: int) -> np.ndarray:
    """frames [total, samples], window [samples], filters [mels, n_fft / 2 + 1] -> float64 [mels, total]."""
    mels = np.empty((len(filters), len(frames)), dtype=np.float64)
    for start in range(0, len(frames), _PIECE):
        spectrum = np.fft.rfft(frames[start : start + _PIECE] * window, n_fft)  # [piece, bins]
        mels[:, start : start + _PIECE] = filters @ (spectrum.real**2 + spectrum.imag**2).T
    return mels


def mel_magnitudes(frames: np.ndarray, window: np.ndarray, filters: np.ndarray, n_fft: int) -> np.ndarray:
    """Like mel_energies, but with magnitudes instead of their squares."""
    mels = np.empty((len(filters), len(frames)), dtype=np.float64)
    for start in range(0, len(frames), _PIECE):
        mels[:, start : start + _PIECE] = (
            filters @ np.abs(np.fft.rfft(frames[start : start + _PIECE] * window, n_fft)).T
        )
    return mels


def scaled_log(mels: np.ndarray, loudest: float | None = None) -> np.ndarray:
    """Energies -> their log10, clamped to eight decades below the loudest value or `loudest`, and scaled; in place."""
    np.log10(np.maximum(mels, _FLOOR, out=mels), out=mels)
    np.maximum(mels, (mels.max() if loudest is None else loudest) - _RANGE, out=mels)
    mels += 4.0
    mels /= 4.0
    return mels


def _padded(samples: np.ndarray, valid: int, settings: MelSettings) -> tuple[np.ndarray, int]:
    """The sound with room for half a frame on both sides, and the number of frames to take from it.

    Before the first sample the sound is mirrored; after the last it is silent, as the published extractor fills its
    window of `chunk` samples with silence. The sound is mirrored again only at the end of this window.
    """
    half, hop, chunk = settings.n_fft // 2, settings.hop, settings.chunk
    head = samples if len(samples) > half else np.pad(samples, (0, half + 1 - len(samples)))
    if chunk - settings.n_fft < len(samples) <= chunk:
        full = np.pad(samples, (0, chunk - len(samples)))
        return np.concatenate([head[half:0:-1], full, full[-2 : -half - 2 : -1]]), chunk // hop
    total = valid + half // hop + 1
    silence = np.zeros(max(0, (total - 1) * hop + half - len(samples)), np.float32)
    return np.concatenate([head[half:0:-1], samples, silence]), total


@functools.cache
def hann(size: int) -> np.ndarray:
    """Periodic Hann window, float64 [size]."""
    return 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(size) / size)


def mel_filters(settings: MelSettings) -> np.ndarray:
    """Triangles on Slaney's mel scale, all of equal area; float64 [mels, bins]."""
    return _filters(settings.num_mels, settings.sample_rate, settings.n_fft)


@functools.cache
def _filters(num_mels: int, sample_rate: int, n_fft: int) -> np.ndarray:
    bins = np.linspace(0, sample_rate / 2, n_fft // 2 + 1)
    edges = _hertz(np.linspace(0.0, _mel(sample_rate / 2), num_mels + 2))
    lower, centre, upper = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    triangles = np.minimum((bins - lower) / (centre - lower), (upper - bins) / (upper - centre))
    return np.maximum(triangles, 0.0) * (2.0 / (upper - lower))


# Slaney's scale: linear to 1000 Hz (15 mels), then 27 steps for each factor of 6.4.
_BREAK_HERTZ, _BREAK_MEL, _STEP = 1000.0, 15.0, np.log(6.4) / 27.0


def _mel(hertz: float) -> float:
    if hertz < _BREAK_HERTZ:
        return hertz * 3.0 / 200.0
    return _BREAK_MEL + float(np.log(hertz / _BREAK_HERTZ)) / float(_STEP)


def _hertz(mels: np.ndarray) -> np.ndarray:
    return np.where(mels < _BREAK_MEL, mels * 200.0 / 3.0, _BREAK_HERTZ * np.exp(_STEP * (mels - _BREAK_MEL)))


@functools.cache
def htk_filters(num_mels: int, sample_rate: int, n_fft: int, low: float = 0.0, high: float = 0.0) -> np.ndarray:
    """Triangles on HTK's mel scale, each of height 1, up to `high` hertz or half the rate; float64 [mels, bins]."""
    bins = np.linspace(0, sample_rate / 2, n_fft // 2 + 1)
    edges = 700.0 * (10.0 ** (np.linspace(htk_mel(low), htk_mel(high or sample_rate / 2), num_mels + 2) / 2595.0) - 1.0)
    lower, centre, upper = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    return np.maximum(np.minimum((bins - lower) / (centre - lower), (upper - bins) / (upper - centre)), 0.0)


def htk_mel(hertz: float) -> float:
    """Hertz to mels on HTK's scale."""
    return float(2595.0 * np.log10(1.0 + hertz / 700.0))
