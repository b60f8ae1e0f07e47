"""Split: parts of a film decoded side by side, where a machine has the cores (S21).

Pool: the thread that calls `run` and the threads that `run` starts and joins. In: parts of `groups`, and the work of
a decoder, which takes parts until none is left. Out: all chosen frames, or None where the film is damaged: a
decoder that fails stops the others, and the film is decoded once more as a whole.

    decoder 0   K p p p p p p | K p p |           the parts with the most packets come first
    decoder 1   K p p p p | K p p p | K p |
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from mm.decode.alarm import Alarm
from mm.decode.groups import Part
from mm.errors import MediaError, invalid


class Split:
    """Shared by the decoders of a film: each operation is a single step of a deque, a dict or a flag."""

    def __init__(self, parts: list[Part], alarm: Alarm) -> None:
        self._num_frames = parts[-1].last
        self._left = deque(sorted(parts, key=lambda part: -part.num_packets))
        self._alarm = alarm
        self._failed = False
        self._frames: dict[tuple[int, ...], np.ndarray] = {}  # by the shape of a frame, which must be the same in all

    def __iter__(self) -> Iterator[Part]:
        """Parts that no decoder has taken yet."""
        while True:
            try:
                yield self._left.popleft()
            except IndexError:
                return

    def check(self) -> None:
        """Raise when the work should end."""
        self._alarm.check()
        if self._failed:
            raise differs()

    def keep(self, place: int, pixels: np.ndarray) -> None:
        """Copy a frame to its place; whichever decoder comes first makes the array."""
        frames = self._frames.get(pixels.shape)
        if frames is None:
            frames = self._frames.setdefault(pixels.shape, np.empty((self._num_frames, *pixels.shape), dtype=np.uint8))
        frames[place] = pixels

    def run(self, num_decoders: int, work: Callable[[], int]) -> np.ndarray | None:
        """Run `work` in so many threads; each call returns how many frames it has stored."""

        def guarded() -> int:
            try:
                return work()
            except Exception:  # whatever it is, the film as a whole says it too
                self._failed = True
                return 0

        with ThreadPoolExecutor(num_decoders - 1, "omniloop-film") as pool:
            others = [pool.submit(guarded) for _ in range(num_decoders - 1)]
            count = guarded() + sum(other.result() for other in others)
        if self._failed or count != self._num_frames or len(self._frames) != 1:
            return None
        return next(iter(self._frames.values()))


def differs() -> MediaError:
    """For `Split` alone: a frame that came is not the wanted one."""
    return invalid("the video's parts cannot be decoded by themselves")
