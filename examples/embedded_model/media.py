"""Encodes pictures as PNG or JPEG, sounds as WAV, MP3, OGG or FLAC, films as MP4 or WebM; also as message parts.

Also writes the sample files of examples/media: `python -m examples.embedded_model.media`.
"""

from __future__ import annotations

import base64
import io
import wave
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from examples.embedded_model.blueprint import HERE, SAMPLE_RATE
from examples.embedded_model.pictures import Thing, place
from examples.embedded_model.sample import Dice, Media, Turn
from examples.embedded_model.sounds import beeps, slide
from examples.embedded_model.spoken import utterances

EXACT = {"fflags": "+bitexact"}  # no random stream numbers, so equal samples give equal bytes
SOUND_CODECS = {"mp3": "libmp3lame", "ogg": "libopus", "flac": "flac"}
FILM_CODECS = {"mp4": ("libx264",), "webm": ("libvpx-vp9", "libvpx")}


def encode_picture(pixels: np.ndarray, kind: str, quality: int = 90) -> bytes:
    """Encodes a picture as `kind`: png or jpeg."""
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, kind.upper(), **({"quality": quality} if kind == "jpeg" else {}))
    return out.getvalue()


def _resampled(samples: np.ndarray, rate: int) -> np.ndarray:
    """Resamples from 16 kHz to another rate."""
    if rate == SAMPLE_RATE:
        return samples
    import soxr

    return soxr.resample(samples, SAMPLE_RATE, rate)


def encode_sound(samples: np.ndarray, kind: str, rate: int = SAMPLE_RATE, bit_rate: int = 48000) -> bytes:
    """Encodes a mono sound as wav, mp3, ogg (opus) or flac, at a rate that the codec supports."""
    whole = (_resampled(samples, rate).clip(-1, 1) * 32767).astype(np.int16)
    out = io.BytesIO()
    if kind == "wav":
        with wave.open(out, "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(rate)
            file.writeframes(whole.tobytes())
        return out.getvalue()
    with av.open(out, "w", format=kind, container_options=EXACT) as container:
        _write_sound(container, whole, rate, SOUND_CODECS[kind], bit_rate)
    return out.getvalue()


def _write_sound(container, whole: np.ndarray, rate: int, codec: str, bit_rate: int) -> None:
    """Writes one sound stream into an open container."""
    stream = container.add_stream(codec, rate=rate, layout="mono")
    if codec != "flac":
        stream.bit_rate = bit_rate
    _mux_sound(container, stream, whole, rate)


def _mux_sound(container, stream, whole: np.ndarray, rate: int) -> None:
    frame = av.AudioFrame.from_ndarray(whole[None], format="s16", layout="mono")
    frame.sample_rate, frame.pts, frame.time_base = rate, 0, Fraction(1, rate)
    resampler = av.AudioResampler(
        format=stream.format, layout="mono", rate=stream.rate, frame_size=stream.frame_size or None
    )
    for piece in [*resampler.resample(frame), *resampler.resample(None)]:
        container.mux(stream.encode(piece))
    container.mux(stream.encode(None))


def encode_film(frames: np.ndarray, fps: float, kind: str, codec: str, sound: np.ndarray | None = None) -> bytes:
    """Encodes a film as mp4 or webm; its sound track becomes AAC or Opus."""
    out = io.BytesIO()
    with av.open(out, "w", format=kind, container_options=EXACT) as container:
        stream = container.add_stream(codec, rate=Fraction(fps).limit_denominator(1000))
        stream.width, stream.height, stream.pix_fmt = frames.shape[2], frames.shape[1], "yuv420p"
        stream.bit_rate = 400000
        heard = None
        if sound is not None:
            heard = container.add_stream("aac" if kind == "mp4" else "libopus", rate=48000, layout="mono")
        for pixels in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")))
        container.mux(stream.encode(None))
        if heard is not None:
            whole = (_resampled(sound, 48000).clip(-1, 1) * 32767).astype(np.int16)
            _mux_sound(container, heard, whole, 48000)
    return out.getvalue()


def decode_picture(pixels: np.ndarray) -> np.ndarray:
    """Encodes the picture as PNG and decodes it again."""
    return np.array(Image.open(io.BytesIO(encode_picture(pixels, "png"))))


def decode_film(frames: np.ndarray, fps: float) -> list[np.ndarray]:
    """Encodes the film as MP4 and decodes it again."""
    with av.open(io.BytesIO(encode_film(frames, fps, "mp4", "libx264"))) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def part(dice: Dice, media: Media) -> dict:
    """A message part in OpenAI's format, with the media in one of the file formats that clients send."""
    if media.kind == "image":
        kind = dice.pick(("png", "jpeg"))
        data = base64.b64encode(encode_picture(media.data, kind, dice.whole(70, 95))).decode()
        return {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{data}"}}
    if media.kind == "audio":
        kind = dice.pick(("wav", "mp3", "ogg", "flac"))
        rate = {"wav": dice.pick((8000, 11025, 16000, 22050, 44100, 48000)), "mp3": dice.pick((16000, 24000, 44100)),
                "ogg": dice.pick((16000, 48000)), "flac": dice.pick((8000, 16000, 44100))}[kind]  # fmt: skip
        data = base64.b64encode(encode_sound(media.data, kind, rate, dice.pick((32000, 48000, 64000)))).decode()
        return {"type": "input_audio", "input_audio": {"data": data, "format": kind}}
    kind = dice.pick(("mp4", "mp4", "webm"))
    codec = dice.pick(FILM_CODECS[kind])
    sound = media.sound.data if media.sound else None
    data = base64.b64encode(encode_film(media.data, media.rate, kind, codec, sound)).decode()
    return {"type": "video_url", "video_url": {"url": f"data:video/{kind};base64,{data}"}}


def message(dice: Dice, turn: Turn) -> dict:
    """The user message of a turn."""
    if all(isinstance(p, str) for p in turn.parts):
        return {"role": "user", "content": "".join(turn.parts)}  # type: ignore[arg-type]
    content = [{"type": "text", "text": p} if isinstance(p, str) else part(dice, p) for p in turn.parts]
    return {"role": "user", "content": content}


PLAIN = {"variant": 5, "band": 0.3, "edge": None, "edge_width": 0.05, "shaded": False}
FILLS = {"red": (220, 20, 20), "blue": (20, 40, 220), "green": (0, 140, 30), "orange": (255, 150, 0)}


def _draw(things: list[Thing], side: int) -> Image.Image:
    """Objects in plain colours on white."""
    canvas = Image.new("RGB", (side, side), (255, 255, 255))
    for item in things:
        place(Dice(0), canvas, item, {**PLAIN, "fill": FILLS[item.colour]})
    return canvas


def _sample_pictures(folder: Path) -> None:
    for name, things in (
        ("red-circle.png", [Thing("circle", "red", size=0.3)]),
        ("star-and-square.png", [Thing("star", "blue", 0.27, 0.5, 0.2), Thing("square", "green", 0.74, 0.5, 0.18)]),
        (
            "five-triangles.png",
            [Thing("triangle", "orange", 0.2 + 0.3 * (i % 3), 0.3 + 0.4 * (i // 3), 0.11) for i in range(5)],
        ),
    ):
        _draw(things, 512).save(folder / name, optimize=True)
    canvas = Image.new("RGB", (384, 160), (255, 255, 255))
    ImageDraw.Draw(canvas).text((60, 35), "HELLO", font=ImageFont.load_default(80), fill=(10, 10, 10))
    canvas.save(folder / "hello.png", optimize=True)


def _sample_sounds(folder: Path) -> None:
    said, quiet = dict(utterances()), np.zeros(3200, np.float32)
    digits = min((text for text in said if len(text) == 3 and text.isdigit()), key=lambda text: len(said[text]))
    for name, samples, rate in (
        (f"digits-{digits}.wav", said[digits], 16000),
        ("word-stop.ogg", said["stop"], 48000),
        ("three-beeps.mp3", 0.5 * beeps(Dice(3), 3, False), 16000),
        ("rising-tone.flac", 0.5 * slide(Dice(5), True)[:16000], 16000),
    ):
        data = encode_sound(np.concatenate([quiet, samples, quiet]), name.rsplit(".")[-1], rate, 32000)
        (folder / name).write_bytes(data)


def _sample_films(folder: Path) -> None:
    square, circle = Thing("square", "blue", size=0.14), Thing("circle", "red", size=0.14)
    for name, place_at in (
        ("blue-square-moves-right.mp4", lambda t: square.at(0.18 + 0.64 * t, 0.5)),
        ("red-circle-moves-up.mp4", lambda t: circle.at(0.5, 0.82 - 0.64 * t)),
    ):
        frames = np.stack([np.array(_draw([place_at(i / 30)], 240)) for i in range(30)])
        (folder / name).write_bytes(encode_film(frames, 10.0, "mp4", "libx264"))


def main() -> None:
    """Writes the sample files and prints their sizes."""
    folder = HERE.parent / "media"
    folder.mkdir(parents=True, exist_ok=True)
    for write in (_sample_pictures, _sample_sounds, _sample_films):
        write(folder)
    for path in sorted(folder.iterdir()):
        print(f"{path.name:30s} {path.stat().st_size / 1e3:6.1f} kB")


if __name__ == "__main__":
    main()
