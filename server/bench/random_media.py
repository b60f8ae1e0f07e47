"""Random pictures, sounds and films as parts of messages; a seed gives the same items again.

Owner: the process that sends them; drawn before the load starts, because a client that draws would measure itself.
"""

from __future__ import annotations

import base64
import io
import wave
from collections.abc import Callable
from typing import Any

import numpy as np

from server.bench.options import ServeOptions

RATE = 16000
FRAMES = 8  # frames per second of a film

Part = dict[str, Any]


def size_of(text: str) -> tuple[int, int]:
    """(width, height) of `640x480`. Raises ValueError."""
    width, _, height = text.partition("x")
    if not (width.isdigit() and height.isdigit() and int(width) >= 16 and int(height) >= 16):
        raise ValueError(f"{text}: must be width and height such as 512x512, of 16 at least")
    return int(width), int(height)


def pixels(draw: np.random.Generator, width: int, height: int) -> np.ndarray:
    """[height, width, 3] with structure at several scales, so that codecs compress it like a photograph."""
    from PIL import Image

    coarse, fine = (
        Image.fromarray(
            draw.integers(0, 256, (max(1, height // cell), max(1, width // cell), 3), dtype=np.uint8)
        ).resize((width, height), Image.Resampling.BILINEAR)
        for cell in (64, 8)
    )
    return np.asarray(Image.blend(coarse, fine, 0.3))


def picture(draw: np.random.Generator, options: ServeOptions) -> Part:
    from PIL import Image

    out = io.BytesIO()
    width, height = size_of(options.image_size)
    noise = options.image_format == "noise"
    coding = "png" if noise else options.image_format
    drawn = draw.integers(0, 256, (height, width, 3), dtype=np.uint8) if noise else pixels(draw, width, height)
    Image.fromarray(drawn).save(out, coding.upper(), quality=85)
    return {"type": "image_url", "image_url": {"url": data_url(f"image/{coding}", out.getvalue())}}


def sound(draw: np.random.Generator, options: ServeOptions) -> Part:
    """Noise under a slow envelope, 16-bit mono."""
    count = round(options.sound_seconds * RATE)
    envelope = np.interp(
        np.arange(count),
        np.arange(0, count + RATE, RATE // 4)[: count // (RATE // 4) + 2],
        draw.random(count // (RATE // 4) + 2),
    )
    samples = (draw.normal(0, 4000, count) * envelope).clip(-32768, 32767).astype("<i2")
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setparams((1, 2, RATE, count, "NONE", ""))
        file.writeframes(samples.tobytes())
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(out.getvalue()).decode(), "format": "wav"}}


def film(draw: np.random.Generator, options: ServeOptions) -> Part:
    """A picture that moves sideways, H.264."""
    import av

    width, height = (side // 2 * 2 for side in size_of(options.film_size))
    count = max(2, round(options.film_seconds * FRAMES))
    wide = pixels(draw, width + 2 * count, height)
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=FRAMES)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for at in range(count):
            frame = np.ascontiguousarray(wide[:, 2 * at : 2 * at + width])
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return {"type": "video_url", "video_url": {"url": data_url("video/mp4", out.getvalue())}}


def data_url(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def parts(draw: np.random.Generator, options: ServeOptions) -> list[Part]:
    """All media of one request."""
    kinds: list[tuple[Callable[[np.random.Generator, ServeOptions], Part], int]] = [
        (picture, options.images), (sound, options.sounds), (film, options.films)
    ]  # fmt: skip
    return [make(draw, options) for make, count in kinds for _ in range(count)]
