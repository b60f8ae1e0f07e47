"""A media item in its three forms: as the client sent it, decoded, and processed for the model.

Owner: none, frozen values. MediaRef comes from the renderer or an upload; MediaItem is what a decoder returns;
Processed is what the loader returns and `splice` turns into `engine.base.request.MediaInput`. Nothing here imports a
codec library.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mm.decode.frames import FilmPlan
from mm.transform.image import Scale

if TYPE_CHECKING:
    from engine.base.request import Modality


@dataclass(frozen=True, slots=True)
class GivenRows:
    """Rows that a client sends in place of an encoder's output: base64 of tensors (mm/client_rows)."""

    rows: str
    grid: str | None = None  # of pictures and films
    seconds_per_grid: float | None = None  # of films: seconds between two lines of patches along time


@dataclass(frozen=True, slots=True)
class MediaRef:
    """One media part of a request.

    `source` is a URL (`data:`, `http:`, `https:`, `file:`), bare base64 text if `format` is set (`input_audio`), the
    bytes of an upload, rows in place of the item, or None if the client sends only a `uuid`. `param` is the part's path
    in the body, for errors.
    """

    modality: Modality
    source: str | bytes | GivenRows | None
    format: str | None = None  # the client's name ("wav"); it only marks bare base64, the first bytes decide the format
    uuid: str | None = None
    param: str | None = None

    @property
    def embedded(self) -> bool:
        """Whether the request holds the item's bytes, so nothing has to be fetched or looked up."""
        if isinstance(self.source, str):
            return self.format is not None or self.source[:5].lower() == "data:"
        return self.source is not None


Colour = tuple[int, int, int]  # red, green, blue, 0 to 255
WHITE: Colour = (255, 255, 255)


@dataclass(frozen=True, slots=True)
class MediaOptions:
    """How media are read: sizes that a request may lower, the colour behind transparency, the frames of films."""

    num_frames: int | None = None
    fps: float | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    use_audio_in_video: bool = False
    background: Colour = WHITE  # colour that replaces transparent pixels of pictures
    frame_recovery: bool = False  # replace a film's unreadable frames by readable ones; otherwise the film is refused
    key_frames: bool = False  # read only a film's key frames
    do_pan_and_scan: bool = False  # Gemma 3 also reads crops of long pictures, as if the checkpoint set this
    num_pictures: int = 1  # pictures in the request; the loader sets it, requests cannot

    @classmethod
    def of(cls, given: Mapping[str, Any], **otherwise: Any) -> MediaOptions:
        """Make the options from JSON values; ValueError names a wrong one. `otherwise` has the values of
        absent options.
        """
        known = {item.name: item for item in dataclasses.fields(cls) if item.name != "num_pictures"}
        for name, value in given.items():
            if name not in known:
                raise ValueError(f"there is no option {name!r}; known are {', '.join(known)}")
            allowed = _refused(str(known[name].type), value)
            if allowed:
                raise ValueError(f"{name} must be {allowed}, not {value!r}")
        least, most = given.get("min_pixels"), given.get("max_pixels")
        if least is not None and most is not None and least > most:
            raise ValueError(f"min_pixels must be at most max_pixels, not {least} beside {most}")
        made = cls(**{**otherwise, **given})
        red, green, blue = made.background  # JSON gives a list
        return dataclasses.replace(made, background=(red, green, blue))

    def with_frames(self, num_frames: int) -> MediaOptions:
        """The same options with this number of a film's frames."""
        return dataclasses.replace(self, num_frames=num_frames)

    def reading(self, modality: Modality) -> bytes:
        """The options that decoders read: part of the content hash, next to the processor's settings."""
        chosen: tuple[Any, ...] = {
            "image": (self.background,),
            "audio": (),
            "video": (self.background, self.frame_recovery, self.key_frames),
        }[modality]
        return repr(chosen).encode()


def _refused(kind: str, value: Any) -> str:
    """The allowed values of a field of this type if `value` is not allowed; otherwise an empty text."""
    if kind == "bool":
        return "" if isinstance(value, bool) else "true or false"
    if kind == "Colour":
        is_colour = isinstance(value, list | tuple) and [type(part) for part in value] == [int] * 3
        return "" if is_colour and all(0 <= part < 256 for part in value) else "three numbers of 0 to 255"
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    is_number = is_whole or (isinstance(value, float) and kind == "float | None")
    what = "a number" if kind == "float | None" else "a whole number"
    return "" if is_number and 0 < value < 2**31 else f"{what} above 0 and below {2**31}"


Replaced = tuple[tuple[int, int], ...]  # (number of an unreadable frame, number of the frame in its place)


@dataclass(frozen=True, slots=True)
class MediaItem:
    """Decoded media in its normal form.

    image: uint8 [height, width, 3]; audio: float32 [samples] at 16 kHz; video: uint8 [frames, height, width, 3].
    Pictures and frames have the planned size. If `scale` is set, a picture still has its own size and `scale` is the
    plan.
    """

    modality: Modality
    data: np.ndarray
    seconds_per_frame: float = 0.0  # video: time between chosen frames
    seconds: np.ndarray | None = None  # video: time of each chosen frame, if the plan has times
    plan: FilmPlan | None = None  # video: which frames were chosen
    sound: np.ndarray | None = None  # video: its sound track, as audio
    replaced: Replaced = ()  # video: unreadable frames and the frames in their place
    scale: Scale | None = None  # image: the size to which the encoder's device scales it


@dataclass(frozen=True, slots=True)
class Part:
    """The input of one encoder (tower) from an item; the encoder makes `num_tokens` rows of `features`."""

    modality: Modality
    hash: bytes  # 16 bytes over content and processor settings
    num_tokens: int
    features: dict[str, np.ndarray]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.features.values())


@dataclass(frozen=True, slots=True)
class Processed:
    """One item ready to be spliced: one part, or a film's frames followed by its sound."""

    modality: Modality
    parts: tuple[Part, ...]
    replaced: Replaced = ()  # frames of a film, which the answer names
    number: int = 0  # of the prompt's items of this modality, for families that number them; set by splice
    preamble: str = ""  # text that the family writes before the slot, tokenized together with the text before the slot

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)
