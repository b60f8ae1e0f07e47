"""Chooses the frames of a film that a model reads.

Pure functions, any thread. In: the number of frames and their rate. Out: ascending indices at equal distances, as the
video processors of the Qwen family choose them. The cost grows with the number of chosen frames, not of all frames.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mm.transform.image import Scale


@dataclass(frozen=True, slots=True)
class FrameRule:
    """Frames per second to choose, within bounds, or a fixed number; `multiple` frames make one temporal patch."""

    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768
    num_frames: int | None = None
    multiple: int = 2

    def count(self, total: int, fps: float) -> int:
        """How many of `total` frames to choose: a multiple of `multiple`, unless the film has fewer frames or exactly
        the fixed number.
        """
        if self.num_frames == total <= self.max_frames:
            return total
        if self.num_frames is not None:
            wanted: float = round(min(self.num_frames, self.max_frames) / self.multiple) * self.multiple
        else:
            wanted = max(total / fps * self.fps, self.min_frames)
        most = min(self.max_frames, total) // self.multiple * self.multiple
        rounded = int(min(wanted, most)) // self.multiple * self.multiple
        return rounded if rounded > 0 else min(total, self.multiple)


def sample_indices(total: int, count: int) -> np.ndarray:
    """`count` indices of `total` frames at equal distances from the first; int64 [count]."""
    assert 0 < count <= total
    # float32 as in the reference, so that both truncate to the same frame
    return (np.arange(count) * (total / count)).astype(np.float32).astype(np.int64)


@dataclass(frozen=True, slots=True)
class FilmPlan:
    """The frames of a film that a processor reads, and their scale."""

    indices: np.ndarray  # int64 [frames], ascending
    scale: Scale  # size of each chosen frame
    seconds_per_frame: float
    seconds: np.ndarray | None = None  # float64 [frames]: time of each frame, for families that write times as text
    silent: bool = False  # True: the film's sound track is not read
    total: int = 0  # frames of the whole film, for processors that use this number
    fps: float = 0.0  # frames per second of the whole film, likewise

    @property
    def pixels(self) -> int:
        return len(self.indices) * self.scale.pixels
