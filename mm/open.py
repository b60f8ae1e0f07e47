"""Openers read a file's header and return the memory that decoding needs and a function that decodes.

Pool only. In: an Encoded file whose container is known. Out: Opened, or the MediaError that refuses the file. OPENERS
has one opener per modality; a new modality adds its opener there. Codec libraries are imported where they are used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from mm.bounds.bounded import Bounded
from mm.decode.alarm import Alarm
from mm.decode.frames import FilmPlan
from mm.item import MediaItem, MediaOptions
from mm.limits import MediaLimits
from mm.processors.base import Processor
from mm.transform.image import Scale

if TYPE_CHECKING:
    from engine.base.request import Modality


@dataclass(frozen=True, slots=True)
class Encoded:
    """An encoded file of one request, with the limits, processor and options that its opener reads."""

    data: bytes
    container: str  # a file format that the `*_formats` limits name
    limits: MediaLimits
    processor: Processor
    options: MediaOptions
    bounded: Bounded | None = None  # sounds and films, if the job has already read the tables


@dataclass(frozen=True, slots=True)
class Opened:
    """A file whose header was read. `cost`: most bytes needed; `size`: bytes of the decoded form; `decode`:
    decodes it.
    """

    cost: int
    size: int
    decode: Callable[[Alarm], MediaItem]
    faster: Opened | None = None  # decodes in more memory, which is released before the item is processed


def open_image(encoded: Encoded, alarm: Alarm) -> Opened:
    """A picture, scaled as the processor plans, or unscaled if the processor's device scales."""
    from mm.decode.image import ImageFile

    processor, options = encoded.processor, encoded.options
    picture = ImageFile(encoded.data, encoded.container, encoded.limits)

    def scale(height: int, width: int) -> Scale:
        return processor.plan_image(height, width, options)

    def unscaled(_: Alarm) -> MediaItem:
        pixels = picture.decode(None, options.background)
        return MediaItem("image", pixels, scale=scale(*pixels.shape[:2]))

    size = picture.height * picture.width * 3
    if size <= processor.picture_bytes:
        return Opened(picture.cost + size, size, unscaled)
    size = scale(picture.height, picture.width).pixels * 3
    return Opened(picture.cost + size, size, lambda _: MediaItem("image", picture.decode(scale, options.background)))


def open_audio(encoded: Encoded, alarm: Alarm) -> Opened:
    """A sound file, or the sound of a film."""
    from mm.decode.audio import SoundFile

    track = SoundFile(encoded.bounded or encoded.data, encoded.container, encoded.limits)
    return Opened(track.cost, track.size, lambda alarm: MediaItem("audio", track.decode(alarm)))


def open_video(encoded: Encoded, alarm: Alarm) -> Opened:
    """A film's chosen frames, and its sound if the request wants it and the model takes it."""
    from mm.decode.picture_film import PICTURES, PictureFilm
    from mm.decode.video import FilmFile

    limits, options, processor = encoded.limits, encoded.options, encoded.processor

    def planner(num_frames: int, fps: float, height: int, width: int) -> FilmPlan:
        return processor.plan_film(num_frames, fps, height, width, options, limits)

    if encoded.container == PICTURES:
        pictures = PictureFilm(encoded.data, limits, planner, options.background)
        plan = pictures.plan

        def decode_pictures(alarm: Alarm) -> MediaItem:
            return MediaItem("video", pictures.decode(alarm), plan.seconds_per_frame, plan.seconds, plan)

        return Opened(pictures.cost, plan.pixels * 3, decode_pictures)
    film = FilmFile(encoded.bounded or encoded.data, encoded.container, limits, planner, alarm, options)
    with_sound = options.use_audio_in_video and "audio" in processor.modalities and not film.plan.silent

    def decode(alarm: Alarm, num_decoders: int = 1) -> MediaItem:
        sound = film.sound(alarm) if with_sound else None
        frames = film.decode(alarm, num_decoders)
        plan = film.plan
        replaced = tuple(film.replaced)
        return MediaItem("video", frames, plan.seconds_per_frame, plan.seconds, plan, sound=sound, replaced=replaced)

    size, sound_cost = film.plan.pixels * 3, film.sound_cost if with_sound else 0
    plain = Opened(film.cost + sound_cost, size, decode)
    if film.num_decoders == 1:
        return plain
    split = Opened(film.split_cost + sound_cost, size, partial(decode, num_decoders=film.num_decoders))
    return replace(plain, faster=split)


Opener = Callable[[Encoded, Alarm], Opened]
OPENERS: dict[Modality, Opener] = {"image": open_image, "audio": open_audio, "video": open_video}
