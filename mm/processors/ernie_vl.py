"""ERNIE 4.5 VL: grids of merged patches with three-axis positions, as in Qwen2-VL; films in pairs of frames.

Pool (`process`) and loop (`fill`, `positions`). Each chosen frame of a film shows its time in its upper left corner,
drawn with the checkpoint's font before the frame is scaled; the last frame is repeated if their number is odd. A row
stands for two frames, so a film has half as many lines along time as frames.
"""

from __future__ import annotations

import functools
import io
import math
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from engine.base.request import Modality
from mm.decode.frames import FilmPlan
from mm.errors import unsupported
from mm.item import MediaItem, MediaOptions, Part, Processed
from mm.limits import MediaLimits
from mm.processors.base import Placed, read_processor_files
from mm.processors.qwen_vl import BYTES_PER_PIXEL, QwenVL, Vision, lowered, token_id
from mm.transform.image import PatchSettings, Scale

SETTINGS = PatchSettings(temporal_patch_size=1, max_pixels=28 * 28 * 6177)
FILM_PIXELS = {"shortest_edge": 28 * 28 * 299, "longest_edge": 28 * 28 * 1196}  # of a frame
FRAMES = 2  # frames of a row
MAX_FONT_BYTES = 16 << 20


class ErnieVL(QwenVL):
    """Processor of Ernie4_5_VLMoeForConditionalGeneration."""

    frames_of_row: ClassVar[int] = FRAMES

    def __init__(self, folder: str | Path, config: dict[str, Any], picture_bytes: int = 0) -> None:
        super().__init__(folder, config)
        files = read_processor_files(folder)
        one = {"temporal_patch_size": 1}  # patches are of one frame
        film = {"size": FILM_PIXELS, **files.video, **one}
        self.vision = Vision({**files.image, **one}, film, picture_bytes, SETTINGS)
        self.picture_bytes = self.vision.picture_bytes
        self._ids = {"image": token_id(config, "image", 100_295), "video": token_id(config, "video", 103_367)}
        self.media_token_ids = frozenset(self._ids.values())
        self.least_frames = int(files.video.get("min_frames") or 16)
        self.most_frames = int(files.video.get("max_frames") or 180)
        self.film_frames, self.film_fps = files.video.get("num_frames"), files.video.get("fps")
        self.font_name = str(files.video.get("font") or "Roboto-Regular.ttf")
        self.font = font_in(Path(folder), self.font_name) if files.video.get("draw_on_frames", True) else b""

    def settings(self, modality: Modality, options: MediaOptions) -> bytes:
        frames = self.least_frames, self.most_frames, self.film_frames, self.film_fps, bool(self.font)
        return repr((b"ernie_vl", frames)).encode() + super().settings(modality, options)

    def cost(self, modality: Modality, item_bytes: int) -> int:
        """Bytes held; a film's scaled frames may be larger than the decoded frames."""
        if modality == "image":
            return super().cost(modality, item_bytes)
        scaled = self.most_frames * self.vision.video.max_pixels * 3
        return item_bytes + 5 * max(item_bytes, min(scaled, item_bytes * 64)) + (1 << 20)

    def plan_film(
        self, num_frames: int, fps: float, height: int, width: int, options: MediaOptions, limits: MediaLimits
    ) -> FilmPlan:
        """The frames' own size: times are drawn before `process` scales; within the server's limit on pixels."""
        if self.font is None:
            raise unsupported(f"the checkpoint lacks {self.font_name}, the font of the times in a film's frames")
        step = num_frames / max(1.0, min(self._wanted(num_frames, fps, options), num_frames, limits.video_max_frames))
        count = min(math.ceil(num_frames / step), limits.video_max_frames)
        total = min(limits.video_max_total_pixels, limits.request_decoded_bytes // (2 * BYTES_PER_PIXEL))
        share = min(1.0, math.sqrt(total / (count + FRAMES) / (height * width)))
        scale = Scale(max(1, int(height * share)), max(1, int(width * share)), self.vision.video.resample)
        indices = (np.arange(count) * step).astype(np.float32).astype(np.int64)  # float32 as in the reference
        return FilmPlan(indices, scale, num_frames / fps / count, indices / fps)

    def _wanted(self, total: int, fps: float, options: MediaOptions) -> float:
        """The number of frames to choose, which need not be whole: the distance of two is the film's length over it."""
        if options.num_frames is not None:
            return options.num_frames
        if options.fps is None and self.film_frames:
            return int(self.film_frames)
        rate = options.fps or self.film_fps
        wanted = total / fps * rate if rate else total
        return min(max(wanted, self.least_frames), self.most_frames)

    def process(self, item: MediaItem, digest: bytes, options: MediaOptions) -> Processed:
        if item.modality == "image":
            return super().process(item, digest, options)
        assert item.seconds is not None, "this processor's plans hold the time of each frame"
        height, width = item.data.shape[1:3]
        scale = lowered(self.vision.video, options).scale(height, width)
        count = len(item.data) + -len(item.data) % FRAMES
        frames = np.empty((count, scale.height, scale.width, 3), np.uint8)
        for number, (frame, second) in enumerate(zip(item.data, item.seconds)):
            frames[number] = scale.array(with_time(frame, float(second), self.font) if self.font else frame)
        frames[len(item.data) :] = frames[len(item.data) - 1]
        features, patches = self.vision.moving(frames)
        return Processed("video", (Part("video", digest, patches // FRAMES, features),))

    def grid_of(self, part: Part) -> np.ndarray:
        grid = super().grid_of(part)
        return grid if part.modality == "image" else grid // (FRAMES, 1, 1)

    def positions(self, length: int, token_ids: np.ndarray, placed: list[Placed]) -> tuple[np.ndarray | None, int]:
        """As Qwen2-VL's, but the answer's positions follow the largest of the prompt, which may be a film's time."""
        found, _ = super().positions(length, token_ids, placed)
        return found, 0 if found is None else int(found.max()) + 1 - length


def font_in(folder: Path, name: str) -> bytes | None:
    """The font file of a checkpoint; None: the folder has no file of this name."""
    file = folder / Path(name).name
    if not file.is_file():
        return None
    if file.stat().st_size > MAX_FONT_BYTES:
        raise ValueError(f"{file.name} has {file.stat().st_size} bytes; a font of at most {MAX_FONT_BYTES} is read")
    return file.read_bytes()


def with_time(frame: np.ndarray, second: float, font: bytes) -> np.ndarray:
    """The frame, uint8 [height, width, 3], with its time in black with a white border."""
    from PIL import Image, ImageDraw

    height, width = frame.shape[:2]
    size = int(min(height, width) * 0.1)
    if not size:
        return frame
    image, border = Image.fromarray(frame), int(size * 0.1)
    write = functools.partial(ImageDraw.Draw(image).text, (0, 0), time_text(second), font=sized(font, size))
    write(fill="black", stroke_width=border, stroke_fill="white")
    return np.asarray(image)


def time_text(second: float) -> str:
    """ "time: hours:minutes:seconds"."""
    hours, rest = divmod(second, 3600)
    minutes, rest = divmod(rest, 60)
    return f"time: {int(hours):02d}:{int(minutes):02d}:{rest:05.02f}"


@functools.lru_cache(maxsize=16)
def sized(font: bytes, size: int) -> Any:
    """Pillow's font of a size in pixels."""
    from PIL import ImageFont

    return ImageFont.truetype(io.BytesIO(font), size)
