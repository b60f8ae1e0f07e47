"""Tiny random checkpoints of vision models, in Hugging Face format, with processor files; see tests/tiny.py.

Sizes are odd where families allow it: head sizes that are no power of two, pictures of several patches, three layers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mm.processors.llama4 import WORDS as LLAMA4_WORDS
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
GLM = {
    **QWEN,
    "image_start_token_id": tiny.IDS["<|vision_bos|>"],
    "image_end_token_id": tiny.IDS["<|vision_eos|>"],
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
    """Qwen3VLForConditionalGeneration: a 6 x 6 position table; pictures have more and fewer patches per side than 6."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    vision = {
        "depth": 4, "hidden_size": 72, "intermediate_size": 100, "num_heads": 2, "out_hidden_size": 96,
        "num_position_embeddings": 36, "deepstack_visual_indexes": [0, 2],
    }  # fmt: skip
    text = {**TEXT, "head_dim": 32, "rope_parameters": rope}
    return tiny._model(Qwen3VLForConditionalGeneration, Qwen3VLConfig(text_config=text, vision_config=vision, **QWEN))


def qwen3_vl_moe() -> Any:
    """Qwen3VLMoeForConditionalGeneration: experts in two of three layers; one tensor holds all experts of a layer."""
    from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    vision = {
        "depth": 3, "hidden_size": 72, "intermediate_size": 100, "num_heads": 2, "out_hidden_size": 96,
        "num_position_embeddings": 36, "deepstack_visual_indexes": [1],
    }  # fmt: skip
    experts = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "mlp_only_layers": [1]}
    text = {**TEXT, "head_dim": 32, "rope_parameters": rope, **experts}
    config = Qwen3VLMoeConfig(text_config=text, vision_config=vision, **QWEN)
    return tiny._model(Qwen3VLMoeForConditionalGeneration, config)


TILE = {"hidden_size": 72, "intermediate_size": 100, "num_hidden_layers": 3, "num_attention_heads": 2}
SQUARE = {**TILE, "image_size": 56, "patch_size": 14}  # 4 x 4 patches


def llava(vision: str = "CLIPVisionConfig", text: str = "LlamaConfig", **outer: Any) -> Any:
    """LlavaForConditionalGeneration."""
    import transformers

    sees = PIXTRAL if vision == "PixtralVisionConfig" else SQUARE
    rest = {"vision_use_head": False} if vision == "SiglipVisionConfig" else {}
    config = transformers.LlavaConfig(
        vision_config=getattr(transformers, vision)(**sees, **rest),
        text_config=getattr(transformers, text)(**TEXT),
        image_token_index=MARKS["image_token_id"],
        **outer,
    )
    return tiny._model(transformers.LlavaForConditionalGeneration, config)


PIXTRAL = {**TILE, "patch_size": 14, "image_size": 280, "hidden_act": "silu"}


def mistral3() -> Any:
    """Mistral3ForConditionalGeneration."""
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration, MistralConfig, PixtralVisionConfig

    config = Mistral3Config(
        vision_config=PixtralVisionConfig(**PIXTRAL),
        text_config=MistralConfig(**TEXT, sliding_window=None),
        image_token_index=MARKS["image_token_id"],
        spatial_merge_size=2,
    )
    return tiny._model(Mistral3ForConditionalGeneration, config)


def internvl(text: str = "Qwen2Config", more: dict[str, Any] | None = None, **vision: Any) -> Any:
    """InternVLForConditionalGeneration; `more` holds further settings of the decoder's configuration."""
    import transformers
    from transformers import InternVLConfig, InternVLForConditionalGeneration, InternVLVisionConfig

    config = InternVLConfig(
        vision_config=InternVLVisionConfig(**SQUARE, **{"attention_bias": True, **vision}),
        text_config=getattr(transformers, text)(**TEXT, **(more or {})),
        image_token_id=MARKS["image_token_id"],
        tie_word_embeddings=False,
    )
    return tiny._model(InternVLForConditionalGeneration, config)


def anyres(kind: str, vision: str, text: str, **outer: Any) -> Any:
    """LlavaNextForConditionalGeneration, or LLaVA-OneVision's class, according to the keywords."""
    import transformers

    points = [[56, 112], [112, 56], [112, 112], [168, 56]]
    config = getattr(transformers, f"{kind}Config")(
        vision_config=getattr(transformers, vision)(**SQUARE),
        text_config=getattr(transformers, text)(**TEXT),
        image_token_index=MARKS["image_token_id"],
        image_grid_pinpoints=points,
        **({"video_token_index": tiny.IDS["<|VIDEO|>"]} if kind == "LlavaOnevision" else {}),
        **outer,
    )
    return tiny._model(getattr(transformers, f"{kind}ForConditionalGeneration"), config)


def glm4v(kind: str = "Glm4v") -> Any:
    """Glm4vForConditionalGeneration, or Glm46V's: half of each head is rotated; a 5 x 5 position table."""
    import transformers

    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 2, 2], "partial_rotary_factor": 0.5}
    vision = {
        "depth": 3, "hidden_size": 72, "num_heads": 2, "intermediate_size": 100, "out_hidden_size": 96,
        "image_size": 70,
    }  # fmt: skip
    text = {**TEXT, "rope_parameters": rope, "model_type": "glm4v_text"}
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=vision, **GLM)
    return tiny._model(getattr(transformers, f"{kind}ForConditionalGeneration"), config)


def glm4v_moe() -> Any:
    """Glm4vMoeForConditionalGeneration: experts in two of three layers."""
    from transformers import Glm4vMoeConfig, Glm4vMoeForConditionalGeneration

    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [3, 2, 3], "partial_rotary_factor": 0.5}
    vision = {
        "depth": 2, "hidden_size": 72, "num_heads": 2, "intermediate_size": 100, "out_hidden_size": 96,
        "image_size": 70,
    }  # fmt: skip
    experts = {"n_routed_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
    text = {**TEXT, "head_dim": 32, "rope_parameters": rope, **experts}
    config = Glm4vMoeConfig(text_config=text, vision_config=vision, **GLM)
    return tiny._model(Glm4vMoeForConditionalGeneration, config)


def ernie4_5_vl_moe() -> Any:
    """Ernie4_5_VLMoeForConditionalGeneration: experts of text and of media in two of three layers."""
    from transformers import Ernie4_5_VLMoeConfig, Ernie4_5_VLMoeForConditionalGeneration

    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 4, 2]}
    text = {
        **TEXT, "head_dim": 20, "rope_parameters": rope, "mlp_layer_types": ["sparse", "dense", "sparse"],
        "moe_num_experts": 7, "moe_k": 3, "moe_intermediate_size": [40, 24], "moe_num_shared_experts": 2,
        "tie_word_embeddings": False,
    }  # fmt: skip
    vision = {"depth": 3, "hidden_size": 72, "intermediate_size": 100, "num_heads": 2}
    ends = [(kind, end) for kind in ("image", "video") for end in ("start", "end")]
    marks = {f"{kind}_{end}_token_id": QWEN[f"vision_{end}_token_id"] for kind, end in ends}
    config = Ernie4_5_VLMoeConfig(text_config=text, vision_config=vision, **{**QWEN, **marks})
    return tiny._model(Ernie4_5_VLMoeForConditionalGeneration, config)


def gemma3() -> Any:
    """Gemma3ForConditionalGeneration: 8 x 8 patches become 16 rows; windows are shorter and longer than a picture."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    text = {**GEMMA, "layer_types": kinds, "sliding_window": 11, "query_pre_attn_scalar": 24}
    config = Gemma3Config(
        vision_config={**TILE, "image_size": 112, "patch_size": 14, "vision_use_head": False},
        text_config={**text, "model_type": "gemma3_text"},
        mm_tokens_per_image=16,
        boi_token_index=MARKS["image_token_id"],  # the token that templates write
        eoi_token_index=tiny.IDS["<|audio_eos|>"],
        image_token_index=tiny.IDS["<|vision_pad|>"],
        eos_token_id=MARKS["eos_token_id"],
    )
    return tiny._model(Gemma3ForConditionalGeneration, config)


def llama4() -> Any:
    """Llama4ForConditionalGeneration: tiles of 4 x 4 patches that become 4 rows; experts in every other layer."""
    from transformers import Llama4Config, Llama4ForConditionalGeneration

    text = {
        **TEXT, "head_dim": 20, "intermediate_size": 44, "intermediate_size_mlp": 100, "num_local_experts": 5,
        "interleave_moe_layer_step": 2, "no_rope_layers": [1, 0, 1], "attention_chunk_size": 13, "floor_scale": 8,
    }  # fmt: skip
    vision = {
        **SQUARE, "intermediate_size": 4 * 72, "projector_input_dim": 52, "projector_output_dim": 52,
        "vision_output_dim": 52, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    }  # fmt: skip
    config = Llama4Config(
        text_config=text,
        vision_config=vision,
        image_token_index=tiny.IDS["<|vision_pad|>"],
        tie_word_embeddings=False,
        eos_token_id=MARKS["eos_token_id"],
    )
    return tiny._model(Llama4ForConditionalGeneration, config)


def gemma4(small: bool = False, **outer: Any) -> Any:
    """Gemma4ForConditionalGeneration as 31B (bidirectional within pictures, windows) or as E2B (clamped)."""
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration

    near, far = "sliding_attention", "full_attention"
    text = {**GEMMA, "head_dim": 12, "global_head_dim": 24, "sliding_window": 11, "vocab_size_per_layer_input": 331}
    large = {"use_bidirectional_attention": "vision", "layer_types": [near, far, near, far], "num_hidden_layers": 4}
    shared = {"num_kv_shared_layers": 2, "layer_types": [near, far, near, far], "num_hidden_layers": 4}
    vision = {**TILE, "head_dim": 20, "num_key_value_heads": 2, "patch_size": 14, "position_embedding_size": 40}
    marks = {
        "boi_token_id": tiny.IDS["<|audio_bos|>"],
        "eoi_token_id": tiny.IDS["<|audio_eos|>"],
        "image_token_id": MARKS["image_token_id"],
        "video_token_id": tiny.IDS["<|VIDEO|>"],
        "audio_token_id": 330,  # an id that no answer contains: transformers reads a sampled marker as padding
        "eos_token_id": MARKS["eos_token_id"],
    }
    config = Gemma4Config(
        text_config={**text, **(shared if small else large), "hidden_size_per_layer_input": 10 * small},
        vision_config={**vision, "use_clipped_linears": small, "standardize": not small},
        tie_word_embeddings=False,
        **{**marks, **outer},
    )
    made = tiny._model(Gemma4ForConditionalGeneration, config)
    # The tower does not scale its scores: with random weights they would differ too much.
    for layer in made.model.vision_tower.encoder.layers:
        layer.self_attn.q_norm.weight.data *= 20**-0.5
    return made


GEMMA = {**TEXT, "head_dim": 32, "num_attention_heads": 6, "vocab_size": 331}


def paligemma(text: str = "gemma", **of_text: Any) -> Any:
    """PaliGemmaForConditionalGeneration over Gemma or Gemma 2, whose window is shorter than a prompt."""
    from transformers import PaliGemmaConfig, PaliGemmaForConditionalGeneration

    config = PaliGemmaConfig(
        vision_config={**SQUARE, "model_type": "siglip_vision_model", "vision_use_head": False},
        text_config={**GEMMA, "model_type": text, **of_text},
        image_token_index=MARKS["image_token_id"],
        projection_dim=96,
        hidden_size=96,
        eos_token_id=MARKS["eos_token_id"],
    )
    return tiny._model(PaliGemmaForConditionalGeneration, config)


def idefics3(kind: str = "Idefics3") -> Any:
    """Idefics3ForConditionalGeneration, or SmolVLM's."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        vision_config={**TILE, "image_size": 84, "patch_size": 14},
        text_config={**TEXT, "model_type": "llama"},
        image_token_id=MARKS["image_token_id"],
        scale_factor=3,
        tie_word_embeddings=False,
    )
    return tiny._model(getattr(transformers, f"{kind}ForConditionalGeneration"), config)


def lfm2_vl() -> Any:
    """Lfm2VlForConditionalGeneration."""
    from transformers import Lfm2VlConfig, Lfm2VlForConditionalGeneration

    text = {**TEXT, "model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 8}
    vision = {
        **TILE, "model_type": "siglip2_vision_model", "patch_size": 14, "num_patches": 16, "vision_use_head": False,
    }  # fmt: skip
    config = Lfm2VlConfig(text_config=text, vision_config=vision, projector_hidden_size=80, **MARKS)
    return tiny._model(Lfm2VlForConditionalGeneration, config)


def hunyuan_vl(sections: tuple[int, ...] = (3, 2, 4, 1)) -> Any:
    """HunYuanVLForConditionalGeneration: a 7 x 7 position table; `sections`: rotary frequencies per position axis."""
    from transformers import HunYuanVLConfig, HunYuanVLForConditionalGeneration

    rope = {"rope_type": "xdrope", "rope_theta": 1e4, "factor": 1.0, "alpha": 50.0, "xdrope_section": list(sections)}
    vision = {
        "hidden_size": 36, "intermediate_size": 52, "num_attention_heads": 3, "num_hidden_layers": 3, "patch_size": 14,
        "max_image_size": 105, "out_hidden_size": 96,
    }  # fmt: skip
    config = HunYuanVLConfig(
        text_config={**TEXT, "head_dim": 20, "rope_parameters": rope, "tie_word_embeddings": True},
        vision_config=vision,
        **{**MARKS, "im_start_id": tiny.IDS["<|vision_bos|>"], "im_end_id": tiny.IDS["<|vision_eos|>"]},
    )
    return tiny._model(HunYuanVLForConditionalGeneration, config)


CHECKPOINTS: dict[str, Callable[[], Any]] = {
    "hunyuan_vl": hunyuan_vl,
    "hunyuan_vl-three": lambda: hunyuan_vl((3, 2, 5)),
    "qwen2_vl": qwen2_vl,
    "qwen3_vl": qwen3_vl,
    "qwen3_vl_moe": qwen3_vl_moe,
    "llava": llava,
    "llava-siglip": lambda: llava(
        "SiglipVisionConfig", "Qwen2Config", vision_feature_layer=-1, vision_feature_select_strategy="full"
    ),
    "llava-pixtral": lambda: llava(
        "PixtralVisionConfig", "MistralConfig", vision_feature_layer=-1, vision_feature_select_strategy="full"
    ),
    "mistral3": mistral3,
    "internvl": internvl,
    "internvl-6b": lambda: internvl(attention_bias=False, use_qk_norm=True, norm_type="rms_norm"),
    "internvl-moe": lambda: internvl(
        "Qwen3MoeConfig", {"head_dim": 20, "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
    ),
    "internvl-gpt_oss": lambda: internvl(
        "GptOssConfig",
        {
            "head_dim": 20,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "internvl-phi3": lambda: internvl("Phi3Config", {"sliding_window": None}),
    "llava_next": lambda: anyres("LlavaNext", "CLIPVisionConfig", "MistralConfig"),
    "llava_onevision": lambda: anyres(
        "LlavaOnevision", "SiglipVisionConfig", "Qwen2Config", vision_aspect_ratio="anyres_max_2"
    ),
    "glm4v": glm4v,
    "glm46v": lambda: glm4v("Glm46V"),
    "glm4v_moe": glm4v_moe,
    "ernie4_5_vl_moe": ernie4_5_vl_moe,
    "gemma3-vision": gemma3,
    "llama4-vision": llama4,
    "gemma4-vision": gemma4,
    "gemma4-small-vision": lambda: gemma4(small=True),
    "paligemma": paligemma,
    "paligemma2": lambda: paligemma("gemma2", sliding_window=13, query_pre_attn_scalar=24),
    "idefics3": idefics3,
    "smolvlm": lambda: idefics3("SmolVLM"),
    "lfm2_vl": lfm2_vl,
}


def write_processors(config: Any, folder: Path) -> None:
    """Writes the processor's files as released checkpoints have them."""
    kind = config.model_type if config.model_type in PROCESSORS else config.vision_config.model_type
    image, film = PROCESSORS[kind](config)
    tiny._write(folder / "preprocessor_config.json", image)
    if kind in ("pixtral", "mistral3"):
        words = {"image_break_token": "<|vision_pad|>", "image_end_token": "<|vision_eos|>"}
        tiny._write(folder / "processor_config.json", words)
    if kind == "lfm2_vl":  # the tiny tokenizer would encode the special tokens letter by letter
        tiny._write(folder / "processor_config.json", {"use_image_special_tokens": False})
    if kind == "llama4":
        marks = ("vision_bos", "audio_bos", "audio_eos", "IMAGE", "vision_eos")
        words = {key: f"<|{mark}|>" for key, mark in zip(LLAMA4_WORDS, marks)}
        tiny._write(folder / "processor_config.json", words)
    if kind == "ernie4_5_vl_moe":  # the font of the times in frames: Pillow's own
        from PIL import ImageFont

        film = {**film, "font": "tiny.ttf", "draw_on_frames": True}
        (folder / "tiny.ttf").write_bytes(ImageFont.load_default(10).font_bytes)
    if config.model_type == "qwen3_vl_moe":
        _turn_experts(folder / "model.safetensors")
    if film:
        tiny._write(folder / "video_preprocessor_config.json", film)


def _turn_experts(path: Path) -> None:
    """Transposes expert tensors to the released layout: transformers 5 writes the other layout, and reads both."""
    from safetensors.torch import load_file, save_file

    turned = {
        name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor
        for name, tensor in load_file(path).items()
    }
    save_file(turned, path, metadata={"format": "pt"})


def _grid(patch: int, mean: list[float], std: list[float], video: str, film_size: dict[str, int]) -> Any:
    """Processor settings of the families whose pictures become grids of patches."""
    side = 2 * patch
    picture = {
        "image_processor_type": "Qwen2VLImageProcessor", "do_convert_rgb": True, "do_resize": True, "do_rescale": True,
        "rescale_factor": 1 / 255, "do_normalize": True, "resample": 3, "image_mean": mean, "image_std": std,
        "patch_size": patch, "temporal_patch_size": 2, "merge_size": 2,
        "size": {"shortest_edge": (2 * side) ** 2, "longest_edge": (8 * side) ** 2},
    }  # fmt: skip
    frames = {"do_sample_frames": True, "fps": 2.0, "min_frames": 2, "max_frames": 16, "video_processor_type": video}
    return picture, {**picture, **frames, "size": film_size}


def _square(size: dict[str, int], mean: list[float], std: list[float], **more: Any) -> Any:
    """Processor settings of the families with a plain vision transformer."""
    common = {"do_resize": True, "do_rescale": True, "do_normalize": True, "resample": 3, "rescale_factor": 1 / 255}
    return {**common, "size": size, "image_mean": mean, "image_std": std, **more}, {}


PROCESSORS: dict[str, Callable[[Any], tuple[dict[str, Any], dict[str, Any]]]] = {
    "qwen2_vl": lambda _: _grid(
        14, CLIP_MEAN, CLIP_STD, "Qwen2VLVideoProcessor", {"shortest_edge": 56**2, "longest_edge": 224**2}
    ),
    **dict.fromkeys(
        ("glm4v", "glm46v", "glm4v_moe"),
        lambda _: _grid(
            14, CLIP_MEAN, CLIP_STD, "Glm4vVideoProcessor", {"shortest_edge": 112**2, "longest_edge": 60 * 56**2}
        ),
    ),
    "ernie4_5_vl_moe": lambda _: _grid(
        14, CLIP_MEAN, CLIP_STD, "Ernie4_5_VLMoeVideoProcessor", {"shortest_edge": 56**2, "longest_edge": 112**2}
    ),
    "hunyuan_vl": lambda _: _square(
        {"shortest_edge": 56**2, "longest_edge": 168**2},
        CLIP_MEAN,
        CLIP_STD,
        image_processor_type="HunYuanVLImageProcessor",
        patch_size=14,
        temporal_patch_size=1,
        merge_size=2,
    ),
    "clip_vision_model": lambda _: _square(
        {"shortest_edge": 56}, CLIP_MEAN, CLIP_STD, crop_size={"height": 56, "width": 56}
    ),
    "siglip_vision_model": lambda _: _square({"height": 56, "width": 56}, HALF, HALF, do_center_crop=False),
    "siglip2_vision_model": lambda _: _square({"height": 56, "width": 56}, HALF, HALF, do_center_crop=False),
    "pixtral": lambda _: _square({"longest_edge": 140}, CLIP_MEAN, CLIP_STD, patch_size={"height": 14, "width": 14}),
    "internvl": lambda _: _square(
        {"height": 56, "width": 56}, CLIP_MEAN, CLIP_STD, crop_to_patches=True, min_patches=1, max_patches=4
    ),
    "llama4": lambda _: _square({"height": 56, "width": 56}, HALF, HALF, max_patches=4),
    "gemma4": lambda _: (
        {"do_rescale": True, "do_normalize": False, "resample": 3, "max_soft_tokens": 16},
        {
            "do_rescale": True,
            "do_normalize": True,
            "image_mean": [0.0] * 3,
            "image_std": [1.0] * 3,
            "resample": 3,
            "max_soft_tokens": 8,
            "num_frames": 3,
        },
    ),
    "gemma3": lambda _: _square({"height": 112, "width": 112}, HALF, HALF, do_pan_and_scan=None, resample=2),
    "lfm2_vl": lambda _: _square(
        {"height": 56, "width": 56},
        HALF,
        HALF,
        resample=2,
        tile_size=56,
        min_image_tokens=2,
        max_image_tokens=6,
        max_tiles=4,
    ),
    "idefics3": lambda _: _square({"longest_edge": 168}, HALF, HALF, max_image_size={"longest_edge": 84}, resample=1),
    "smolvlm": lambda _: _square({"longest_edge": 168}, HALF, HALF, max_image_size={"longest_edge": 84}, resample=1),
    **dict.fromkeys(
        ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
        lambda _: _grid(
            16, HALF, HALF, "Qwen3VLVideoProcessor", {"shortest_edge": 4096, "longest_edge": 6 * 64 * 1024}
        ),
    ),
}
