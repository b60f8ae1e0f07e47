"""Tiny random checkpoints of multimodal models without a file here, with the files of their own processors.

Models and processors are transformers'; see tests/tiny.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import tiny
from tests.tiny_seeing import MARKS, SQUARE, TEXT, TILE

SIDE = {"size": {"height": 56, "width": 56}}
WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
SOUND = {"hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2, "num_attention_heads": 4}
SIGLIP = {**SQUARE, "model_type": "siglip_vision_model", "vision_use_head": False}


def _made(kind: str, **config: Any) -> Any:
    import transformers

    made = getattr(transformers, f"{kind}Config")(**config)
    return tiny._model(getattr(transformers, f"{kind}ForConditionalGeneration"), made)


def paddleocr_vl() -> Any:
    """PaddleOCRVLForConditionalGeneration: positions on three axes, pictures of any size."""
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 5, 5]}
    return _made(
        "PaddleOCRVL",
        text_config={**TEXT, "head_dim": 24, "rope_parameters": rope},
        vision_config={**TILE, "image_size": 70, "patch_size": 14},
        vision_start_token_id=tiny.IDS["<|vision_bos|>"],
        vision_end_token_id=tiny.IDS["<|vision_eos|>"],
        video_token_id=tiny.IDS["<|VIDEO|>"],
        tie_word_embeddings=False,
        **MARKS,
    )


CHECKPOINTS: dict[str, Callable[[], Any]] = {
    "aya_vision": lambda: _made(
        "AyaVision", vision_config=SIGLIP, text_config={**TEXT, **WINDOWS, "model_type": "cohere2"},
        image_token_index=MARKS["image_token_id"],
    ),
    "vipllava": lambda: _made(
        "VipLlava", vision_config={**SQUARE, "model_type": "clip_vision_model"},
        text_config={**TEXT, "model_type": "llama"}, vision_feature_layers=[-1, -2],
        vision_feature_layer=[-1, -2, 1], image_token_index=MARKS["image_token_id"],
    ),
    "lighton_ocr": lambda: _made(
        "LightOnOcr", vision_config={**TILE, "model_type": "pixtral", "image_size": 280, "patch_size": 14},
        text_config={**TEXT, "model_type": "qwen3", "head_dim": 24}, tie_word_embeddings=False,
        image_token_id=MARKS["image_token_id"],
    ),
    "paddleocr_vl": paddleocr_vl,
    "aria": lambda: _made(
        "Aria", vision_config={**TILE, "model_type": "idefics3_vision", "image_size": 980, "patch_size": 70},
        text_config={
            **TEXT, "model_type": "aria_text", "intermediate_size": 56, "moe_num_experts": 5, "moe_topk": 2,
            "head_dim": 24,
        },
        projector_patch_to_query_dict={196: 6}, image_token_index=MARKS["image_token_id"],
    ),
    "idefics2": lambda: _made(
        "Idefics2", vision_config={**TILE, "model_type": "idefics2_vision", "image_size": 112, "patch_size": 14},
        text_config={**TEXT, "model_type": "mistral", "sliding_window": None},
        perceiver_config={
            "hidden_size": 96, "resampler_n_latents": 5, "resampler_depth": 2, "resampler_n_heads": 4,
            "resampler_head_dim": 24, "num_key_value_heads": 2,
        },
        image_token_id=MARKS["image_token_id"],
    ),
    "moss_transcribe_diarize": lambda: _made(
        "MossTranscribeDiarize", audio_config={**SOUND, "max_source_positions": 100, "num_mel_bins": 16},
        text_config={**TEXT, "model_type": "qwen3", "head_dim": 24}, audio_token_id=tiny.IDS["<|AUDIO|>"],
        audio_chunk_size=32_000, tie_word_embeddings=False, eos_token_id=MARKS["eos_token_id"],
    ),
}  # fmt: skip


def _moss_transcribe_diarize(tokenizer: Any) -> Any:
    """A processor with windows of two seconds; a number token follows every second of sound."""
    from transformers import MossTranscribeDiarizeFeatureExtractor, MossTranscribeDiarizeProcessor

    extractor = MossTranscribeDiarizeFeatureExtractor(feature_size=16, chunk_length=2)
    words = {"audio_token": "<|AUDIO|>", "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>"}
    return MossTranscribeDiarizeProcessor(extractor, tokenizer, time_marker_every_seconds=1, **words)


def _aya_vision(tokenizer: Any) -> Any:
    """A processor whose templates write another token than the one that stands for an embedding row; each tile has a
    name.
    """
    from transformers import AyaVisionProcessor, GotOcr2ImageProcessorPil

    image = GotOcr2ImageProcessorPil(**SIDE, crop_to_patches=True, min_patches=1, max_patches=4)
    words = {"start_of_img": "<|vision_bos|>", "end_of_img": "<|vision_eos|>", "img_patch": "<|IMAGE|>",
             "img_line_break": "<|audio_bos|>", "tile": "<|audio_eos|>", "tile_global": "<|AUDIO|>"}  # fmt: skip
    names = {f"{name}_token": word for name, word in words.items()}
    return AyaVisionProcessor(
        image, tokenizer, patch_size=14, img_size=56, downsample_factor=2, image_token="<|vision_pad|>", **names
    )


def _vipllava(tokenizer: Any) -> Any:
    from transformers import CLIPImageProcessorPil, LlavaProcessor

    image = CLIPImageProcessorPil(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56})
    settings = {"patch_size": 14, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}
    return LlavaProcessor(image, tokenizer, **settings)


def _lighton_ocr(tokenizer: Any) -> Any:
    from transformers import LightOnOcrProcessor, PixtralImageProcessorPil

    image = PixtralImageProcessorPil(size={"longest_edge": 140}, patch_size={"height": 14, "width": 14})
    return LightOnOcrProcessor(image, tokenizer, patch_size=14, spatial_merge_size=2)


def _aria(tokenizer: Any) -> Any:
    from transformers import AriaImageProcessorPil, AriaProcessor

    return AriaProcessor(AriaImageProcessorPil(), tokenizer, size_conversion={980: 6})


def _idefics2(tokenizer: Any) -> Any:
    """A processor that puts a token before and after a picture; adjacent pictures share the token between them."""
    from transformers import Idefics2ImageProcessorPil, Idefics2Processor

    image = Idefics2ImageProcessorPil(size={"shortest_edge": 56, "longest_edge": 112}, do_image_splitting=False)
    return Idefics2Processor(image, tokenizer, image_seq_len=5)


def _paddleocr_vl(tokenizer: Any) -> Any:
    from transformers import PaddleOCRVLImageProcessorPil, PaddleOCRVLProcessor

    image = PaddleOCRVLImageProcessorPil(
        size={"shortest_edge": 56**2, "longest_edge": 140**2}, patch_size=14, merge_size=2
    )
    return PaddleOCRVLProcessor(image, tokenizer)


PROCESSORS = {
    "aya_vision": _aya_vision, "vipllava": _vipllava, "lighton_ocr": _lighton_ocr, "paddleocr_vl": _paddleocr_vl,
    "moss_transcribe_diarize": _moss_transcribe_diarize, "aria": _aria, "idefics2": _idefics2,
}  # fmt: skip


def write_processors(kind: str, folder: Path, made: Callable[[Any], Any]) -> None:
    """Writes the processor's files next to the tokenizer's, as transformers does."""
    from transformers import AutoTokenizer

    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    if kind == "lighton_ocr":
        settings["extra_special_tokens"] |= {"image_break_token": "<|vision_pad|>", "image_end_token": "<|vision_eos|>"}
    if kind == "idefics2":
        settings["extra_special_tokens"] |= {"image_boundary_token": "<|vision_pad|>"}
    tiny._write(path, settings)
    made(AutoTokenizer.from_pretrained(folder)).save_pretrained(folder)
    tiny._write(path, settings)
