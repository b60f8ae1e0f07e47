"""Counts of an ISO media file (MP4, MOV, M4A; AVIF's boxes too): samples, edits, fragments, items.

Pure functions, pool. In: the file's bytes. Out: the most memory that FFmpeg allocates to open the file. FFmpeg builds
its own tables, with an entry per sample, per edit and sample, and per fragment and track, from the counts in the file.
This module walks the boxes as FFmpeg does (a box of size 0 reaches to the end, one that is too large is cut at its
parent's end), and compares each count with the bytes of its table.

    moov  trak  mdia  minf  stbl   stsz: samples    moof  traf  trun: samples
                edts  elst: edits                   sidx: fragments
"""

from __future__ import annotations

from mm.bounds.bounded import PACKET, promises, require, too_complex
from mm.bounds.boxes import Boxes, Reader
from mm.bounds.samples import Fragments, Track
from mm.errors import unsupported

# Bytes that FFmpeg takes per entry (measured: 37 per sample, 24 per edited sample, 68 per track of a fragment).
SAMPLE, FRAGMENT, FRAGMENT_TRACK, BOX = 40, 64, 80, 256
MOST_FRAGMENTS = 1 << 16
MOST_ITEMS = 4096  # Pillow searches all items for each item
DUPLICATES = 4  # the samples of a file may have so many times its bytes: tracks may share some

# (bytes in front of the count, least bytes of an entry); counts have 32 bits
_COUNTED = {
    b"stts": (4, 8), b"ctts": (4, 8), b"stss": (4, 4), b"stps": (4, 4), b"stsc": (4, 12), b"stco": (4, 4),
    b"co64": (4, 8), b"elst": (4, 12), b"sbgp": (8, 8), b"dref": (4, 12), b"keys": (4, 8), b"tfra": (12, 11),
    b"ipma": (4, 3),
}  # fmt: skip


def opening_bytes(data: bytes, probed: int) -> int:
    """The most bytes that FFmpeg takes to open the file if it buffers `probed` bytes of packets. Raises MediaError for
    a file that cannot hold as many entries as its tables promise."""
    counts = Counts(data)
    size, tracks, fragments = len(data), counts.tracks, counts.fragments
    samples = sum(track.indexed for track in tracks) + fragments.samples
    sample_bytes = sum(track.sample_bytes for track in tracks) + fragments.sample_bytes
    if samples > size:
        raise promises("samples", samples, size)
    if sample_bytes > DUPLICATES * size + (1 << 20):
        raise promises("bytes of samples", sample_bytes, size)
    entries = sum(track.indexed * max(1, track.edits) for track in tracks) + fragments.samples
    parts = fragments.count * (FRAGMENT + FRAGMENT_TRACK * len(tracks))
    packets = sum(track.within(probed) for track in tracks) + fragments.within(probed)
    require(entries * SAMPLE, size, f"{samples} samples and their edits")
    require(parts, size, f"{fragments.count} fragments of {len(tracks) - 1} tracks")
    require(packets * PACKET, size, f"{packets} smallest samples")
    return require(entries * SAMPLE + parts + packets * PACKET + counts.boxes * BOX, size, "tables")


class Counts:
    """The counts of a whole file. `items`: pictures and their metadata in AVIF."""

    def __init__(self, data: bytes) -> None:
        self.tracks = [Track()]  # the first counts tables outside of all tracks
        self.fragments = Fragments()
        self.items = 0
        self._data = data
        readers: dict[bytes, Reader] = dict.fromkeys(_COUNTED, self._table)
        readers |= {
            b"trak": self._begin_track, b"moof": self._begin_fragment, b"stsz": self._sizes, b"stz2": self._small_sizes,
            b"stsd": self._descriptions, b"hdlr": self._handler, b"trun": self._run, b"tfhd": self._fragment_header,
            b"trex": self._fragment_defaults, b"sidx": self._index, b"iinf": self._items, b"iloc": self._items,
            b"cmov": self._compressed, b"hoov": self._compressed, b"senc": self._encrypted, b"tenc": self._encrypted,
        }  # fmt: skip
        walk = Boxes(data, readers)
        walk.run()
        self.boxes = walk.count

    @property
    def _track(self) -> Track:
        return self.tracks[-1]

    def _number(self, at: int, size: int = 4) -> int:
        return int.from_bytes(self._data[at : at + size], "big")

    def _begin_track(self, kind: bytes, start: int, stop: int) -> None:
        self.tracks.append(Track())

    def _table(self, kind: bytes, start: int, stop: int) -> None:
        """A table with its count before its first entry."""
        before, least = _COUNTED[kind]
        count, first = self._number(start + before), start + before + 4
        if count * least > max(0, stop - first):
            raise promises(f"entries of a table ({kind.decode()})", count, max(0, stop - first))
        track = self._track
        if kind == b"elst":
            track.edits += count
        elif kind == b"stts":
            track.ticks = count == 1 and self._number(first + 4) == 1
        elif kind == b"stsc":
            track.set_runs(self._data, first, count)
        elif kind in (b"stco", b"co64"):
            track.chunks += count
        elif kind == b"tfra":
            self._count_fragments(count)

    # -- samples of tracks

    def _sizes(self, kind: bytes, start: int, stop: int) -> None:
        size, count = self._number(start + 4), self._number(start + 8)
        if size:
            self._track.set_size(size, count)
        else:
            self._track.set_sizes(self._data, start + 12, stop, count, 32)

    def _small_sizes(self, kind: bytes, start: int, stop: int) -> None:
        self._track.set_sizes(self._data, start + 12, stop, self._number(start + 8), self._number(start + 7, 1) or 32)

    def _handler(self, kind: bytes, start: int, stop: int) -> None:
        self._track.sounds = self._track.sounds or self._data[start + 8 : start + 12] == b"soun"

    def _descriptions(self, kind: bytes, start: int, stop: int) -> None:
        self._track.kinds += [self._data[start + 12 : start + 16]] if self._number(start + 4) == 1 else [b"", b""]

    # -- fragments and items

    def _begin_fragment(self, kind: bytes, start: int, stop: int) -> None:
        self._count_fragments(1)

    def _fragment_defaults(self, kind: bytes, start: int, stop: int) -> None:
        self.fragments.default_size = min(self.fragments.default_size or 1 << 32, self._number(start + 16))

    def _fragment_header(self, kind: bytes, start: int, stop: int) -> None:
        self.fragments.begin(self._data, start, stop)

    def _run(self, kind: bytes, start: int, stop: int) -> None:
        self.fragments.add_run(self._data, start, stop)

    def _index(self, kind: bytes, start: int, stop: int) -> None:
        at = start + (22 if self._data[start : start + 1] == b"\0" else 30)
        count, room = self._number(at, 2), max(0, stop - at - 2)
        if count * 12 > room:
            raise promises("fragments", count, room)
        self._count_fragments(count)

    def _count_fragments(self, count: int) -> None:
        self.fragments.count += count
        if self.fragments.count > MOST_FRAGMENTS:
            raise too_complex(f"the file has more than {MOST_FRAGMENTS} fragments")

    def _items(self, kind: bytes, start: int, stop: int) -> None:
        """iinf and iloc: a count of 16 or 32 bits, and entries of at least 12 and 6 bytes."""
        wide = self._number(start, 1) > (1 if kind == b"iloc" else 0)
        count = self._number(start + (6 if kind == b"iloc" else 4), 4 if wide else 2)
        if count * (6 if kind == b"iloc" else 12) > stop - start:
            raise promises("picture items", count, stop - start)
        self.items += count
        if self.items > MOST_ITEMS:
            raise too_complex(f"the file has more than {MOST_ITEMS} picture items")

    # -- refused files

    def _compressed(self, kind: bytes, start: int, stop: int) -> None:
        raise unsupported("the film's header is compressed (cmov); write the file again with a plain one")

    def _encrypted(self, kind: bytes, start: int, stop: int) -> None:
        raise unsupported("the film is encrypted; send it decrypted")
