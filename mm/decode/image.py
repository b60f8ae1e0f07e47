"""Pictures: encoded bytes to uint8 [height, width, 3], as a viewer displays them (SECURITY S18, S19).

Pool only. In: bytes whose format `magic` has named. Out: one normal form: EXIF orientation applied, transparency
flattened on the background's colour, CMYK and grey converted to RGB, 16 bits scaled to 8, the first frame of an
animation. The header is read first. The caller checks size and mode and reserves memory before any pixel is decoded.
"""

from __future__ import annotations

import functools
import io
import types
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from mm.bounds.check import bound_picture
from mm.bounds.directory import check_exif
from mm.decode.alarm import too_complex
from mm.decode.native import silence_tiff
from mm.errors import MediaError, invalid, too_large, unsupported
from mm.item import WHITE, Colour
from mm.limits import MediaLimits
from mm.transform.image import Scale

if TYPE_CHECKING:
    from PIL import Image

_OPENERS = {
    "jpeg": "JPEG",
    "png": "PNG",
    "webp": "WEBP",
    "gif": "GIF",
    "bmp": "BMP",
    "tiff": "TIFF",
    "avif": "AVIF",
}
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
_SIDEWAYS = (5, 6, 7, 8)  # orientations that swap height and width
_ORIENTATION, _TILE_WIDTH, _TILE_LENGTH = 0x0112, 322, 323
# A decoder passes over the whole picture for each scan of a progressive JPEG, however small the scan; encoders write
# about ten scans.
_MARK, _START_OF_SCAN, _MAX_SCANS = 0xFF, 0xDA, 100


@functools.cache
def image_library() -> types.ModuleType:
    """Import Pillow once, and make its warning about decompression bombs an error.

    The parsers of our formats are imported here, because Pillow loads all forty when it needs one that is not loaded.
    """
    from PIL import (  # noqa: F401
        AvifImagePlugin,
        BmpImagePlugin,
        GifImagePlugin,
        Image,
        ImageFile,
        JpegImagePlugin,
        PngImagePlugin,
        TiffImagePlugin,
        WebPImagePlugin,
    )

    warnings.simplefilter("error", Image.DecompressionBombWarning)
    warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")  # about damaged metadata, which we drop
    silence_tiff()
    assert Image.MAX_IMAGE_PIXELS is not None
    assert not ImageFile.LOAD_TRUNCATED_IMAGES
    return Image


Planner = Callable[[int, int], Scale]  # (height, width)


class ImageFile:
    """A picture whose header has been read and checked."""

    def __init__(self, data: bytes, file_format: str, limits: MediaLimits) -> None:
        if file_format not in limits.image_formats:
            raise unsupported(
                f"this server reads images as {', '.join(limits.image_formats)}; the data is something else"
            )
        if file_format == "jpeg" and _num_scans(data) > _MAX_SCANS:
            raise too_complex()
        data = bound_picture(data, file_format)
        image_module = image_library()
        try:
            self._image = image_module.open(io.BytesIO(data), formats=[_OPENERS[file_format]])
        except (image_module.DecompressionBombError, image_module.DecompressionBombWarning):
            raise _too_many_pixels(limits) from None
        except Exception:
            raise invalid("the image is damaged: its header cannot be read") from None
        self.width, self.height = self._image.size
        check_size(self.width, self.height, limits)
        if file_format == "tiff":
            _check_tiles(self._image, limits)
        if self._image.mode not in _MODES:
            raise unsupported("the image's pixel format is not supported; send 8 or 16 bits of grey, RGB or CMYK")

    @property
    def cost(self) -> int:
        """The most bytes held while decoding: four per pixel in Pillow, and one copy per step of the conversion
        to RGB.
        """
        return self.width * self.height * 16

    @property
    def upright(self) -> tuple[int, int]:
        """(height, width) as a viewer displays the picture; metadata that only decoding reads are not considered."""
        turned = _orientation(self._image) in _SIDEWAYS
        return (self.width, self.height) if turned else (self.height, self.width)

    def decode(self, planner: Planner | None = None, background: Colour = WHITE) -> np.ndarray:
        """Decode into the normal form; uint8 [height, width, 3]. `planner` gives the scale for the upright size.

        `background` is the colour that replaces transparent pixels.

        The array is read-only: its memory is a `bytes` object of Pillow.
        """
        try:
            image = self._image
            image.load()  # before reading the orientation: that loads a PNG too, and would hide the cause of an error
            image = _upright(_flat_rgb(image, background), _orientation(image))
            return np.asarray(image if planner is None else planner(image.height, image.width).image(image))
        except MediaError:
            raise
        except MemoryError:
            raise
        except Exception:
            # Pillow signals damage by many types (OSError, SyntaxError, struct.error, ...); all mean the same here.
            raise invalid("the image is damaged or cut short") from None
        finally:
            self._image.close()


def _num_scans(data: bytes) -> int:
    """Number of scans that a JPEG announces. Comparing two arrays is five times as fast as `bytes.count` of two
    bytes.
    """
    octets = np.frombuffer(data, np.uint8)
    return int(np.count_nonzero((octets[:-1] == _MARK) & (octets[1:] == _START_OF_SCAN)))


def check_size(width: int, height: int, limits: MediaLimits) -> None:
    """Raises MediaError if the width or height is outside the server's limits."""
    short, long = sorted((width, height))
    if short < limits.image_min_side:
        raise invalid(f"the image is {width}x{height}; both sides must be at least {limits.image_min_side} pixels")
    if long > limits.image_max_side:
        raise too_large(f"the image is {width}x{height}; a side may be at most {limits.image_max_side} pixels")
    if width * height > limits.image_max_pixels:
        raise too_large(
            f"the image is {width}x{height}; at most {limits.image_max_pixels} pixels are read, so scale it down"
        )
    if long / short >= limits.image_max_aspect:
        raise too_large(
            f"the image is {width}x{height}; its sides may differ by less than {limits.image_max_aspect:g}:1"
        )


def _check_tiles(image: Image.Image, limits: MediaLimits) -> None:
    """Check a TIFF's tiles: they may be larger than the picture, and each tile is decoded as a whole."""
    tags = getattr(image, "tag_v2", {})
    width, height = tags.get(_TILE_WIDTH, 0), tags.get(_TILE_LENGTH, 0)
    sized = isinstance(width, int) and isinstance(height, int)
    if not sized or width * height > max(image.width * image.height, 1 << 20):
        raise too_large(f"the image's tiles are larger than the image, which has {image.width}x{image.height}")


def _too_many_pixels(limits: MediaLimits) -> MediaError:
    return too_large(f"the image is too large; at most {limits.image_max_pixels} pixels are read")


def _orientation(image: Image.Image) -> int:
    image.info.pop("Raw profile type exif", None)  # a text that Pillow would decompress
    check_exif(image.info.get("exif", b""))
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:
        return 1  # the pixels are readable even if the metadata is damaged


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


def _flat_rgb(image: Image.Image, background: Colour) -> Image.Image:
    """Convert any mode of the table to RGB; transparent pixels get the background's colour."""
    mode = image.mode
    if mode.startswith("I"):
        return _from_deep_grey(image, background)
    if mode == "1":
        key = image.info.pop("transparency", None)
        image = image.convert("L")
        if isinstance(key, int):
            image.info["transparency"] = 255 if key else 0
    if image.has_transparency_data:
        rgba = image if image.mode == "RGBA" else image.convert("RGBA")
        flat = image_library().new("RGB", image.size, background)
        flat.paste(rgba, mask=rgba.getchannel("A"))
        return flat
    return image if image.mode == "RGB" else image.convert("RGB")


def _from_deep_grey(image: Image.Image, background: Colour) -> Image.Image:
    """Convert 16-bit grey to RGB of 8 bits, rounded; the file may declare one value transparent."""
    deep = np.asarray(image)  # [height, width], uint16 or int32
    levels = np.clip(deep, 0, 65535).astype(np.uint32)
    levels *= 255
    levels += 32767
    levels //= 65535
    flat = image_library().fromarray(levels.astype(np.uint8)).convert("RGB")
    key = image.info.get("transparency")
    if isinstance(key, int):
        flat.paste(background, mask=image_library().fromarray(deep == key))
    return flat
