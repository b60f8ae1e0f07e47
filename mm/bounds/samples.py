"""Track and Fragments: how many samples the tables of an ISO media file promise, and how small the first ones are.

Pure functions, pool. In: tables in place. Out: entries of the index that FFmpeg makes, bytes of all samples, and the
packets that FFmpeg holds while it reads so many bytes of them. Sums are taken over views of the file's bytes.
"""

from __future__ import annotations

import numpy as np

from mm.bounds.bounded import promises

# QuickTime sound whose samples are single values: FFmpeg indexes its chunks, where each sample lasts one tick.
_VALUES = frozenset((b"raw ", b"twos", b"sowt", b"NONE", b"in24", b"in32", b"fl32", b"fl64", b"lpcm", b"ulaw", b"alaw"))
VALUES_PER_ENTRY = 512  # of a chunk
_KINDS = {8: "u1", 16: ">u2", 32: ">u4"}
_DEFAULT_SIZE, _BASE, _DESCRIPTION, _DURATION = 0x10, 1, 2, 8  # flags of a fragment's header
_OFFSET, _FIRST_FLAGS, _OF_EACH, _SIZES = 1, 4, 0xF00, 0x200  # flags of a run


def entries(data: bytes, kind: str, count: int, start: int) -> np.ndarray:
    """A view of a table that has been found to fit; an empty one may begin behind the end of the file."""
    return np.frombuffer(data, kind, count, start) if count else np.empty(0, kind)


class Track:
    """What one trak box says."""

    __slots__ = ("_runs", "_size", "_sizes", "chunks", "edits", "kinds", "sample_bytes", "samples", "sounds", "ticks")

    def __init__(self) -> None:
        self.samples = 0
        self.sample_bytes = 0
        self.edits = 0
        self.chunks = 0
        self.kinds: list[bytes] = []  # of its descriptions; more than one where they are several
        self.sounds = False
        self.ticks = False  # each sample lasts one tick
        self._size = 0  # of each sample; 0: `_sizes` says
        self._sizes: np.ndarray | None = None
        self._runs: np.ndarray | None = None  # int64 [runs, 2]: first chunk, samples of each of them

    def set_size(self, size: int, count: int) -> None:
        self.samples, self.sample_bytes, self._size = max(self.samples, count), size * count, size

    def set_sizes(self, data: bytes, start: int, stop: int, count: int, bits: int) -> None:
        """The table must hold the sizes of so many samples."""
        if count * bits > 8 * max(0, stop - start):
            raise promises("sizes of samples", count, max(0, stop - start))
        self.samples = max(self.samples, count)
        if bits in _KINDS:
            self._sizes = entries(data, _KINDS[bits], count, start)
            self.sample_bytes += int(self._sizes.sum(dtype=np.int64))
        else:  # 4 bits
            self.sample_bytes += 15 * count

    def set_runs(self, data: bytes, first: int, count: int) -> None:
        """Samples of each chunk, in runs of chunks."""
        self._runs = entries(data, ">u4", 3 * count, first).reshape(count, 3)[:, :2].astype(np.int64)

    @property
    def indexed(self) -> int:
        """Entries of the index."""
        if not (self.ticks and self.sounds and len(self.kinds) == 1 and self.kinds[0] in _VALUES):
            return self.samples
        if self._runs is None or not len(self._runs):
            return self.chunks
        lengths = np.diff(self._runs[:, 0], append=self.chunks + 1).clip(0)
        return self.chunks + int((lengths * (self._runs[:, 1] // VALUES_PER_ENTRY)).sum())

    def within(self, size: int) -> int:
        """Samples that lie in the first so many bytes of them."""
        if self.indexed < self.samples:  # whole chunks
            return self.indexed
        if self._size:
            return min(self.samples, size // self._size + 1)
        if self._sizes is None:
            return self.samples
        sums = np.cumsum(self._sizes[: size + 1], dtype=np.int64)  # those without bytes are no packets
        return int(np.count_nonzero(self._sizes[: int(np.searchsorted(sums, size)) + 1]))


class Fragments:
    """What all moof boxes say."""

    __slots__ = ("_first", "_size", "count", "default_size", "sample_bytes", "samples")

    def __init__(self) -> None:
        self.count = 0
        self.samples = 0
        self.default_size = 0  # the least that the file's defaults name
        self._size = 0  # of each sample of the current fragment, where its runs do not say
        self.sample_bytes = 0  # of all samples so far
        self._first: list[tuple[int, int]] = []  # (bytes, samples) up to each run, of those that may be read at first

    def begin(self, data: bytes, start: int, stop: int) -> None:
        """A track's part of a fragment begins."""
        flags = int.from_bytes(data[start + 1 : start + 4], "big")
        at = start + 8 + 8 * bool(flags & _BASE) + 4 * bool(flags & _DESCRIPTION) + 4 * bool(flags & _DURATION)
        named = bool(flags & _DEFAULT_SIZE) and at + 4 <= stop
        self._size = int.from_bytes(data[at : at + 4], "big") if named else self.default_size

    def add_run(self, data: bytes, start: int, stop: int) -> None:
        """Samples that follow each other; their table may name no sizes and take no byte."""
        flags, count = (int.from_bytes(data[start + at : start + at + size], "big") for at, size in ((1, 3), (4, 4)))
        fields = (flags & _OF_EACH).bit_count()
        first = start + 8 + 4 * bool(flags & _OFFSET) + 4 * bool(flags & _FIRST_FLAGS)
        if count * fields * 4 > max(0, stop - first):
            raise promises("samples of a fragment", count, max(0, stop - first))
        self.samples += count
        total = self._size * count
        if flags & _SIZES:
            place = bool(flags & 0x100)
            table = entries(data, ">u4", count * fields, first).reshape(count, fields)
            total = int(table[:, int(place)].sum(dtype=np.int64))
        self.sample_bytes += total
        self._first.append((self.sample_bytes, self.samples))

    def within(self, size: int) -> int:
        """Samples of the runs that begin in the first so many bytes of them."""
        return next((samples for total, samples in self._first if total >= size), self.samples)
