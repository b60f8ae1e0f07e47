"""Tiny random checkpoints of models that see, in Hugging Face format, with their processors' files; see tests/tiny.py.

Sizes are odd where families allow it: heads of towers no power of two, pictures of several patches, three layers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import tiny

MARKS = {"image_token_id": tiny.IDS["<|IMAGE|>"], "eos_token_id": tiny.IDS["<|im_end|>"]}
QWEN = {
    **MARKS,
    "video_token_id": tiny.IDS["<|VIDEO|>"],
    "vision_start_token_id": tiny.IDS["<|vision_bos|>"],
    "vision_end_token_id": tiny.IDS["<|vision_eos|>"],
    "pad_token_id": tiny.IDS["<|endoftext|>"],
    "tie_word_embeddings": False,
}
TEXT = {**tiny._SMALL, "hidden_size": 96, "rms_norm_eps": 1e-6, "max_position_embeddings": 2048}
CLIP_MEAN, CLIP_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
HALF = [0.5, 0.5, 0.5]


def qwen2_vl() -> Any:
    """Qwen2VLForConditionalGeneration."""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 5, 5]}
    vision = {"depth": 3, "embed_dim": 72, "hidden_size": 96, "mlp_ratio": 2, "num_heads": 2, "patch_size": 14}
    return tiny._model(
        Qwen2VLForConditionalGeneration,
        Qwen2VLConfig(text_config={**TEXT, "rope_parameters": rope}, vision_config=vision, **QWEN),
    )


def qwen3_vl() -> Any:
    """Qwen3VLForConditionalGeneration: positions on a square of 6, of which pictures have more and fewer."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    vision = {
        "depth": 4, "hidden_size": 72, "intermediate_size": 100, "num_heads": 2, "out_hidden_size": 96,
        "num_position_embeddings": 36, "deepstack_visual_indexes": [0, 2],
    }  # fmt: skip
    text = {**TEXT, "head_dim": 32, "rope_parameters": rope}
    return tiny._model(Qwen3VLForConditionalGeneration, Qwen3VLConfig(text_config=text, vision_config=vision, **QWEN))


CHECKPOINTS: dict[str, Callable[[], Any]] = {
    "qwen2_vl": qwen2_vl,
    "qwen3_vl": qwen3_vl,
}


def write_processors(config: Any, folder: Path) -> None:
    """The processor's files, as released."""
    image, film = PROCESSORS[config.model_type](config)
    tiny._write(folder / "preprocessor_config.json", image)
    if film:
        tiny._write(folder / "video_preprocessor_config.json", film)


def _grid(patch: int, mean: list[float], std: list[float], video: str, film_size: dict[str, int]) -> Any:
    """Of the families whose pictures become grids of patches."""
    side = 2 * patch
    picture = {
        "image_processor_type": "Qwen2VLImageProcessor", "do_convert_rgb": True, "do_resize": True, "do_rescale": True,
        "rescale_factor": 1 / 255, "do_normalize": True, "resample": 3, "image_mean": mean, "image_std": std,
        "patch_size": patch, "temporal_patch_size": 2, "merge_size": 2,
        "size": {"shortest_edge": (2 * side) ** 2, "longest_edge": (8 * side) ** 2},
    }  # fmt: skip
    frames = {"do_sample_frames": True, "fps": 2.0, "min_frames": 2, "max_frames": 16, "video_processor_type": video}
    return picture, {**picture, **frames, "size": film_size}


PROCESSORS: dict[str, Callable[[Any], tuple[dict[str, Any], dict[str, Any]]]] = {
    "qwen2_vl": lambda _: _grid(
        14, CLIP_MEAN, CLIP_STD, "Qwen2VLVideoProcessor", {"shortest_edge": 56**2, "longest_edge": 224**2}
    ),
    "qwen3_vl": lambda _: _grid(
        16, HALF, HALF, "Qwen3VLVideoProcessor", {"shortest_edge": 4096, "longest_edge": 6 * 64 * 1024}
    ),
}
