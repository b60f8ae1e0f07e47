"""SoundBuffer: what a client of a realtime session has spoken and no turn has taken; HeldBytes: its share of a budget.

Owner: loop, one of each per session. In: PCM as it comes, in any pieces. Out: whole samples of a turn. Places are
counted in samples since the session began, so they stay true when the beginning of the buffer is dropped:

    dropped            | pcm ..................|........ |.  half a sample
    0                  origin                  seen      end
"""

from __future__ import annotations

from server.ops.limits import BodyBudget
from server.speech.realtime_events import SAMPLE_BYTES


class SoundBuffer:
    """Bytes of sound, and up to where the finder of turns has looked through them."""

    def __init__(self) -> None:
        self.pcm = bytearray()
        self.origin = 0  # samples that came before `pcm`
        self._seen = 0  # bytes of `pcm` that the finder has seen

    def __len__(self) -> int:
        return len(self.pcm)

    @property
    def is_untouched(self) -> bool:
        """Whether no sound has come since the session began."""
        return not (self.origin or self.pcm)

    @property
    def end(self) -> int:
        """The sample behind the last whole one."""
        return self.origin + len(self.pcm) // SAMPLE_BYTES

    @property
    def seen(self) -> int:
        """The sample up to which the finder has looked."""
        return self.origin + self._seen // SAMPLE_BYTES

    def fresh(self) -> bytes:
        """The whole samples that the finder has not seen; from here on it has."""
        end = len(self.pcm) // SAMPLE_BYTES * SAMPLE_BYTES
        found, self._seen = bytes(self.pcm[self._seen : end]), end
        return found

    def look_again(self) -> None:
        """The finder begins anew with what is held."""
        self._seen = 0

    def between(self, first: int, last: int) -> bytes:
        """From one sample up to another."""
        return bytes(self.pcm[(first - self.origin) * SAMPLE_BYTES : (last - self.origin) * SAMPLE_BYTES])

    def drop(self, sample: int) -> None:
        """Forgets what lies before a sample; nothing where that is dropped already."""
        size = min(max(0, (sample - self.origin) * SAMPLE_BYTES), len(self.pcm) // SAMPLE_BYTES * SAMPLE_BYTES)
        del self.pcm[:size]
        self.origin += size // SAMPLE_BYTES
        self._seen = max(0, self._seen - size)

    def clear(self) -> None:
        """Forgets everything, half a sample at the end included: what comes next begins with a whole one."""
        self.drop(self.end)
        self.pcm.clear()


class HeldBytes:
    """Bytes that count as a body that is being uploaded."""

    def __init__(self, budget: BodyBudget, client: str) -> None:
        self._budget = budget
        self._client = client
        self.count = 0

    def become(self, count: int) -> None:
        """So many are held now. Raises where the server holds too many."""
        if count > self.count:
            self._budget.require(self._client, count - self.count)
        else:
            self._budget.give(self._client, self.count - count)
        self.count = count
