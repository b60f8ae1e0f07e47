"""Tiny random checkpoints of video models without a file here, with processors that need no torchvision.

Models and processors are transformers', except the video processors: transformers' video processors need torchvision.
Ours scale frames to a square and return the formats that the processor classes expect.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers
from transformers import BatchFeature, PreTrainedConfig, video_processing_utils
from transformers.models.auto.video_processing_auto import AutoVideoProcessor
from transformers.processing_utils import transformers_module
from transformers.video_utils import VideoMetadata, default_sample_indices_fn

from tests import tiny
from tests.tiny_seeing import MARKS, SQUARE, TEXT

VideoProcessorMixin: Any = getattr(video_processing_utils, "VideoProcessorMixin", object)  # absent in 5.17
SIDE = 56
WORDS = {"image_token": "<|IMAGE|>", "video_token": "<|VIDEO|>"}


class TinyFilmsConfig(PreTrainedConfig):
    """Registers the video processor with transformers."""

    model_type = "tiny_films"


class TinyFilms(VideoProcessorMixin):
    """Returns frames as single pictures, or with `patch_size` as patches of frame pairs."""

    fps: float | None = None
    num_frames: int | None = None
    do_sample_frames = False
    patch_size: int | None = None
    merge_size, temporal_patch_size = 2, 2

    def sample_frames(self, metadata: Any, num_frames: Any = None, fps: Any = None, **_: Any) -> Any:
        return default_sample_indices_fn(metadata=metadata, num_frames=num_frames, fps=fps)

    def preprocess(self, videos: Any, video_metadata: Any = None, do_sample_frames: Any = None, **given: Any) -> Any:
        told = [VideoMetadata(**each) for each in video_metadata]
        films = []
        for film, each in zip(videos, told, strict=True):
            if do_sample_frames:
                each.frames_indices = self.sample_frames(each, self.num_frames, self.fps).tolist()
                film = film[each.frames_indices]
            assert len(film) == len(each.frames_indices)
            pixels = torch.from_numpy(np.ascontiguousarray(film)).permute(0, 3, 1, 2).float() / 127.5 - 1
            films.append(torch.nn.functional.interpolate(pixels, (SIDE, SIDE), mode="bilinear", antialias=True))
        made = BatchFeature(self._patched(films) if self.patch_size else {"pixel_values_videos": torch.stack(films)})
        return BatchFeature({**made, "video_metadata": told} if given.get("return_metadata") else made)

    def _patched(self, films: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        size, merge, pair = self.patch_size, self.merge_size, self.temporal_patch_size
        side, patches, grids = SIDE // size, [], []
        for film in films:
            film = torch.cat([film, film[-1:].expand(-len(film) % pair, -1, -1, -1)])
            cut = film.view(len(film) // pair, pair, 3, side // merge, merge, size, side // merge, merge, size)
            patches.append(cut.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(-1, 3 * pair * size * size))
            grids.append([len(film) // pair, side, side])
        return {"pixel_values_videos": torch.cat(patches), "video_grid_thw": torch.tensor(grids)}


AutoVideoProcessor.register(TinyFilmsConfig, TinyFilms)
if not hasattr(transformers_module, "VideoProcessorMixin"):  # absent without torchvision
    transformers_module.VideoProcessorMixin = VideoProcessorMixin


def _llava(kind: str, **config: Any) -> Any:
    config = getattr(transformers, f"{kind}Config")(
        vision_config={**SQUARE, "model_type": "clip_vision_model"},
        text_config={**TEXT, "model_type": "llama"},
        image_token_index=MARKS["image_token_id"],
        video_token_index=tiny.IDS["<|VIDEO|>"],
        **config,
    )
    return tiny._model(getattr(transformers, f"{kind}ForConditionalGeneration"), config)


def llava_next_video() -> Any:
    """LlavaNextVideoForConditionalGeneration: pictures in tiles, pooled frames."""
    return _llava("LlavaNextVideo", image_grid_pinpoints=[[56, 112], [112, 56], [112, 112]], vision_feature_layer=-2)


def video_llava() -> Any:
    """VideoLlavaForConditionalGeneration: a tower for pictures, another one for frames."""
    return _llava("VideoLlava", vision_feature_layer=-2)


def qwen2_5_vl() -> Any:
    """Qwen2_5_VLForConditionalGeneration, served through the transformers backend: positions in seconds."""
    model = tiny.qwen2_5_vl()
    model.processors = "qwen2_5_vl_films"
    return model


CHECKPOINTS = {"llava_next_video": llava_next_video, "video_llava": video_llava, "qwen2_5_vl_films": qwen2_5_vl}


def _llava_next_video(tokenizer: Any) -> Any:
    """A processor whose files do not give the number of frames."""
    from transformers import LlavaNextImageProcessorPil, LlavaNextVideoProcessor

    side = {"height": SIDE, "width": SIDE}
    points = [[56, 112], [112, 56], [112, 112]]
    image = LlavaNextImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=side, image_grid_pinpoints=points)
    settings = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return LlavaNextVideoProcessor(TinyFilms(), image, tokenizer, **settings, **WORDS)


def _video_llava(tokenizer: Any) -> Any:
    """A processor that takes two frames per second."""
    from transformers import CLIPImageProcessorPil, VideoLlavaProcessor

    image = CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    return VideoLlavaProcessor(image, TinyFilms(fps=2, do_sample_frames=True), tokenizer, patch_size=14, **WORDS)


def _qwen2_5_vl(tokenizer: Any) -> Any:
    """A processor that takes five frames of any film and repeats the last one."""
    from transformers import Qwen2_5_VLProcessor, Qwen2VLImageProcessorPil

    image = Qwen2VLImageProcessorPil(
        size={"shortest_edge": (2 * tiny.PATCH * tiny.MERGE) ** 2, "longest_edge": (8 * tiny.PATCH * tiny.MERGE) ** 2},
        patch_size=tiny.PATCH,
        merge_size=tiny.MERGE,
        temporal_patch_size=tiny.TEMPORAL,
    )
    film = TinyFilms(num_frames=5, do_sample_frames=True, patch_size=tiny.PATCH)
    return Qwen2_5_VLProcessor(image, tokenizer, film)


PROCESSORS = {"llava_next_video": _llava_next_video, "video_llava": _video_llava, "qwen2_5_vl_films": _qwen2_5_vl}
