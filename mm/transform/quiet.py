"""Cut a long recording into windows that begin and end in quiet places, without the silent parts.

Pool only. In: float32 [samples], mono. Out: windows as (start, end) in samples, ascending and disjoint. Loudness and
pauses are librosa's, in frames of 20 ms. A frame is quiet below a threshold between the recording's quiet and its loud
frames, so a noisy recording has quiet frames too. librosa is imported at the first use, which takes 2 s with the GIL;
an idle server calls `prepare` in the pool (server/start/lifespan). numba compiles parts of librosa.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import numpy as np

FRAME_S = 0.02
MARGIN_S = 0.2  # around loud parts: the quiet beginnings and ends of words
SMOOTH = 5  # a long window is cut at the smallest mean loudness of so many frames
SILENCE = 1e-3  # full scale is 1: sound below -60 dB is silent in every recording
LEVEL = 0.25  # the threshold's place between quiet (0) and loud frames (1), in decibels
LEAST_RANGE = 6.0  # decibels between quiet and loud frames; with a smaller range there are no pauses
_PIECE = 1 << 20  # samples per call of librosa, which squares a copy of them


@dataclass(frozen=True, slots=True)
class Cutting:
    """How a model's recordings are cut, in seconds."""

    longest: float  # most seconds of a window
    pause: float = 0.0  # shortest pause that ends a window; 0: only full windows end, and no silence is cut out


def windows(samples: np.ndarray, rate: int, cutting: Cutting) -> list[tuple[int, int]]:
    """The windows of a recording; empty if all of it is silent."""
    frame = int(rate * FRAME_S)
    loud = loudness(samples, frame)
    if loud.max(initial=0.0) < SILENCE:
        return []
    parts = [(0, len(loud))] if cutting.pause <= 0 else _parts(samples, loud, frame, cutting.pause)
    longest = max(SMOOTH, int(cutting.longest * rate) // frame)
    cut = [piece for part in parts for piece in _pieces(loud, part, longest)]
    return [(start * frame, min(end * frame, len(samples))) for start, end in cut]


def quiet_end(samples: np.ndarray, rate: int, first: int, full: bool) -> int | None:
    """The end of a window in a sound that continues: the quietest place from sample `first` on. None if no place is
    quiet and the window is not full."""
    frame = int(rate * FRAME_S)
    loud, start = loudness(samples[: len(samples) // frame * frame], frame), -(-first // frame)
    if len(loud) - start < SMOOTH:
        return len(samples) if full else None
    smooth = np.convolve(loud[start:], np.full(SMOOTH, 1 / SMOOTH), "valid")
    at = int(smooth.argmin())
    return (start + at + SMOOTH // 2 + 1) * frame if full or smooth[at] < threshold(loud) else None


@cache
def library() -> ModuleType:
    """Import librosa. numba stores compiled code in the package's folder or in the user's cache. A service may have
    neither: its installation may be read-only and its user may have no home. Then a temporary folder is used."""
    import librosa

    try:
        _ = librosa.effects.split, librosa.feature.rms  # librosa imports its modules when these names are read
    except RuntimeError as error:
        if "no locator available" not in str(error):
            raise
        from numba import config

        folder = tempfile.mkdtemp(prefix="omniloop-numba-")
        atexit.register(shutil.rmtree, folder, True)
        config.CACHE_DIR = folder  # type: ignore[attr-defined]
        _ = librosa.effects.split, librosa.feature.rms
    return librosa


def prepare() -> None:
    """Import librosa; the first time on a machine takes longer, because numba compiles."""
    library()


def loudness(samples: np.ndarray, frame: int) -> np.ndarray:
    """Root mean square of each frame, including an incomplete last one; float32 [frames]."""
    feature = library().feature
    found = [np.zeros(0, np.float32)]
    step = max(1, _PIECE // frame) * frame
    for first in range(0, len(samples), step):
        piece = samples[first : first + step]
        padded = np.pad(piece, (0, -len(piece) % frame))
        found.append(feature.rms(y=padded, frame_length=frame, hop_length=frame, center=False)[0])
    return np.concatenate(found)


def threshold(loud: np.ndarray) -> float:
    """The loudness below which frames are quiet."""
    decibels = 20 * np.log10(np.maximum(loud, 1e-5))
    low, high = np.percentile(decibels, (10, 95))
    if high - low < LEAST_RANGE:
        return SILENCE
    return max(SILENCE, float(10 ** ((low + LEVEL * (high - low)) / 20)))


def _parts(samples: np.ndarray, loud: np.ndarray, frame: int, pause: float) -> list[tuple[int, int]]:
    """Runs of frames between pauses, with their margins."""
    effects = library().effects
    level, step = threshold(loud), max(1, _PIECE // frame) * frame
    found = []
    for first in range(0, len(samples), step):
        spans = effects.split(samples[first : first + step], top_db=0, ref=level, frame_length=frame, hop_length=frame)
        found.append(first + spans)
    spans = -(-np.concatenate(found) // frame)  # the last one may end within a frame
    if not len(spans):
        return []
    gaps = np.flatnonzero(spans[1:, 0] - spans[:-1, 1] > pause / FRAME_S)
    starts, ends = spans[np.concatenate([[0], gaps + 1]), 0], spans[np.concatenate([gaps, [-1]]), 1]
    margin = int(MARGIN_S / FRAME_S)
    return [(max(0, int(start) - margin), min(len(loud), int(end) + margin)) for start, end in zip(starts, ends)]


def _pieces(loud: np.ndarray, part: tuple[int, int], longest: int) -> list[tuple[int, int]]:
    """A part, cut until each piece is short enough."""
    start, end = part
    pieces = []
    while end - start > longest:
        first = start + longest // 2
        smooth = np.convolve(loud[first : start + longest], np.ones(SMOOTH), "same")
        at = first + int(smooth.argmin())
        pieces.append((start, at))
        start = at
    return [*pieces, (start, end)]
