"""Pillow's own memory of an RGB picture: four bytes a pixel, of which the last says nothing.

Pool only. In: a Pillow picture. Out: that memory, which is ours: a JPEG that stands upright is decoded straight into it
(`words_to_be`), of others it is copied (`copy_words`), by one pass with the interpreter let go; to take the fourth
bytes away costs three times as much, and a device reads past them for nothing. Pillow tells where its pixels lie by the
Arrow C data interface (https://arrow.apache.org/docs/format/CDataInterface.html): one child, whose second buffer they
are. That memory is left at once: Pillow decodes the next picture into it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL import Image, ImageFile

WORD = 4  # bytes of a pixel
Take = Callable[[int], np.ndarray]  # bytes -> uint8 [bytes], for nobody else


class _ArrowArray(ctypes.Structure):
    """As the interface lays it out."""


_ArrowArray._fields_ = [
    ("length", ctypes.c_int64),
    ("null_count", ctypes.c_int64),
    ("offset", ctypes.c_int64),
    ("n_buffers", ctypes.c_int64),
    ("n_children", ctypes.c_int64),
    ("buffers", ctypes.POINTER(ctypes.c_void_p)),
    ("children", ctypes.POINTER(ctypes.POINTER(_ArrowArray))),
    ("dictionary", ctypes.c_void_p),
    ("release", ctypes.c_void_p),
    ("private_data", ctypes.c_void_p),
]
_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def words_to_be(picture: ImageFile.ImageFile, take: Take) -> np.ndarray | None:
    """uint8 [height, width, 4] in memory from `take`, which `picture.load` will fill; None but of an RGB JPEG.

    The JPEG has been opened only. Pillow is given that memory in place of its own, and will be given all of the file at
    once: between two pieces of it the decoder's thread would wait for the interpreter.
    """
    from PIL import Image

    if (picture.format, picture.mode, len(picture.tile)) != ("JPEG", "RGB", 1):
        return None
    (tile,) = picture.tile
    if not (isinstance(tile.args, tuple) and Image.core.HAVE_LIBJPEGTURBO):  # another Pillow's own memory will do
        return None
    width, height = picture.size
    words = take(width * height * WORD)
    picture.im = Image.core.map_buffer(words, picture.size, "raw", 0, ("RGBX", 0, 1))
    picture._mode = "RGBX"
    picture.tile = [tile._replace(args=("RGBX", *tile.args[1:]))]
    picture.decodermaxblock = 1 << 30
    return words.reshape(height, width, WORD)


def copy_words(image: Image.Image, take: Take) -> np.ndarray | None:
    """uint8 [height, width, 4] in memory from `take`; None where Pillow has it in several pieces (above 16 MiB)."""
    assert image.mode == "RGB", image.mode
    try:
        _, capsule = image.__arrow_c_array__()
    except ValueError:
        return None
    size = image.width * image.height * WORD
    array = _ArrowArray.from_address(_pointer_of(capsule, b"arrow_array"))
    assert (array.length * WORD, array.offset, array.n_children) == (size, 0, 1), "Pillow tells of another picture"
    pixels = array.children[0].contents
    assert (pixels.length, pixels.offset, pixels.n_buffers) == (size, 0, 2), "Pillow tells of other pixels"
    place = pixels.buffers[1]
    assert place is not None, "Pillow tells of no memory"
    words = take(size)
    np.copyto(words, np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(place)))
    return words.reshape(image.height, image.width, WORD)
