"""SoundBuffer: samples of a realtime session that no turn has taken yet; HeldBytes: its share of a budget.

Owner: loop, one of each per session. In: PCM in pieces of any size. Out: whole samples of a turn. Positions are counted
in samples since the session began, so they stay valid when the beginning of the buffer is dropped:

    dropped            | pcm ..................|........ |.  half a sample
    0                  origin                  seen      end
"""

from __future__ import annotations

from server.ops.limits import BodyBudget
from server.speech.realtime_events import SAMPLE_BYTES


class SoundBuffer:
    """Buffered samples, and the position up to which the TurnFinder has searched them."""

    def __init__(self) -> None:
        self.pcm = bytearray()
        self.origin = 0  # number of samples before `pcm`
        self._seen = 0  # bytes of `pcm` that the finder has searched

    def __len__(self) -> int:
        return len(self.pcm)

    @property
    def is_untouched(self) -> bool:
        """Whether no samples have arrived since the session began."""
        return not (self.origin or self.pcm)

    @property
    def end(self) -> int:
        """The position after the last whole sample."""
        return self.origin + len(self.pcm) // SAMPLE_BYTES

    @property
    def seen(self) -> int:
        """The position up to which the finder has searched."""
        return self.origin + self._seen // SAMPLE_BYTES

    def fresh(self) -> bytes:
        """The whole samples that the finder has not searched; marks them as searched."""
        end = len(self.pcm) // SAMPLE_BYTES * SAMPLE_BYTES
        found, self._seen = bytes(self.pcm[self._seen : end]), end
        return found

    def look_again(self) -> None:
        """Mark all buffered samples as not searched."""
        self._seen = 0

    def between(self, first: int, last: int) -> bytes:
        """The samples from `first` up to `last`."""
        return bytes(self.pcm[(first - self.origin) * SAMPLE_BYTES : (last - self.origin) * SAMPLE_BYTES])

    def drop(self, sample: int) -> None:
        """Drop the samples before `sample`; no effect if they are dropped already."""
        size = min(max(0, (sample - self.origin) * SAMPLE_BYTES), len(self.pcm) // SAMPLE_BYTES * SAMPLE_BYTES)
        del self.pcm[:size]
        self.origin += size // SAMPLE_BYTES
        self._seen = max(0, self._seen - size)

    def clear(self) -> None:
        """Drop everything, including half a sample at the end; the next bytes begin a new sample."""
        self.drop(self.end)
        self.pcm.clear()


class HeldBytes:
    """Bytes that count as a body that is being uploaded."""

    def __init__(self, budget: BodyBudget, client: str) -> None:
        self._budget = budget
        self._client = client
        self.count = 0

    def become(self, count: int) -> None:
        """Set the number of held bytes. Raises ApiError if the server holds too many."""
        if count > self.count:
            self._budget.require(self._client, count - self.count)
        else:
            self._budget.give(self._client, self.count - count)
        self.count = count
