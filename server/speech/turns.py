"""Turns: finds the beginning and end of speech in arriving sound, by its energy.

Owner: a realtime session, one thread at a time. In: float32 samples, mono, as they arrive. Out: edges, in samples since
the beginning. Loudness is the root mean square of frames of 20 ms. A frame is loud if it is above a level and well
above the quietest frame of the last seconds, so that steady noise is not speech.

    loudness   .__/^^^\\_/^^\\________________
    edges       [ started            ] stopped, `silence` behind the last loud frame
                ^ `padding` before the first loud frame
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from mm.transform.quiet import FRAME_S

LEVEL = 0.02  # fraction of full scale, at threshold 1; at 0.5, sound below -40 dB is not speech
ABOVE_NOISE = 3.0  # a loud frame is so many times louder than the quietest frame
REMEMBERED = 150  # frames; the quietest of them is the noise level
LOUD_FRAMES = 2  # loud frames in a row that begin a turn


@dataclass(frozen=True, slots=True)
class Vad:
    """Settings of turn detection, from the client, within bounds."""

    threshold: float = 0.5
    prefix_padding_ms: int = 300
    silence_duration_ms: int = 500


@dataclass(frozen=True, slots=True)
class Edge:
    """The beginning or end of a turn, in samples since the session's beginning."""

    begins: bool
    at: int


class TurnFinder:
    """Finds the edges of turns in one stream of sound."""

    def __init__(
        self, rate: int, vad: Vad, start: int = 0, speaking: bool = False, recent: Iterable[float] = ()
    ) -> None:
        """`start`: number of earlier samples; `speaking`: a turn is open; `recent`: loudness of earlier frames."""
        self.padding = rate * vad.prefix_padding_ms // 1000
        self.speaking = speaking
        self._frame = int(rate * FRAME_S)
        self._silence = max(1, round(vad.silence_duration_ms / 1000 / FRAME_S))  # in frames
        self._level = LEVEL * vad.threshold
        self._done = start  # samples of all whole frames so far
        self._rest = np.zeros(0, np.float32)
        self.recent: deque[float] = deque(recent, maxlen=REMEMBERED)
        self._loud = self._quiet = 0  # numbers of loud and of quiet frames in a row

    def feed(self, samples: np.ndarray) -> list[Edge]:
        """Add samples; returns the edges found in them, ascending."""
        joined = np.concatenate([self._rest, samples])
        whole = len(joined) // self._frame * self._frame
        self._rest = joined[whole:]
        frames = joined[:whole].reshape(-1, self._frame)
        levels = np.sqrt(np.einsum("ij,ij->i", frames, frames) / self._frame).tolist()
        return [edge for loud in levels if (edge := self._step(loud))]

    def _step(self, loud: float) -> Edge | None:
        self.recent.append(loud)
        self._done += self._frame
        is_loud = loud >= max(self._level, ABOVE_NOISE * min(self.recent)) or (self.speaking and loud >= self._level)
        self._loud, self._quiet = (self._loud + 1, 0) if is_loud else (0, self._quiet + 1)
        if not self.speaking and self._loud >= LOUD_FRAMES:
            self.speaking = True
            return Edge(True, max(0, self._done - self._loud * self._frame - self.padding))
        if self.speaking and self._quiet >= self._silence:
            self.speaking = False
            return Edge(False, self._done)
        return None
