"""Pictures: encoded bytes to uint8 [height, width, 3], what a person would see (SECURITY S18, S19).

Pool only. In: bytes whose format `magic` has named. Out: one normal form: EXIF orientation applied, transparency
flattened on white, CMYK and grey turned to RGB, 16 bits scaled to 8, the first frame of an animation. The header is
read first; size and mode are checked and memory is reserved by the caller before any pixel is decoded. Where the pixels
go is the caller's to say too (`take`), and whether a fourth byte may stand behind each of them (`decode_whole`).
"""

from __future__ import annotations

import functools
import io
import types
import warnings
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, cast

import numpy as np

from mm.decode.alarm import too_complex
from mm.decode.spare import new_pixels
from mm.decode.words import Take, copy_words, words_to_be
from mm.errors import MediaError, invalid, too_large, unsupported
from mm.limits import MediaLimits
from mm.transform.image import Scale

if TYPE_CHECKING:
    from PIL import Image

_OPENERS = {"jpeg": "JPEG", "png": "PNG", "webp": "WEBP", "gif": "GIF", "bmp": "BMP"}
_MODES = {
    "1",
    "L",
    "LA",
    "La",
    "P",
    "PA",
    "RGB",
    "RGBA",
    "RGBa",
    "RGBX",
    "CMYK",
    "YCbCr",
    "I",
    "I;16",
    "I;16B",
    "I;16L",
}
_ORIENTATION = 0x0112
# Each scan of a progressive JPEG passes over the whole picture, however few its bytes; writers use about ten.
_MARK, _START_OF_SCAN, _MAX_SCANS = 0xFF, 0xDA, 100


@functools.cache
def image_library() -> types.ModuleType:
    """Import Pillow once, and make its guard against decompression bombs an error rather than a note.

    The parsers of our five formats are named here, and the writer of `_copy`: asked for one it has not loaded, Pillow
    would load all forty.
    """
    from PIL import (  # noqa: F401
        BmpImagePlugin,
        GifImagePlugin,
        Image,
        ImageFile,
        JpegImagePlugin,
        PngImagePlugin,
        PpmImagePlugin,
        WebPImagePlugin,
    )

    warnings.simplefilter("error", Image.DecompressionBombWarning)
    warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")  # notes on damaged metadata, which we drop
    assert Image.MAX_IMAGE_PIXELS is not None
    assert not ImageFile.LOAD_TRUNCATED_IMAGES
    return Image


Planner = Callable[[int, int], Scale]  # (height, width)


class ImageFile:
    """A picture whose header has been read and checked."""

    def __init__(self, data: bytes, word: str, limits: MediaLimits) -> None:
        if word not in limits.image_formats:
            raise unsupported(
                f"this server reads pictures as {', '.join(limits.image_formats)}; the data is something else"
            )
        if word == "jpeg" and _num_scans(data) > _MAX_SCANS:
            raise too_complex()
        image_module = image_library()
        try:
            self._image = image_module.open(io.BytesIO(data), formats=[_OPENERS[word]])
        except (image_module.DecompressionBombError, image_module.DecompressionBombWarning):
            raise _too_many_pixels(limits) from None
        except Exception:
            raise invalid("the picture is damaged: its header cannot be read") from None
        self._word = word
        self._words: np.ndarray | None = None
        self.width, self.height = self._image.size
        _check_size(self.width, self.height, limits)
        if self._image.mode not in _MODES:
            raise unsupported("the picture's pixel format is not supported; send 8 or 16 bits of grey, RGB or CMYK")

    @property
    def cost(self) -> int:
        """Bytes held at most while decoding: Pillow's four per pixel, a copy per step of the way to RGB."""
        return self.width * self.height * 16

    def decode(self, planner: Planner, take: Take = new_pixels) -> np.ndarray:
        """Decode into the normal form, scaled as `planner` says of the upright size; uint8 [height, width, 3]."""
        return self._decoded(lambda image: _copy(planner(image.height, image.width).image(image), take))

    def whole_to_be(self, take: Take = new_pixels) -> np.ndarray | None:
        """What `decode_whole` will return, not filled yet; None where only decoding tells."""
        if self._words is None and self._word == "jpeg" and _orientation(self._image) == 1:
            self._words = words_to_be(self._image, take)
        return self._words

    def decode_whole(self, take: Take = new_pixels) -> np.ndarray:
        """As large as it is; uint8 [height, width, 4] with the byte that Pillow has there.

        Three bytes a pixel where Pillow has them in several pieces, which are above 16 MiB and no upright JPEG's.
        """

        def copied(image: Image.Image) -> np.ndarray:
            words = copy_words(image, take)
            return _copy(image, take) if words is None else words

        return self._decoded(copied, self.whole_to_be(take))

    def _decoded(self, copied: Callable[[Image.Image], np.ndarray], words: np.ndarray | None = None) -> np.ndarray:
        """The upright RGB picture, as `copied` gives it or, loaded, in `words`."""
        try:
            image = self._image
            image.load()  # before the orientation, whose reader loads a PNG too and would hide what is wrong with it
            pixels = copied(_upright(_flat_rgb(image), _orientation(image))) if words is None else words
        except MediaError:
            raise
        except MemoryError:
            raise
        except Exception:
            # Pillow signals damage by many types (OSError, SyntaxError, struct.error, ...); all mean the same here.
            raise invalid("the picture is damaged or cut short") from None
        finally:
            self._image.close()
        return pixels


def _num_scans(data: bytes) -> int:
    """Scans that a JPEG announces. Two compares of arrays are five times as fast as `bytes.count` of two."""
    octets = np.frombuffer(data, np.uint8)
    return int(np.count_nonzero((octets[:-1] == _MARK) & (octets[1:] == _START_OF_SCAN)))


class _Lines:
    """A file that keeps what follows a head of so many bytes."""

    def __init__(self, room: np.ndarray, head: int) -> None:
        self._room = room.data
        self.place = -head  # of the next byte

    def write(self, data: bytes) -> None:
        kept = data[max(0, -self.place) :]
        start = max(0, self.place)
        self._room[start : start + len(kept)] = kept  # raises where they do not fit
        self.place += len(data)


def _copy(image: Image.Image, take: Take) -> np.ndarray:
    """The pixels of an RGB picture, uint8 [height, width, 3].

    Pillow keeps four bytes a pixel. Its writer of PPM files, whose body is these numbers, gives them in pieces that
    stay in the processor's cache; its `tobytes` would collect the pieces and then join them.
    """
    pixels = take(image.width * image.height * 3)
    lines = _Lines(pixels, len(f"P6\n{image.width} {image.height}\n255\n"))
    image.save(cast("IO[bytes]", lines), "PPM")
    assert lines.place == len(pixels), f"{lines.place} bytes came for {len(pixels)}"
    return pixels.reshape(image.height, image.width, 3)


def _check_size(width: int, height: int, limits: MediaLimits) -> None:
    short, long = sorted((width, height))
    if short < limits.image_min_side:
        raise invalid(f"the picture is {width}x{height}; both sides must be at least {limits.image_min_side} pixels")
    if long > limits.image_max_side:
        raise too_large(f"the picture is {width}x{height}; a side may be at most {limits.image_max_side} pixels")
    if width * height > limits.image_max_pixels:
        raise _too_many_pixels(limits)
    if long / short >= limits.image_max_aspect:
        raise too_large(
            f"the picture is {width}x{height}; its sides may differ by less than {limits.image_max_aspect:g}:1"
        )


def _too_many_pixels(limits: MediaLimits) -> MediaError:
    return too_large(f"the picture is too large; at most {limits.image_max_pixels} pixels are read")


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:
        return 1  # damaged metadata does not make a damaged picture


def _upright(image: Image.Image, orientation: int) -> Image.Image:
    """Undo the camera's rotation, EXIF values 2-8."""
    transpose = image_library().Transpose
    turns = {
        2: transpose.FLIP_LEFT_RIGHT,
        3: transpose.ROTATE_180,
        4: transpose.FLIP_TOP_BOTTOM,
        5: transpose.TRANSPOSE,
        6: transpose.ROTATE_270,
        7: transpose.TRANSVERSE,
        8: transpose.ROTATE_90,
    }
    turn = turns.get(orientation)
    return image if turn is None else image.transpose(turn)


def _flat_rgb(image: Image.Image) -> Image.Image:
    """Any mode of the table to RGB; whatever shines through is white."""
    mode = image.mode
    if mode.startswith("I"):
        return _from_deep_grey(image)
    if mode == "1":
        key = image.info.pop("transparency", None)
        image = image.convert("L")
        if isinstance(key, int):
            image.info["transparency"] = 255 if key else 0
    if image.has_transparency_data:
        rgba = image if image.mode == "RGBA" else image.convert("RGBA")
        white = image_library().new("RGB", image.size, (255, 255, 255))
        white.paste(rgba, mask=rgba.getchannel("A"))
        return white
    return image if image.mode == "RGB" else image.convert("RGB")


def _from_deep_grey(image: Image.Image) -> Image.Image:
    """16-bit grey, rounded to 8 bits; one value may be declared transparent."""
    deep = np.asarray(image)  # [height, width], uint16 or int32
    levels = np.clip(deep, 0, 65535).astype(np.uint32)
    levels *= 255
    levels += 32767
    levels //= 65535
    grey = levels.astype(np.uint8)
    key = image.info.get("transparency")
    if isinstance(key, int):
        grey[deep == key] = 255
    return image_library().fromarray(grey).convert("RGB")
