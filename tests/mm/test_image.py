"""Pictures become pixels in one normal form, as a viewer displays them, or are refused by name (SECURITY S18, S19)."""

from __future__ import annotations

import io
import struct
import zlib
from functools import partial

import numpy as np
import pytest
from PIL import Image

from mm.decode.image import ImageFile
from mm.decode.magic import sniff
from mm.errors import MediaError
from mm.limits import MediaLimits
from mm.transform.image import Scale
from tests.mm import made

LIMITS = MediaLimits()


def decode(data: bytes, limits: MediaLimits = LIMITS) -> np.ndarray:
    word = sniff(data)
    assert word is not None
    pixels = ImageFile(data, word, limits).decode()
    np.testing.assert_array_equal(ImageFile(data, word, limits).decode(Scale), pixels)
    return pixels


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def refusal(data: bytes, limits: MediaLimits = LIMITS) -> MediaError:
    with pytest.raises(MediaError) as caught:
        decode(data, limits)
    return caught.value


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def raw_png(width: int, height: int, depth: int, colour: int, rows: bytes, *extra: bytes) -> bytes:
    """A PNG written by hand: header, given chunks, compressed rows (each with its filter byte)."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    data = chunk(b"IDAT", zlib.compress(rows))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(extra) + data + chunk(b"IEND", b"")


@pytest.mark.parametrize("kind", ["PNG", "BMP", "GIF", "WEBP", "JPEG"])
def test_every_format_yields_rows_columns_and_three_channels(kind: str) -> None:
    pixels = np.zeros((20, 30, 3), np.uint8)
    pixels[:, :15] = (250, 10, 10)
    pixels[:, 15:] = (10, 10, 250)
    options = {"lossless": True} if kind == "WEBP" else {"quality": 95} if kind == "JPEG" else {}
    out = decode(made.picture(pixels, kind, **options))
    assert out.shape == (20, 30, 3)
    assert out.dtype == np.uint8
    assert out.flags.c_contiguous
    assert np.abs(out.astype(int) - pixels)[:, [2, 27]].max() <= (12 if kind == "JPEG" else 0)


def test_grey_is_the_same_in_all_channels() -> None:
    out = decode(saved(Image.new("L", (4, 4), 77), "PNG"))
    assert (out == 77).all()


def test_one_bit_goes_through_grey() -> None:
    image = Image.new("1", (4, 4), 0)
    image.putpixel((1, 0), 1)
    out = decode(saved(image, "PNG"))
    assert out[0, 1].tolist() == [255, 255, 255]
    assert out.sum() == 3 * 255


def test_palette_is_looked_up() -> None:
    image = Image.new("P", (4, 4), 1)
    image.putpalette([0, 0, 0, 10, 200, 30] + [0] * 750)
    assert decode(saved(image, "PNG"))[2, 2].tolist() == [10, 200, 30]


def test_palette_with_transparent_entry_is_flattened_on_white() -> None:
    image = Image.new("P", (4, 4), 1)
    image.putpalette([0, 0, 0, 10, 200, 30] + [0] * 750)
    image.putpixel((0, 0), 0)
    for kind in ("PNG", "GIF"):
        out = decode(saved(image, kind, transparency=0))
        assert out[0, 0].tolist() == [255, 255, 255]
        assert out[1, 1].tolist() == [10, 200, 30]


def test_palette_with_half_transparent_entries_is_blended() -> None:
    image = Image.new("P", (4, 4), 1)
    image.putpalette([0, 0, 0, 0, 0, 0] + [0] * 750)
    out = decode(saved(image, "PNG", transparency=bytes([255, 128])))
    assert out[0, 0].tolist() == [127, 127, 127]


def test_rgba_is_flattened_on_white() -> None:
    image = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    image.putpixel((0, 0), (255, 0, 0, 255))
    image.putpixel((1, 0), (0, 0, 0, 128))
    for kind, options in (("PNG", {}), ("WEBP", {"lossless": True, "exact": True})):
        out = decode(saved(image, kind, **options))
        assert out[0, 0].tolist() == [255, 0, 0]
        assert out[0, 1].tolist() == [127, 127, 127]
        assert out[3, 3].tolist() == [255, 255, 255]


def test_grey_with_alpha_is_flattened_on_white() -> None:
    image = Image.new("LA", (4, 4), (0, 0))
    image.putpixel((0, 0), (40, 255))
    out = decode(saved(image, "PNG"))
    assert out[0, 0].tolist() == [40, 40, 40]
    assert out[1, 1].tolist() == [255, 255, 255]


def test_transparent_colour_of_rgb_and_grey_is_white() -> None:
    image = Image.new("RGB", (4, 4), (1, 2, 3))
    image.putpixel((0, 0), (9, 9, 9))
    out = decode(saved(image, "PNG", transparency=(1, 2, 3)))
    assert out[0, 0].tolist() == [9, 9, 9]
    assert out[1, 1].tolist() == [255, 255, 255]
    grey = decode(saved(Image.new("L", (4, 4), 5), "PNG", transparency=5))
    assert (grey == 255).all()


def test_transparent_value_of_one_bit_grey_is_white() -> None:
    data = raw_png(8, 2, 1, 0, b"\x00\xf0\x00\xf0", chunk(b"tRNS", b"\x00\x00"))
    assert (decode(data) == 255).all()
    plain = raw_png(8, 2, 1, 0, b"\x00\xf0\x00\xf0")
    assert decode(plain)[0, :, 0].tolist() == [255] * 4 + [0] * 4


def test_sixteen_bit_grey_is_rounded_to_eight() -> None:
    values = np.array([[0, 257 * 100, 65535, 257 * 7 + 100]], np.uint16).repeat(2, 0)
    rows = b"".join(b"\x00" + row.astype(">u2").tobytes() for row in values)
    out = decode(raw_png(4, 2, 16, 0, rows))
    assert out[0, :, 0].tolist() == [0, 100, 255, 7]
    keyed = decode(raw_png(4, 2, 16, 0, rows, chunk(b"tRNS", b"\x00\x00")))
    assert keyed[0, :, 0].tolist() == [255, 100, 255, 7]


def test_sixteen_bit_colour_keeps_its_high_byte() -> None:
    row = b"\x00" + struct.pack(">6H", 0xFF00, 0x8000, 0x0100, 0x1200, 0x3400, 0x5600)
    out = decode(raw_png(2, 2, 16, 2, row * 2))
    assert np.abs(out[0].astype(int) - [[255, 128, 1], [18, 52, 86]]).max() <= 1


def test_cmyk_is_turned_to_rgb() -> None:
    out = decode(saved(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "JPEG", quality=95))
    assert np.abs(out.astype(int) - (255, 0, 0)).max() <= 6


def test_animations_show_their_first_frame() -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ((200, 0, 0), (0, 200, 0), (0, 0, 200))]
    for kind, options in (("GIF", {}), ("WEBP", {"lossless": True}), ("PNG", {})):
        data = saved(frames[0], kind, save_all=True, append_images=frames[1:], duration=100, **options)
        assert decode(data)[4, 4].tolist() == [200, 0, 0]


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_exif_orientation_is_applied(orientation: int, kind: str) -> None:
    # The upright picture: red, green / blue, white. The file stores it in the camera's orientation.
    upright = (
        np.array([[[255, 0, 0], [0, 255, 0]], [[0, 0, 255], [255, 255, 255]]], np.uint8).repeat(32, 0).repeat(48, 1)
    )
    undo = {
        1: lambda a: a,
        2: lambda a: a[:, ::-1],
        3: lambda a: a[::-1, ::-1],
        4: lambda a: a[::-1],
        5: lambda a: a.transpose(1, 0, 2),
        6: lambda a: np.rot90(a, 1),
        7: lambda a: np.rot90(a, 2).transpose(1, 0, 2),
        8: lambda a: np.rot90(a, -1),
    }
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.fromarray(np.ascontiguousarray(undo[orientation](upright)))
    options = {"quality": 95, "subsampling": 0} if kind == "JPEG" else {"lossless": True} if kind == "WEBP" else {}
    out = decode(saved(image, kind, exif=exif, **options))
    assert out.shape == upright.shape
    centres = out[16::32, 24::48].astype(int)
    assert np.abs(centres - upright[16::32, 24::48]).max() <= 12


@pytest.mark.filterwarnings("ignore:.*EXIF.*:UserWarning")
def test_damaged_exif_is_no_damaged_picture() -> None:
    data = saved(
        Image.new("RGB", (16, 16), (9, 9, 9)), "JPEG", exif=b"Exif\x00\x00II*\x00\xff\xff\xff\x7f" + b"\xff" * 40
    )
    assert decode(data).shape == (16, 16, 3)


def test_bombs_are_refused_from_their_header() -> None:
    bomb = raw_png(16000, 16000, 8, 2, b"")
    error = refusal(bomb)
    assert (error.status, error.reason) == (400, "media_too_large")
    gif = b"GIF89a" + struct.pack("<HHBBB", 65535, 65535, 0, 0, 0) + b"\x3b"
    assert refusal(gif).reason in ("media_too_large", "media_invalid")
    bmp = bytearray(saved(Image.new("RGB", (4, 4)), "BMP"))
    bmp[18:26] = struct.pack("<ii", 30000, 30000)
    assert refusal(bytes(bmp)).reason == "media_too_large"


@pytest.mark.parametrize(
    ("width", "height", "reason"),
    [
        (1, 1, "media_invalid"),
        (1, 40, "media_invalid"),
        (402, 2, "media_too_large"),
        (16385, 100, "media_too_large"),
        (2, 2, None),
        (398, 2, None),
    ],
)
def test_sides_and_aspect_have_bounds(width: int, height: int, reason: str | None) -> None:
    data = saved(Image.new("L", (width, height)), "PNG")
    if reason is None:
        assert decode(data).shape == (height, width, 3)
    else:
        assert refusal(data).reason == reason


def test_pixels_have_a_bound_of_their_own() -> None:
    data = saved(Image.new("L", (100, 100)), "PNG")
    assert decode(data, MediaLimits(image_max_pixels=10000)).shape == (100, 100, 3)
    error = refusal(data, MediaLimits(image_max_pixels=9999))
    assert error.reason == "media_too_large"
    assert "9999" in error.message


def test_formats_off_the_list_are_never_parsed() -> None:
    pixels = made.noise(8, 8)
    for kind in ("ICO", "PPM", "TGA", "JPEG2000"):
        assert sniff(made.picture(pixels, kind)) is None, kind
    assert sniff(b"%!PS-Adobe-3.0 EPSF-3.0\n") is None
    assert refusal(made.png(pixels), MediaLimits(image_formats=("jpeg",))).reason == "media_unsupported"


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP"])
def test_truncated_pictures_are_refused_or_whole(kind: str) -> None:
    data = made.picture(made.noise(64, 64), kind)
    for tenth in range(1, 10):
        cut = data[: len(data) * tenth // 10]
        error = refusal(cut)
        assert (error.status, error.reason) == (400, "media_invalid"), tenth
        assert error.message.startswith("the image is damaged")


@pytest.mark.parametrize(("height", "width"), [(16, 16), (320, 320), (32, 64)])
def test_header_sizes_that_disagree_with_the_data_do_no_harm(height: int, width: int) -> None:
    data = bytearray(made.png(made.noise(32, 32)))
    struct.pack_into(">II", data, 16, width, height)
    data[29:33] = struct.pack(">I", zlib.crc32(bytes(data[12:29])))
    out = made.outcome(lambda: decode(bytes(data)))
    if isinstance(out, MediaError):
        assert out.reason == "media_invalid"
    else:
        assert out.shape == (height, width, 3)


def test_jpegs_of_endless_scans_are_refused_unread() -> None:
    data = made.picture(made.noise(16, 16), "JPEG", progressive=True)
    assert decode(data).shape == (16, 16, 3)
    error = refusal(data + b"\xff\xda" * 100)
    assert (error.status, error.reason) == (400, "media_too_complex")


@pytest.mark.parametrize("mode", ["L", "CMYK", "YCbCr", "RGB"])
@pytest.mark.parametrize(("subsampling", "progressive"), [(0, False), (1, False), (2, False), (2, True)])
@pytest.mark.parametrize(("width", "height"), [(64, 48), (61, 47), (2, 2)])
def test_a_jpeg_of_any_kind_has_the_pixels_that_pillow_gives(
    mode: str, subsampling: int, progressive: bool, width: int, height: int
) -> None:
    image = Image.fromarray(made.noise(height, width)).convert(mode)
    data = saved(image, "JPEG", subsampling=subsampling, progressive=progressive, quality=80)
    np.testing.assert_array_equal(decode(data), np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))


def test_random_damage_never_escapes_as_another_error() -> None:
    rng = np.random.default_rng(7)
    for kind in ("JPEG", "PNG", "WEBP", "GIF", "BMP"):
        data = made.picture(made.noise(32, 32), kind)
        for _ in range(60):
            broken = bytearray(data)
            for position in rng.integers(0, len(data), 6):
                broken[position] = rng.integers(0, 256)
            word = sniff(bytes(broken))
            if word is None or word not in LIMITS.image_formats:
                continue
            out = made.outcome(partial(decode, bytes(broken)))
            if isinstance(out, MediaError):
                assert out.reason in ("media_invalid", "media_too_large", "media_unsupported")
            else:
                assert out.shape[2] == 3


def test_pillows_own_guards_stay_on() -> None:
    from PIL import ImageFile as pillow_file

    decode(made.png(made.noise(4, 4)))
    assert Image.MAX_IMAGE_PIXELS is not None
    assert not pillow_file.LOAD_TRUNCATED_IMAGES


def test_the_background_is_the_operators_colour() -> None:
    blue = (0, 0, 250)
    half = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    half.putpixel((0, 0), (200, 100, 50, 255))
    for kind in ("PNG", "TIFF", "WEBP"):
        options = {"lossless": True} if kind == "WEBP" else {}
        out = ImageFile(saved(half, kind, **options), kind.lower(), LIMITS).decode(background=blue)
        assert out[0, 0].tolist() == [200, 100, 50]
        assert out[1:].reshape(-1, 3).tolist() == [list(blue)] * 12
    deep = Image.fromarray(np.array([[0, 40000]], np.uint16).repeat(2, 0))
    grey = ImageFile(saved(deep, "PNG", transparency=40000), "png", LIMITS).decode(background=blue)
    assert grey.tolist() == [[[0, 0, 0], list(blue)]] * 2
