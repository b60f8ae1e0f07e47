"""Processor: the face that every model family shows to the loader and to `splice`.

Owner: none after construction; called from loop and pool, keeps no state. In: decoded media (MediaItem). Out: the
arrays of its towers (Processed), the tokens that take the place of a slot (Filling), and the positions of the whole
prompt.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Protocol

import numpy as np

from mm.decode.frames import FilmPlan
from mm.errors import MediaError
from mm.item import MediaItem, MediaOptions, Processed
from mm.limits import MediaLimits
from mm.transform.image import Scale

if TYPE_CHECKING:
    from engine.base.request import Modality


@dataclass(frozen=True, slots=True)
class Filling:
    """What takes the place of one slot: tokens, and for each part the runs of them that take its rows.

    Where the tokens end the prompt the last run may go on behind it: its rows are for tokens of the answer.
    """

    token_ids: np.ndarray  # int32 [length]
    runs: tuple[tuple[tuple[int, int], ...], ...]  # per part: (start, length) inside token_ids, ascending


@dataclass(frozen=True, slots=True)
class Placed:
    """A filled slot inside the widened prompt."""

    start: int
    filling: Filling
    processed: Processed


Encode = Callable[[str], Sequence[int]]  # text -> token ids, with nothing added


def no_texts(text: str) -> NoReturn:
    """Encode where there is no tokenizer."""
    raise MediaError(
        400, "media_unsupported", f"this item needs the text {text!r} in the prompt, and the server has no tokenizer"
    )


class Processor(Protocol):
    """One per served model; immutable."""

    writes_texts: ClassVar[bool]  # its constructor takes `encode`
    modalities: frozenset[Modality]
    media_token_ids: frozenset[int]  # every id that stands for a tower's row; none may be left over in a prompt
    longest_sound: float  # seconds of sound that the tower takes at a time
    picture_bytes: int  # decoded pictures up to so large come to `process` unscaled; 0: it makes patches itself

    def __init__(self, folder: str | Path, config: dict[str, Any], picture_bytes: int, **texts: Encode) -> None: ...

    def placeholder(self, modality: Modality) -> int:
        """The token that the template puts where an item of this kind stands."""
        ...

    def settings(self, modality: Modality, options: MediaOptions) -> bytes:
        """Everything but the content that decides what `process` returns; part of the content hash."""
        ...

    def cost(self, modality: Modality, item_bytes: int) -> int:
        """Bytes that `process` holds at most, in addition to a decoded item of `item_bytes`."""
        ...

    def plan_image(self, height: int, width: int, options: MediaOptions) -> Scale:
        """How large a picture of this size becomes."""
        ...

    def plan_film(
        self, num_frames: int, fps: float, height: int, width: int, options: MediaOptions, limits: MediaLimits
    ) -> FilmPlan:
        """Which frames to keep and how large."""
        ...

    def process(self, item: MediaItem, digest: bytes, options: MediaOptions) -> Processed:
        """Turn decoded media into features; `digest` names content and settings (16 bytes)."""
        ...

    def fill(self, processed: Processed) -> Filling:
        """The tokens of one item."""
        ...

    def positions(self, length: int, token_ids: np.ndarray, placed: list[Placed]) -> tuple[np.ndarray | None, int]:
        """int32 [axes, length] and the delta of what follows; None where positions simply count."""
        ...


@dataclass(frozen=True, slots=True)
class ProcessorFiles:
    """A checkpoint's JSON files of media settings, merged: one dict per kind of media."""

    image: dict[str, Any]
    video: dict[str, Any]
    audio: dict[str, Any]


def read_processor_files(folder: str | Path) -> ProcessorFiles:
    """Reads preprocessor_config.json (flat, older), processor_config.json (nested, newer) and
    video_preprocessor_config.json.

    A nested section overrides the flat file. `video` lacks the flat file's sizes, which are those of pictures.
    """
    root = Path(folder)
    flat = _read(root / "preprocessor_config.json")
    nested = _read(root / "processor_config.json")
    video = {**_read(root / "video_preprocessor_config.json"), **nested.get("video_processor", {})}
    if not video:
        video = {key: value for key, value in flat.items() if key not in ("size", "min_pixels", "max_pixels")}
    return ProcessorFiles(
        image={**flat, **nested.get("image_processor", {})},
        video=video,
        audio={**flat, **nested.get("feature_extractor", {}), **nested.get("audio_processor", {})},
    )


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} holds {type(content).__name__}; a JSON object is needed")
    return content
