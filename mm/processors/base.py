"""Processor: the interface of every model family for the loader and `splice`.

Owner: none after construction; called from loop and pool, holds no state. In: decoded media (MediaItem). Out: the
arrays for its encoders (Processed), the tokens that replace a slot (Filling), and the positions of the whole prompt.
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
    """The tokens that replace one slot, and for each part the runs of tokens that take its rows.

    If the tokens end the prompt, the last run may extend past them: its further rows are for tokens of the answer.
    """

    token_ids: np.ndarray  # int32 [length]
    runs: tuple[tuple[tuple[int, int], ...], ...]  # per part: (start, length) inside token_ids, ascending


@dataclass(frozen=True, slots=True)
class Placed:
    """A filled slot and its place in the expanded prompt."""

    start: int
    filling: Filling
    processed: Processed


Encode = Callable[[str], Sequence[int]]  # text -> token ids, without special tokens


def no_texts(text: str) -> NoReturn:
    """The `encode` of a server without a tokenizer."""
    raise MediaError(
        400, "media_unsupported", f"this item needs the text {text!r} in the prompt, and the server has no tokenizer"
    )


class Processor(Protocol):
    """One per served model; immutable."""

    writes_texts: ClassVar[bool]  # whether its constructor takes `encode`
    modalities: frozenset[Modality]
    media_token_ids: frozenset[int]  # every id that stands for an encoder's row; none may remain in a prompt
    longest_sound: float  # seconds of sound that the encoder takes at a time
    picture_bytes: int  # pictures up to this size come to `process` unscaled; 0: `process` makes patches itself

    def __init__(self, folder: str | Path, config: dict[str, Any], picture_bytes: int, **texts: Encode) -> None: ...

    def placeholder(self, modality: Modality) -> int:
        """The token that the template writes in place of an item of this kind."""
        ...

    def settings(self, modality: Modality, options: MediaOptions) -> bytes:
        """Everything except the content that affects the result of `process`; part of the content hash."""
        ...

    def cost(self, modality: Modality, item_bytes: int) -> int:
        """Bytes that `process` holds at most, in addition to a decoded item of `item_bytes`."""
        ...

    def plan_image(self, height: int, width: int, options: MediaOptions) -> Scale:
        """The size to which a picture of this size is scaled."""
        ...

    def plan_film(
        self, num_frames: int, fps: float, height: int, width: int, options: MediaOptions, limits: MediaLimits
    ) -> FilmPlan:
        """Choose the frames to read and their size."""
        ...

    def process(self, item: MediaItem, digest: bytes, options: MediaOptions) -> Processed:
        """Turn decoded media into features; `digest` identifies content and settings (16 bytes)."""
        ...

    def fill(self, processed: Processed) -> Filling:
        """The tokens that replace one item's slot."""
        ...

    def positions(self, length: int, token_ids: np.ndarray, placed: list[Placed]) -> tuple[np.ndarray | None, int]:
        """int32 [axes, length], and the position delta of the tokens that follow; None if positions simply count
        tokens.
        """
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
