"""Split: parts of a film that several threads decode in parallel, if the machine has the cores (S21).

Pool: the thread that calls `run` and the threads that `run` starts and joins. In: parts of `groups`, and a decoder's
function, which takes parts until none is left. Out: all chosen frames, or None if the film is damaged: a decoder that
fails stops the others, and the caller decodes the film once more as a whole.

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
    """State shared by the decoders of a film. Each operation is a single step of a deque, a dict or a flag, so
    no lock.
    """

    def __init__(self, parts: list[Part], alarm: Alarm) -> None:
        self._num_frames = parts[-1].last
        self._left = deque(sorted(parts, key=lambda part: -part.num_packets))
        self._alarm = alarm
        self._failed = False
        self._frames: dict[tuple[int, ...], np.ndarray] = {}  # key: a frame's shape, equal for all frames

    def __iter__(self) -> Iterator[Part]:
        """Parts that no decoder has taken yet."""
        while True:
            try:
                yield self._left.popleft()
            except IndexError:
                return

    def check(self) -> None:
        """Raise if the work should end."""
        self._alarm.check()
        if self._failed:
            raise differs()

    def keep(self, place: int, pixels: np.ndarray) -> None:
        """Copy a frame to its place in the array. The first decoder with a frame allocates the array."""
        frames = self._frames.get(pixels.shape)
        if frames is None:
            frames = self._frames.setdefault(pixels.shape, np.empty((self._num_frames, *pixels.shape), dtype=np.uint8))
        frames[place] = pixels

    def run(self, num_decoders: int, work: Callable[[], int]) -> np.ndarray | None:
        """Run `work` in `num_decoders` threads; each call returns the number of frames that it stored."""

        def guarded() -> int:
            try:
                return work()
            except Exception:  # decoding the film as a whole reports the error again
                self._failed = True
                return 0

        with ThreadPoolExecutor(num_decoders - 1, "omniloop-film") as pool:
            others = [pool.submit(guarded) for _ in range(num_decoders - 1)]
            count = guarded() + sum(other.result() for other in others)
        if self._failed or count != self._num_frames or len(self._frames) != 1:
            return None
        return next(iter(self._frames.values()))


def differs() -> MediaError:
    """Raised in a decoder of `Split` if a decoded frame is not the wanted frame."""
    return invalid("the video's parts cannot be decoded by themselves")
