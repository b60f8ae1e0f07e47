"""Generates media: pictures, sounds and films as encoded bytes, for the tests of this folder."""

from __future__ import annotations

import base64
import contextlib
import io
import os
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import TypeVar

import numpy as np

from mm.errors import MediaError

T = TypeVar("T")


def png(pixels: np.ndarray) -> bytes:
    return picture(pixels, "PNG")


def picture(pixels: np.ndarray, kind: str, **options: object) -> bytes:
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(pixels).save(out, kind, **options)
    return out.getvalue()


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def tone(seconds: float, rate: int = 16000, channels: int = 1, hertz: float = 440.0) -> np.ndarray:
    """float32 [channels, samples]; each channel has its own frequency."""
    time = np.arange(int(seconds * rate)) / rate
    return np.stack([0.5 * np.sin(2 * np.pi * hertz * (k + 1) * time) for k in range(channels)]).astype(np.float32)


_LAYOUTS = {1: "mono", 2: "stereo", 3: "2.1", 4: "quad", 6: "5.1", 8: "7.1"}


def sound(
    samples: np.ndarray, rate: int = 16000, container: str = "wav", codec: str = "pcm_s16le", layout: str | None = None
) -> bytes:
    """Encodes float32 samples [channels, samples]."""
    import av

    out = io.BytesIO()
    with av.open(out, "w", format=container) as target:
        stream = target.add_stream(codec, rate=rate, layout=layout or _LAYOUTS[len(samples)])
        _encode_sound(target, stream, samples, rate, layout or _LAYOUTS[len(samples)])
    return out.getvalue()


def _encode_sound(target, stream, samples: np.ndarray, rate: int, layout: str) -> None:
    import av

    resampler = av.AudioResampler(
        format=stream.codec_context.format, layout=layout, rate=stream.codec_context.sample_rate
    )
    size = stream.codec_context.frame_size or 1024
    for start in range(0, samples.shape[1], size):
        packed = samples[:, start : start + size].T.reshape(1, -1)  # samples of the channels are interleaved
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(packed), format="flt", layout=layout)
        frame.sample_rate = rate
        frame.pts = start
        frame.time_base = Fraction(1, rate)
        for ready in resampler.resample(frame):
            target.mux(stream.encode(ready))
    for ready in resampler.resample(None):
        target.mux(stream.encode(ready))
    target.mux(stream.encode(None))


def ramp(num_frames: int, height: int = 64, width: int = 96) -> np.ndarray:
    """Frames as uint8 [frames, height, width, 3]; the grey value of frame i, 20 + 2 * i, identifies it."""
    greys = (20 + 2 * np.arange(num_frames)).clip(0, 235).astype(np.uint8)
    return np.broadcast_to(greys[:, None, None, None], (num_frames, height, width, 3)).copy()


@contextlib.contextmanager
def same_scheduling() -> Iterator[None]:
    """Restores the scheduling of this process: SVT-AV1, run as root, sets its thread to the highest real-time priority.

    Without this, every process that the test starts later (a browser, say) inherits the priority and starves others.
    """
    policy, params = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, params)


def film(
    frames: np.ndarray,
    fps: int = 10,
    container: str = "mp4",
    codec: str = "libx264",
    track: np.ndarray | None = None,
    pix_fmt: str = "yuv420p",
    rotation: int = 0,
    times: list[int] | None = None,
    options: dict[str, str] | None = None,
    index_first: str | None = None,
) -> bytes:
    """Encodes uint8 frames [frames, height, width, 3]; `track` is float32 [1, samples] at 16 kHz, `times` are in ms.

    `index_first` names a file to write through: only a file on disk can have its index moved to the front.
    """
    import av

    out = io.BytesIO()
    moved = {"movflags": "faststart"} if index_first else {}
    with same_scheduling(), av.open(index_first or out, "w", format=container, container_options=moved) as target:
        stream = target.add_stream(codec, rate=fps, options=options or {})
        stream.height, stream.width, stream.pix_fmt = frames.shape[1], frames.shape[2], pix_fmt
        if rotation:
            stream.set_display_rotation(rotation)
        heard = None
        if track is not None:
            heard = target.add_stream(
                "libopus" if container in ("webm", "matroska") else "aac", rate=16000, layout="mono"
            )
        if times is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        for index, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts = times[index] if times is not None else index
            frame.time_base = Fraction(1, 1000) if times is not None else Fraction(1, fps)
            target.mux(stream.encode(frame))
        target.mux(stream.encode(None))
        if track is not None and heard is not None:
            _encode_sound(target, heard, track, 16000, "mono")
    return Path(index_first).read_bytes() if index_first else out.getvalue()


def data_url(data: bytes, mime: str = "application/octet-stream") -> str:
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


def outcome(work: Callable[[], T]) -> T | MediaError:
    """Returns what `work` returns, or the MediaError that it raises; any other error is a bug and passes through."""
    try:
        return work()
    except MediaError as error:
        return error
