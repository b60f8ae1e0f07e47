"""Mapped arrays: decoded media in the memory that a helper has written.

Pool. In: a sealed file of a helper, its type and shape. Out: an array whose memory is unmapped with it. Python's `mmap`
holds a descriptor open as long as the memory (before 3.13 always), so a cache of pictures would use up the process's
descriptors. A small array is copied, since the number of mappings is limited as well (vm.max_map_count, 65,530).
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
from typing import Any

import numpy as np

COPIED_BYTES = 1 << 20
_FAILED = ctypes.c_void_p(-1).value


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    word, number = ctypes.c_size_t, ctypes.c_int
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, word, number, number, number, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, word]
    return libc


class _Mapping:
    """Memory that numpy reads through the array interface; it is unmapped with its last array."""

    def __init__(self, file: int, dtype: np.dtype[Any], shape: tuple[int, ...], size: int) -> None:
        # Private and writable, like arrays that this process decodes; a write copies the page first.
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        address = _libc().mmap(None, size, protection, mmap.MAP_PRIVATE, file, 0)
        if address in (None, _FAILED):
            raise MemoryError(f"{size} bytes cannot be mapped (errno {ctypes.get_errno()})")
        self._unmap = functools.partial(_libc().munmap, address, size)
        self.__array_interface__ = {"version": 3, "typestr": dtype.str, "shape": shape, "data": (address, False)}

    def __del__(self) -> None:
        if unmap := self.__dict__.get("_unmap"):
            unmap()


def array_in(file: int, dtype: np.dtype[Any], shape: tuple[int, ...], size: int) -> np.ndarray:
    """The array in a file of `size` bytes. The file may be closed afterwards."""
    if size >= COPIED_BYTES:
        return np.asarray(_Mapping(file, dtype, shape, size))
    array = np.empty(shape, dtype)
    os.preadv(file, [array.reshape(-1).view(np.uint8).data], 0)
    return array
