"""Counts of a Matroska or WebM file: elements of its headers, tracks, frames of its first blocks.

Pure functions, pool. In: the file's bytes. Out: the most memory that FFmpeg allocates to open the file. FFmpeg makes an
object of each element of a list: an empty track has two bytes in the file and 700 in memory. FFmpeg searches all tags
for each tag. A track may also require FFmpeg to inflate each block or to prepend bytes to it. This module refuses such
tracks and counts the elements. The walk continues where FFmpeg continues: after damage, at the next element of the
segment; and at each place that a SeekHead names.

    EBML | Segment  SeekHead Info Tracks Tags Cues Chapters Attachments    Cluster  SimpleBlock, laces
"""

from __future__ import annotations

from mm.bounds.bounded import PACKET, allowed, promises, require, too_complex
from mm.errors import unsupported

ELEMENT, TRACK = 128, 2048  # bytes of memory that FFmpeg takes for each, at most
MOST_ELEMENTS = 1 << 16
MOST_TAGS = 8192  # elements; FFmpeg searches from the first tag for each tag
MOST_TRACKS = 64
MOST_PLACES = 256  # places that SeekHeads name
MOST_DEPTH = 10
MOST_STRIPPED = 64  # bytes prepended to each frame of a track

_SEGMENT, _CLUSTER, _TRACKS, _TAGS, _TAG, _SIMPLE_TAG = 0x18538067, 0x1F43B675, 0x1654AE6B, 0x1254C367, 0x7373, 0x67C8
_ATTACHMENTS, _CHAPTERS, _CUES, _SEEK_HEAD, _INFO = 0x1941A469, 0x1043A770, 0x1C53BB6B, 0x114D9B74, 0x1549A966
_LEVEL_1 = (_CLUSTER, _TRACKS, _TAGS, _ATTACHMENTS, _CHAPTERS, _CUES, _SEEK_HEAD, _INFO)
_TRACK_ENTRY, _ENCODING, _COMPRESSION, _ENCRYPTION = 0xAE, 0x6240, 0x5034, 0x5035
_ALGORITHM, _SETTINGS, _STRIPPING, _SEEK_POSITION = 0x4254, 0x4255, 3, 0x53AC
_BLOCK_GROUP, _BLOCK, _SIMPLE_BLOCK = 0xA0, 0xA1, 0xA3
# Elements whose children are elements too. All other elements hold values and are skipped.
_MASTERS = {
    _SEGMENT, *_LEVEL_1, _TRACK_ENTRY, 0x6D80, _ENCODING, _COMPRESSION, _BLOCK_GROUP, 0x1A45DFA3, 0x4DBB, 0xE0, 0xE1,
    0xE2, 0xE3, 0xE4, 0xE9, 0x7670, 0x55B0, 0x55D0, 0x41E4, 0x6624, _TAG, 0x63C0, _SIMPLE_TAG, 0xBB, 0xB7, 0xDB, 0x45B9,
    0xB6, 0x8F, 0x80, 0x6944, 0x6911, 0x61A7, 0x75A1, 0xA6, 0xC8, 0x8E, 0xE8,
}  # fmt: skip


def opening_bytes(data: bytes, probed: int) -> int:
    """The most bytes that FFmpeg takes to open the file if it buffers `probed` bytes of packets. Raises MediaError."""
    walk = Elements(data, probed)
    walk.run()
    return require(walk.count * ELEMENT + walk.tracks * TRACK + walk.frames * PACKET, len(data), "elements")


class Elements:
    """One walk over a file: all of its headers, and its clusters until `probed` bytes of frames are read."""

    def __init__(self, data: bytes, probed: int) -> None:
        self.count = 0
        self.tracks = 0
        self.frames = 0
        self._data = data
        self._probed = probed  # bytes of frames that FFmpeg still has to probe
        self._tags = self._num_places = 0
        self._names_algorithm = False  # whether the current encoding element names a known algorithm
        self._segment = 0  # offset of the segment's content
        self._places: list[int] = []  # offsets in the segment that SeekHeads name
        self._walked: set[int] = set()  # places of the segment's elements
        self._next_of: dict[int, int] = {}  # kind of top-level element -> its next place, from the last search

    def run(self) -> None:
        """Walk the file. Raises MediaError."""
        self._walk(0, len(self._data), 0, 0)
        while self._places:
            at = self._segment + self._places.pop()
            if at not in self._walked:
                self._walk(at, self._end_of(at), 1, _SEGMENT)

    def _number(self, at: int, with_marker: bool) -> tuple[int, int]:
        """(value, width in bytes) of a name or a size; (0, 0) if the bytes hold none."""
        first = self._data[at] if at < len(self._data) else 0
        width = 9 - first.bit_length()
        if width > (4 if with_marker else 8) or at + width > len(self._data):
            return 0, 0
        value = int.from_bytes(self._data[at : at + width], "big")
        return (value if with_marker else value & (1 << 7 * width) - 1), width

    def _head(self, at: int) -> tuple[int, int, int]:
        """(name, size, where the content begins) of an element. Size -1: unknown. Place 0: there is no element."""
        name, width = self._number(at, True)
        size, more = self._number(at + width, False)
        if not width or not more:
            return 0, 0, 0
        return name, -1 if size == (1 << 7 * more) - 1 else size, at + width + more

    def _end_of(self, at: int) -> int:
        _, size, start = self._head(at)
        return len(self._data) if size < 0 or not start else min(len(self._data), start + size)

    def _walk(self, at: int, end: int, depth: int, parent: int) -> None:
        if depth > MOST_DEPTH:
            raise too_complex(f"the file's elements nest deeper than {MOST_DEPTH} levels")
        while at < end:
            name, size, start = self._head(at)
            if not start:
                at = self._next(at + 1, end)
                continue
            if name == _SEGMENT:
                self._segment = start
            elif name in _LEVEL_1:
                self._walked.add(at)
            stop = min(end, start + size)
            if size < 0:
                stop = self._next(start, end) if name == _CLUSTER else end
            self._enter(name, start, stop, depth, parent)
            at = stop

    def _next(self, at: int, end: int) -> int:
        """Return the offset of the next top-level element in the segment."""
        for name in _LEVEL_1:
            if self._next_of.get(name, -1) < at:
                found = self._data.find(name.to_bytes(4, "big"), at)
                self._next_of[name] = len(self._data) if found < 0 else found
        return min(end, *self._next_of.values())

    def _enter(self, name: int, start: int, stop: int, depth: int, parent: int) -> None:
        if name == _CLUSTER or parent in (_CLUSTER, _BLOCK_GROUP):
            if self._probed > 0:
                self._in_cluster(name, start, stop, depth)
            return
        self._note(name, parent)
        if name == _ALGORITHM:
            self._names_algorithm = int.from_bytes(self._data[start:stop], "big") == _STRIPPING
        elif name == _SETTINGS and stop - start > MOST_STRIPPED:
            raise promises("bytes in front of each frame", stop - start, len(self._data))
        elif name == _ENCRYPTION:
            raise unsupported("a track is encrypted; send it decrypted")
        elif name == _SEEK_POSITION:
            self._places.append(int.from_bytes(self._data[start : min(stop, start + 8)], "big"))
            self._num_places += 1
            if self._num_places > MOST_PLACES:
                raise too_complex(f"the file names more than {MOST_PLACES} places of its elements")
        elif name == _ENCODING:
            self._names_algorithm = False
        if name in _MASTERS:
            self._walk(start, stop, depth + 1, name)
        if name == _ENCODING and not self._names_algorithm:  # an encoding without an algorithm is compressed by zlib
            raise unsupported("a track's blocks are compressed; write the file again without compression")

    def _note(self, name: int, parent: int) -> None:
        self.count += 1
        self.tracks += name == _TRACK_ENTRY
        self._tags += parent in (_TAGS, _TAG, _SIMPLE_TAG)
        if self.count > MOST_ELEMENTS:
            raise too_complex(f"the file has more than {MOST_ELEMENTS} elements in its headers")
        if self.tracks > MOST_TRACKS:
            raise too_complex(f"the file has more than {MOST_TRACKS} tracks")
        if self._tags > MOST_TAGS:
            raise too_complex(f"the file has more than {MOST_TAGS} elements of tags")

    def _in_cluster(self, name: int, start: int, stop: int, depth: int) -> None:
        if name in (_CLUSTER, _BLOCK_GROUP):
            self._walk(start, stop, depth + 1, name)
        elif name in (_SIMPLE_BLOCK, _BLOCK):
            at = start + self._number(start, False)[1] + 2  # after track number and time: flags, number of laces
            laced = at + 1 < stop and self._data[at] & 6
            self.frames += self._data[at + 1] + 1 if laced else 1
            self._probed -= max(0, stop - at - 1)
            if self.frames * PACKET > allowed(len(self._data)):
                require(self.frames * PACKET, len(self._data), f"first {self.frames} frames")
