"""Boxes: a walk over the boxes of an ISO media file, as FFmpeg's parser walks them.

Pure functions, pool. In: bytes, and a reader for each kind of box that is checked. Out: calls of the readers with the
places at which a box's content begins and ends. In a box of unknown form the walk searches for the names of these
boxes, so every table that FFmpeg might read is checked.

    size 32 | kind | content          size 1: 64 bits of size follow      size 0: to the parent's end
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mm.bounds.bounded import too_complex

Reader = Callable[[bytes, int, int], None]  # (kind, where the content begins, where it ends)

MOST_BOXES = 16384  # without fragments and media data; FFmpeg searches all tags when it adds a tag
MOST_IN_ALL = 1 << 19
MOST_DEPTH = 12
SEARCHED = 1 << 16  # the largest box of unknown kind that is searched, in bytes
_CONTAINERS = frozenset(
    (b"moov", b"trak", b"mdia", b"minf", b"stbl", b"edts", b"dinf", b"mvex", b"moof", b"traf", b"udta", b"tref",
     b"sinf", b"schi", b"ilst", b"mfra", b"iprp", b"ipco")
)  # fmt: skip
_SKIPPED = frozenset((b"mdat", b"free", b"skip", b"wide", b"uuid", b"idat"))
_UNCOUNTED = frozenset((b"mdat", b"moof", b"sidx", b"styp", b"emsg", b"prft"))  # files have one per fragment


class Boxes:
    """One walk over the boxes of a file."""

    def __init__(self, data: bytes, readers: Mapping[bytes, Reader]) -> None:
        self.count = 0
        self._data = data
        self._readers = readers
        self._in_all = 0

    def run(self) -> None:
        """Walk all boxes. Raises the errors of readers, and MediaError for too many boxes."""
        self._walk(0, len(self._data), 0, False)

    def _number(self, at: int, size: int = 4) -> int:
        return int.from_bytes(self._data[at : at + size], "big")

    def _walk(self, at: int, end: int, depth: int, in_fragment: bool) -> None:
        if depth > MOST_DEPTH:
            raise too_complex(f"the file's boxes nest deeper than {MOST_DEPTH} levels")
        while at + 8 <= end:
            size, kind, start = self._number(at), self._data[at + 4 : at + 8], at + 8
            if size == 1 and at + 16 <= end:
                size, start = self._number(at + 8, 8), at + 16
            if size == 0:
                size = end - at
            if size < start - at:
                return
            stop = min(at + size, end)
            self._note(counted=not in_fragment and kind not in _UNCOUNTED)
            self._enter(kind, start, stop, depth, in_fragment)
            at = stop

    def _note(self, counted: bool) -> None:
        self._in_all += 1
        self.count += counted
        if self.count > MOST_BOXES or self._in_all > MOST_IN_ALL:
            raise too_complex(f"the file has more than {min(self.count, MOST_BOXES) or MOST_IN_ALL} boxes")

    def _enter(self, kind: bytes, start: int, stop: int, depth: int, in_fragment: bool) -> None:
        reader = self._readers.get(kind)
        if reader is not None:
            reader(kind, start, stop)
        if kind in _CONTAINERS:
            self._walk(start, stop, depth + 1, in_fragment or kind == b"moof")
        elif kind == b"meta":
            self._walk(self._meta_start(start, stop), stop, depth + 1, in_fragment)
        elif kind == b"stsd" or (reader is None and kind not in _SKIPPED and stop - start <= SEARCHED):
            self._search(start, stop)

    def _meta_start(self, start: int, stop: int) -> int:
        """Return the offset of the boxes in a meta box. Its first box is a handler; some files write a version before
        the handler.
        """
        for at in range(start, min(stop - 4, start + SEARCHED), 4):
            if self._data[at : at + 4] == b"hdlr":
                return at - 4
        return stop

    def _search(self, start: int, stop: int) -> None:
        """Call the readers for each place in a box where the name of a checked box appears."""
        for kind, reader in self._readers.items():
            at = self._data.find(kind, start + 4, stop)
            while at >= 0:
                size = self._number(at - 4)
                reader(kind, at + 4, min(stop, at - 4 + size) if size >= 8 else stop)
                at = self._data.find(kind, at + 4, stop)
