"""Directories of TIFF files and of EXIF blocks: how many bytes and numbers their entries point at.

Pure functions, pool. In: bytes that begin with a byte order. Out: nothing, or MediaError. Pillow copies the data that
each entry of the first directory points at, and makes an object of each number in the data; thousands of entries may
point at the same megabyte. An entry that points past the end counts only the bytes that exist, as in Pillow.

    II 42 offset | .. | count  tag type count offset  tag type count offset .. | values
"""

from __future__ import annotations

from mm.bounds.bounded import too_complex

MOST_ENTRIES = 4096
MOST_NUMBERS = 1 << 18  # the most numbers in one entry: strips and tiles have an offset each
MOST_EXIF_NUMBERS = 4096
_SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8, 17: 8, 18: 8}
_BYTES = (1, 2, 6, 7)  # types whose values Pillow leaves as bytes
EXIF = b"Exif\0\0"


def check_exif(block: bytes) -> None:
    """Check a block of EXIF, with or without the prefix `Exif`."""
    check_directory(block.removeprefix(EXIF), MOST_EXIF_NUMBERS)


def check_directory(data: bytes, most_numbers: int = MOST_NUMBERS) -> None:
    """Check the first directory. Raises MediaError if it points at too much; bytes that are no directory pass."""
    order = {b"II": "little", b"MM": "big"}.get(data[:2])
    if order is None:
        return

    def number(at: int, size: int) -> int:
        return int.from_bytes(data[at : at + size], order)  # type: ignore[arg-type]

    wide = number(2, 2) == 43  # BigTIFF
    at, count_size, entry = (number(8, 8), 8, 20) if wide else (number(4, 4), 2, 12)
    count = number(at, count_size)
    held, fits = 0, entry - (12 if wide else 8)
    if count > MOST_ENTRIES:
        raise too_complex(f"a directory of the picture has {count} entries; at most {MOST_ENTRIES} are read")
    for place in range(at + count_size, min(at + count_size + count * entry, len(data)), entry):
        kind, values = number(place + 2, 2), number(place + 4, 8 if wide else 4)
        size = values * _SIZES.get(kind, 0)
        if size <= fits:
            continue
        start = number(place + entry - fits, fits)
        size = min(size, max(0, len(data) - start))
        held += size
        if kind not in _BYTES and size // _SIZES[kind] > most_numbers:
            raise too_complex(f"an entry of the picture's directory has more than {most_numbers} numbers")
    if held > 2 * len(data) + 65536:
        raise too_complex(f"the picture's directory points at {held} bytes, and the file has {len(data)}")
