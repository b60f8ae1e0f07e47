"""Shapes of models with pictures and audio: sizes are those of the named checkpoints, special tokens are ours.

`special` holds the ids of the special tokens, `files` the processor's files; only tests/bench/shapes.py uses both.
Sizes are those of the config.json of Qwen2.5-VL-7B, Qwen3-VL-8B, InternVL3-8B, Pixtral-12B, Qwen2.5-Omni-7B and
Gemma-3-12B on Hugging Face.
"""

from __future__ import annotations

from typing import Any

OURS = ("special", "files")  # not written into config.json
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|AUDIO|>", "<|vision_bos|>", "<|vision_eos|>", "<|IMAGE|>", "<|VIDEO|>")
MORE_SPECIAL = (*SPECIAL, "<|row_end|>")
CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}


def named(first: int) -> dict[str, int]:
    """Ids of the special tokens, beginning with `first`."""
    return {name: first + number for number, name in enumerate(MORE_SPECIAL)}


def both(ids: dict[str, int]) -> dict[str, Any]:
    """The config fields that vision models use for their special tokens, under both naming schemes."""
    tokens = {
        "image_token": ids["<|IMAGE|>"], "video_token": ids["<|VIDEO|>"], "audio_token": ids["<|AUDIO|>"],
    }  # fmt: skip
    return {
        **{f"{name}_{kind}": token for name, token in tokens.items() for kind in ("id", "index")},
        "vision_start_token_id": ids["<|vision_bos|>"],
        "vision_end_token_id": ids["<|vision_eos|>"],
        "torch_dtype": "bfloat16",
        "eos_token_id": ids["<|im_end|>"],
        "tie_word_embeddings": False,
        "special": ids,
    }


def grid(patch: int, look: dict[str, Any], most: int) -> dict[str, Any]:
    """The files of a processor that makes a grid of patches; a picture has at most `most` pixels."""
    side = 2 * patch
    picture = {
        "patch_size": patch, "temporal_patch_size": 2, "merge_size": 2, **look, "resample": 3,
        "size": {"shortest_edge": 4 * side**2, "longest_edge": most},
    }  # fmt: skip
    frames = {
        "fps": 2.0,
        "min_frames": 4,
        "max_frames": 768,
        "size": {"shortest_edge": 4 * side**2, "longest_edge": most},
    }
    return {"preprocessor_config.json": picture, "video_preprocessor_config.json": {**picture, **frames}}


def omni(text: dict[str, Any], vision: dict[str, Any], first: int, **more: Any) -> dict[str, Any]:
    """A Qwen2.5-Omni thinker: computes like Qwen2.5-VL; with `audio_config` among `more` it takes audio too."""
    return {
        "architectures": ["Qwen2_5OmniThinkerForConditionalGeneration"],
        "model_type": "qwen2_5_omni_thinker",
        "text_config": {**text, "rope_theta": 1000000.0, "hidden_act": "silu", "rms_norm_eps": 1e-6},
        "vision_config": {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, **vision},
        **both(named(first)),
        "files": grid(14, CLIP, 28 * 28 * 16384),
        **more,
    }


QWEN25_7B = {
    "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
    "intermediate_size": 18944, "vocab_size": 152064, "max_position_embeddings": 32768,
}  # fmt: skip
SECTIONS = {"rope_scaling": {"rope_type": "default", "mrope_section": [16, 24, 24]}}
QWEN25_TOWER = {"depth": 32, "hidden_size": 1280, "num_heads": 16, "intermediate_size": 3420, "out_hidden_size": 3584}
QWEN25_VL_7B = omni({**QWEN25_7B, **SECTIONS}, QWEN25_TOWER, 151644)
WHISPER_TOWER = {
    "d_model": 1280, "encoder_layers": 32, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120, "num_mel_bins": 128,
    "max_source_positions": 1500, "n_window": 100, "output_dim": 3584,
}  # fmt: skip
SOUND = {
    "feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 128, "sampling_rate": 16000,
    "hop_length": 160, "n_fft": 400, "chunk_length": 300, "n_samples": 4800000, "nb_max_frames": 30000,
}  # fmt: skip
QWEN25_OMNI_7B = omni({**QWEN25_7B, **SECTIONS}, QWEN25_TOWER, 151644, audio_config=WHISPER_TOWER)
QWEN25_OMNI_7B["files"]["preprocessor_config.json"] |= SOUND
QWEN3_VL_8B = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "text_config": {
        "model_type": "qwen3_vl_text", "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936,
        "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "rope_theta": 5000000.0, "hidden_act": "silu",
        "rope_scaling": {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True},
    },
    "vision_config": {
        "model_type": "qwen3_vl", "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16,
        "out_hidden_size": 4096, "num_position_embeddings": 2304, "deepstack_visual_indexes": [8, 16, 24],
        "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "hidden_act": "gelu_pytorch_tanh",
    },
    **both(named(151644)),
    "files": grid(16, HALF, 16777216),
}  # fmt: skip
INTERNVL3_8B = {
    "architectures": ["InternVLForConditionalGeneration"],
    "model_type": "internvl",
    "text_config": {
        **QWEN25_7B, "model_type": "qwen2", "vocab_size": 151674, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
        "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "hidden_act": "silu",
    },
    "vision_config": {
        "model_type": "internvl_vision", "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
        "intermediate_size": 4096, "image_size": [448, 448], "patch_size": [14, 14], "attention_bias": True,
        "use_qk_norm": False, "norm_type": "layer_norm", "layer_norm_eps": 1e-6, "hidden_act": "gelu",
    },
    "downsample_ratio": 0.5,
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "default",
    **both(named(151644)),
    "files": {
        "preprocessor_config.json": {
            "size": {"height": 448, "width": 448}, "crop_to_patches": True, "min_patches": 1, "max_patches": 12,
            "resample": 3, **IMAGENET,
        },
    },
}  # fmt: skip
PIXTRAL_12B = {
    "architectures": ["LlavaForConditionalGeneration"],
    "model_type": "llava",
    "text_config": {
        "model_type": "mistral", "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336, "vocab_size": 131072,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1000000000.0, "hidden_act": "silu",
        "sliding_window": None,
    },
    "vision_config": {
        "model_type": "pixtral", "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
        "head_dim": 64, "intermediate_size": 4096, "image_size": 1024, "patch_size": 16, "rope_theta": 10000.0,
        "hidden_act": "silu",
    },
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
    **both(named(131000)),
    "files": {
        "preprocessor_config.json": {
            "size": {"longest_edge": 1024}, "patch_size": {"height": 16, "width": 16}, "resample": 3, **CLIP
        },
        "processor_config.json": {"image_break_token": "<|row_end|>", "image_end_token": "<|vision_eos|>"},
    },
}  # fmt: skip
GEMMA3_SEEING = {  # its decoder is shapes.GEMMA3_12B
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "vision_config": {
        "model_type": "siglip_vision_model", "hidden_size": 1152, "num_hidden_layers": 27, "num_attention_heads": 16,
        "intermediate_size": 4304, "image_size": 896, "patch_size": 14, "vision_use_head": False,
    },
    "mm_tokens_per_image": 256,
    **both(named(262144)),
    # In this family a template writes the token that begins a picture; other tokens stand for its rows.
    "boi_token_index": named(262144)["<|IMAGE|>"],
    "eoi_token_index": named(262144)["<|vision_eos|>"],
    "image_token_id": named(262144)["<|row_end|>"],
    "image_token_index": named(262144)["<|row_end|>"],
    "files": {
        "preprocessor_config.json": {
            "size": {"height": 896, "width": 896}, "do_pan_and_scan": None, "resample": 2, **HALF
        },
    },
}  # fmt: skip
TINY_VL = omni(
    {
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 256,
        "vocab_size": 2048,
        "max_position_embeddings": 4096,
        "rope_scaling": {"rope_type": "default", "mrope_section": [4, 6, 6]},
    },
    {"depth": 2, "hidden_size": 64, "num_heads": 2, "intermediate_size": 96, "out_hidden_size": 128}
    | {"fullatt_block_indexes": [1]},
    2000,
)
SEEING = {
    "vl-7b": QWEN25_VL_7B,
    "vl3-8b": QWEN3_VL_8B,
    "internvl3-8b": INTERNVL3_8B,
    "pixtral-12b": PIXTRAL_12B,
    "omni-7b": QWEN25_OMNI_7B,
    "tiny-vl": TINY_VL,
}
