"""Track and Fragments: how many samples the tables of an ISO media file promise, and how small the first ones are.

Pure functions, pool. In: tables inside the file's bytes. Out: the number of entries in FFmpeg's index, the bytes of all
samples, and the number of packets that FFmpeg buffers while it probes. Sums are taken over views of the file's bytes.
"""

from __future__ import annotations

import numpy as np

from mm.bounds.bounded import promises

# QuickTime sound with one value per sample: FFmpeg indexes its chunks instead of its samples; each sample lasts one
# tick.
_VALUES = frozenset((b"raw ", b"twos", b"sowt", b"NONE", b"in24", b"in32", b"fl32", b"fl64", b"lpcm", b"ulaw", b"alaw"))
VALUES_PER_ENTRY = 512  # FFmpeg makes one entry per so many values of a chunk
_KINDS = {8: "u1", 16: ">u2", 32: ">u4"}
_DEFAULT_SIZE, _BASE, _DESCRIPTION, _DURATION = 0x10, 1, 2, 8  # flags of a fragment's header
_OFFSET, _FIRST_FLAGS, _OF_EACH, _SIZES = 1, 4, 0xF00, 0x200  # flags of a run


def entries(data: bytes, kind: str, count: int, start: int) -> np.ndarray:
    """A view of a table whose bounds have been checked; an empty table may begin past the end of the file."""
    return np.frombuffer(data, kind, count, start) if count else np.empty(0, kind)


class Track:
    """The counts of one trak box."""

    __slots__ = ("_runs", "_size", "_sizes", "chunks", "edits", "kinds", "sample_bytes", "samples", "sounds", "ticks")

    def __init__(self) -> None:
        self.samples = 0
        self.sample_bytes = 0
        self.edits = 0
        self.chunks = 0
        self.kinds: list[bytes] = []  # codecs of the sample descriptions
        self.sounds = False
        self.ticks = False  # each sample lasts one tick
        self._size = 0  # bytes of each sample; 0: `_sizes` has them
        self._sizes: np.ndarray | None = None
        self._runs: np.ndarray | None = None  # int64 [runs, 2]: first chunk, samples per chunk

    def set_size(self, size: int, count: int) -> None:
        self.samples, self.sample_bytes, self._size = max(self.samples, count), size * count, size

    def set_sizes(self, data: bytes, start: int, stop: int, count: int, bits: int) -> None:
        """Set the sizes of samples from a table, which must hold `count` sizes."""
        if count * bits > 8 * max(0, stop - start):
            raise promises("sizes of samples", count, max(0, stop - start))
        self.samples = max(self.samples, count)
        if bits in _KINDS:
            self._sizes = entries(data, _KINDS[bits], count, start)
            self.sample_bytes += int(self._sizes.sum(dtype=np.int64))
        else:  # 4 bits
            self.sample_bytes += 15 * count

    def set_runs(self, data: bytes, first: int, count: int) -> None:
        """Set the number of samples per chunk, for runs of chunks."""
        self._runs = entries(data, ">u4", 3 * count, first).reshape(count, 3)[:, :2].astype(np.int64)

    @property
    def indexed(self) -> int:
        """Number of entries in FFmpeg's index."""
        if not (self.ticks and self.sounds and len(self.kinds) == 1 and self.kinds[0] in _VALUES):
            return self.samples
        if self._runs is None or not len(self._runs):
            return self.chunks
        lengths = np.diff(self._runs[:, 0], append=self.chunks + 1).clip(0)
        return self.chunks + int((lengths * (self._runs[:, 1] // VALUES_PER_ENTRY)).sum())

    def within(self, size: int) -> int:
        """Number of samples in the first `size` bytes of samples."""
        if self.indexed < self.samples:  # the index holds whole chunks
            return self.indexed
        if self._size:
            return min(self.samples, size // self._size + 1)
        if self._sizes is None:
            return self.samples
        sums = np.cumsum(self._sizes[: size + 1], dtype=np.int64)  # samples of 0 bytes are no packets
        return int(np.count_nonzero(self._sizes[: int(np.searchsorted(sums, size)) + 1]))


class Fragments:
    """The counts of all moof boxes."""

    __slots__ = ("_first", "_size", "count", "default_size", "sample_bytes", "samples")

    def __init__(self) -> None:
        self.count = 0
        self.samples = 0
        self.default_size = 0  # the smallest of the file's defaults
        self._size = 0  # bytes of each sample of the current fragment, if its runs give none
        self.sample_bytes = 0  # bytes of all samples so far
        self._first: list[tuple[int, int]] = []  # (bytes, samples) up to each run, for the samples that FFmpeg probes

    def begin(self, data: bytes, start: int, stop: int) -> None:
        """Begin a track's part of a fragment."""
        flags = int.from_bytes(data[start + 1 : start + 4], "big")
        at = start + 8 + 8 * bool(flags & _BASE) + 4 * bool(flags & _DESCRIPTION) + 4 * bool(flags & _DURATION)
        named = bool(flags & _DEFAULT_SIZE) and at + 4 <= stop
        self._size = int.from_bytes(data[at : at + 4], "big") if named else self.default_size

    def add_run(self, data: bytes, start: int, stop: int) -> None:
        """Add a run of consecutive samples. Its table may hold no sizes; then the samples take no bytes of the
        table.
        """
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
        """Number of samples in the runs that begin in the first `size` bytes of samples."""
        return next((samples for total, samples in self._first if total >= size), self.samples)
