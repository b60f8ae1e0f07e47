"""Tiny random checkpoints in Hugging Face format, one function per architecture, for every test that needs a model.

`checkpoint("qwen3")` gives the folder of a finished checkpoint: config.json, model.safetensors, tokenizer.json
(byte-level), tokenizer_config.json, chat_template.jinja, generation_config.json and, for models with towers, the
processors' files. Weights are seeded and large enough that logits differ clearly from token to token. Folders are made
once, by transformers, and cached in the temporary directory under a name that changes with this file and with
transformers, so several test processes share them. Never change the files of such a folder: copy the folder first.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

VOCAB_SIZE = 320  # rows of the embedding; the tokenizer uses fewer, like real tokenizers
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_bos|>",
    "<|vision_eos|>",
    "<|vision_pad|>",
    "<|IMAGE|>",
    "<|VIDEO|>",
    "<|audio_bos|>",
    "<|audio_eos|>",
    "<|AUDIO|>",
)
MERGES = ("t h", "th e", "i n", "Ġ the", "a n", "e r", "o n", "r e", "an d", "Ġ a", "Ġ t", "Ġ and")
FIRST_SPECIAL = 256 + len(MERGES)
IDS = {token: FIRST_SPECIAL + index for index, token in enumerate(SPECIAL)}  # special token -> id
CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}
{%- for part in message['content'] -%}
{%- if part['type'] in ('image', 'image_url') -%}<|vision_bos|><|IMAGE|><|vision_eos|>
{%- elif part['type'] in ('video', 'video_url') -%}<|vision_bos|><|VIDEO|><|vision_eos|>
{%- elif part['type'] in ('audio', 'audio_url', 'input_audio') -%}<|audio_bos|><|AUDIO|><|audio_eos|>
{%- else -%}{{ part['text'] }}{%- endif -%}
{%- endfor -%}
{%- endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""
MAKERS = ("chatglm", "dots_ocr", "kimi_vl", "minicpmv")  # modules of tests/models with checkpoints of their own
PATCH, MERGE, TEMPORAL, CHANNELS, MELS = 14, 2, 2, 3, 32  # of the omni towers
KEPT_AS_WEIGHT_LESS_1 = (  # the gains of norms
    "gemma", "gemma2", "gemma3_text", "nemotron", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text",
    "qwen3_next",
)  # fmt: skip
_SMALL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": IDS["<|im_end|>"],
    "pad_token_id": IDS["<|endoftext|>"],
}


_VISION = {
    "depth": 4,
    "hidden_size": 64,
    "intermediate_size": 90,
    "num_heads": 2,
    "in_channels": CHANNELS,
    "patch_size": PATCH,
    "temporal_patch_size": TEMPORAL,
    "spatial_merge_size": MERGE,
    "window_size": 4 * PATCH,
    "fullatt_block_indexes": [1, 3],
    "out_hidden_size": 128,
}


def llama(**overrides: Any) -> Any:
    """LlamaForCausalLM with plain rotary positions; `overrides` may set `rope_scaling` and biases."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return _model(LlamaForCausalLM, LlamaConfig(**{**_SMALL, **overrides}))


def mistral(**overrides: Any) -> Any:
    """MistralForCausalLM whose heads are wider than hidden_size / heads; no window."""
    from transformers import MistralConfig, MistralForCausalLM

    return _model(MistralForCausalLM, MistralConfig(**{**_SMALL, "head_dim": 32, "sliding_window": None, **overrides}))


def qwen2(**overrides: Any) -> Any:
    """Qwen2ForCausalLM: biases on q, k, v; tied embeddings; a sliding_window that is switched off."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return _model(
        Qwen2ForCausalLM, Qwen2Config(**{**_SMALL, "tie_word_embeddings": True, "sliding_window": 8, **overrides})
    )


def qwen3(**overrides: Any) -> Any:
    """Qwen3ForCausalLM: norms per head; head_dim differs from hidden_size / heads."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return _model(Qwen3ForCausalLM, Qwen3Config(**{**_SMALL, "head_dim": 32, **overrides}))


def omni(**overrides: Any) -> Any:
    """Qwen2_5OmniThinkerForConditionalGeneration: text, image, video, audio; overrides go to the text part."""
    from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniThinkerConfig
    from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniThinkerForConditionalGeneration

    text = {
        **_SMALL,
        "hidden_size": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 6, 6]},
        "tie_word_embeddings": False,
        "max_position_embeddings": 2048,
        **overrides,
    }
    audio = {
        "num_mel_bins": MELS,
        "encoder_layers": 2,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 112,
        "d_model": 64,
        "max_source_positions": 300,
        "n_window": 50,
        "output_dim": 128,
    }
    config = Qwen2_5OmniThinkerConfig(
        text_config=text,
        vision_config=_VISION,
        audio_config=audio,
        audio_token_index=IDS["<|AUDIO|>"],
        image_token_index=IDS["<|IMAGE|>"],
        video_token_index=IDS["<|VIDEO|>"],
        audio_start_token_id=IDS["<|audio_bos|>"],
        audio_end_token_id=IDS["<|audio_eos|>"],
        vision_start_token_id=IDS["<|vision_bos|>"],
        vision_end_token_id=IDS["<|vision_eos|>"],
        user_token_id=IDS["<|im_start|>"],
        eos_token_id=IDS["<|im_end|>"],
        pad_token_id=IDS["<|endoftext|>"],
    )
    return _model(Qwen2_5OmniThinkerForConditionalGeneration, config)


def qwen2_5_vl(**overrides: Any) -> Any:
    """Qwen2_5_VLForConditionalGeneration: text, image, video; overrides go to the text part."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    text = {
        **_SMALL,
        "hidden_size": 128,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 6, 6]},
        "max_position_embeddings": 2048,
        **overrides,
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config={**_VISION, "tokens_per_second": 4},
        image_token_id=IDS["<|IMAGE|>"],
        video_token_id=IDS["<|VIDEO|>"],
        vision_start_token_id=IDS["<|vision_bos|>"],
        vision_end_token_id=IDS["<|vision_eos|>"],
        tie_word_embeddings=False,
        eos_token_id=IDS["<|im_end|>"],
        pad_token_id=IDS["<|endoftext|>"],
    )
    return _model(Qwen2_5_VLForConditionalGeneration, config)


def gemma2(**overrides: Any) -> Any:
    """Gemma2ForCausalLM with silu, windows on every other layer, and caps that the tiny logits reach."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    own = {"head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 24, "tie_word_embeddings": True}
    caps = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 4.0}
    activation = {"hidden_activation": "silu", "hidden_act": "silu"}
    return _model(Gemma2ForCausalLM, Gemma2Config(**{**_SMALL, **own, **caps, **activation, **overrides}))


_ODD = {  # no width is a multiple of a usual tile
    **_SMALL,
    "vocab_size": 331,
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
_NEAR, _FAR = "sliding_attention", "full_attention"
_WINDOWS = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 8}
_SCALED = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}


def causal(architecture: str, config: str, **settings: Any) -> Callable[[], Any]:
    """A text decoder of transformers with odd sizes; `settings` go to its configuration."""

    def made() -> Any:
        import transformers

        given = {**_ODD, **settings}
        return _model(getattr(transformers, architecture), getattr(transformers, config)(**given))

    return made


def longrope(original: int) -> dict[str, Any]:
    """Heads of 20 dimensions, 14 of them rotated; beyond `original` of the 512 positions the long factors apply."""
    factors = {"short_factor": [1.0 + 0.1 * k for k in range(7)], "long_factor": [1.5 + 0.9 * k for k in range(7)]}
    rope = {"rope_type": "longrope", **factors, "original_max_position_embeddings": original}
    rope = {**rope, "partial_rotary_factor": 0.7, "rope_theta": 1e4}
    return {"hidden_size": 120, "rope_parameters": rope, "original_max_position_embeddings": original}


FAMILIES: dict[str, Callable[[], Any]] = {  # each family, and the config variants of released checkpoints
    "gemma": causal("GemmaForCausalLM", "GemmaConfig", head_dim=20, num_key_value_heads=1),
    "gemma2": causal(
        "Gemma2ForCausalLM", "Gemma2Config", head_dim=20, query_pre_attn_scalar=24, attn_logit_softcapping=5.0,
        final_logit_softcapping=4.0, sliding_window=8,
    ),
    "gemma3": causal(
        "Gemma3ForCausalLM", "Gemma3TextConfig", head_dim=20, query_pre_attn_scalar=24, num_hidden_layers=4,
        sliding_window=8, layer_types=["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        rope_parameters={"full_attention": _SCALED, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}},
    ),
    "gemma4": causal(  # as E2B: layers that share another layer's keys, and embeddings per layer
        "Gemma4ForCausalLM", "Gemma4TextConfig", head_dim=12, global_head_dim=24, num_hidden_layers=7,
        num_kv_shared_layers=3, use_double_wide_mlp=True, hidden_size_per_layer_input=10, sliding_window=8,
        final_logit_softcapping=4.0, tie_word_embeddings=True, vocab_size_per_layer_input=331,
        layer_types=[_NEAR, _NEAR, _FAR, _NEAR, _NEAR, _NEAR, _FAR],
    ),
    "gemma4-moe": causal(  # as 26B-A4B: experts in parallel with every MLP
        "Gemma4ForCausalLM", "Gemma4TextConfig", head_dim=12, global_head_dim=24, num_hidden_layers=3,
        attention_k_eq_v=True, num_key_value_heads=3, num_global_key_value_heads=1, hidden_size_per_layer_input=0,
        sliding_window=8, tie_word_embeddings=True, layer_types=[_NEAR, _NEAR, _FAR], enable_moe_block=True,
        num_experts=7, top_k_experts=3, moe_intermediate_size=36,
    ),
    "gemma4-large": causal(  # as 31B: values equal keys in layers with full attention
        "Gemma4ForCausalLM", "Gemma4TextConfig", head_dim=12, global_head_dim=24, num_hidden_layers=4,
        attention_k_eq_v=True, num_key_value_heads=3, num_global_key_value_heads=1, hidden_size_per_layer_input=0,
        sliding_window=8, tie_word_embeddings=True,
        layer_types=[_NEAR, _FAR, _NEAR, _FAR],
    ),
    "phi3": causal("Phi3ForCausalLM", "Phi3Config", sliding_window=None, tie_word_embeddings=True),
    "phi3-short": causal("Phi3ForCausalLM", "Phi3Config", **longrope(512)),
    "granite": causal(
        "GraniteForCausalLM", "GraniteConfig", embedding_multiplier=12.0, attention_multiplier=0.2,
        residual_multiplier=0.22, logits_scaling=8.0,
    ),
    "glm": causal("GlmForCausalLM", "GlmConfig", head_dim=20, partial_rotary_factor=0.5),
    "glm4": causal("Glm4ForCausalLM", "Glm4Config", head_dim=24, num_attention_heads=8, num_key_value_heads=1),
    "olmo2": causal("Olmo2ForCausalLM", "Olmo2Config"),
    "olmo3": causal("Olmo3ForCausalLM", "Olmo3Config", **_WINDOWS),
    "cohere": causal("CohereForCausalLM", "CohereConfig"),
    "cohere-norms": causal("CohereForCausalLM", "CohereConfig", use_qk_norm=True),
    "cohere2": causal("Cohere2ForCausalLM", "Cohere2Config", **_WINDOWS),
    "smollm3": causal("SmolLM3ForCausalLM", "SmolLM3Config", no_rope_layers=[1, 0, 1]),
    "exaone4": causal("Exaone4ForCausalLM", "Exaone4Config", **_WINDOWS),
    "exaone4-full": causal(
        "Exaone4ForCausalLM", "Exaone4Config", sliding_window=None, layer_types=["full_attention"] * 3
    ),
    "ministral3": causal(
        "Ministral3ForCausalLM", "Ministral3Config", head_dim=20, sliding_window=None,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": 32,
            "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
        },
    ),
    "seed_oss": causal("SeedOssForCausalLM", "SeedOssConfig", head_dim=20),
    "starcoder2": causal("Starcoder2ForCausalLM", "Starcoder2Config", sliding_window=8),
    "stablelm": causal("StableLmForCausalLM", "StableLmConfig", hidden_size=96, use_qkv_bias=True),
    "stablelm-parallel": causal(
        "StableLmForCausalLM", "StableLmConfig", hidden_size=96, use_parallel_residual=True, qk_layernorm=True
    ),
    "nemotron": causal("NemotronForCausalLM", "NemotronConfig", head_dim=20),
    "apertus": causal("ApertusForCausalLM", "ApertusConfig"),
    "arcee": causal("ArceeForCausalLM", "ArceeConfig", head_dim=20),
    "hunyuan": causal(
        "HunYuanDenseV1ForCausalLM", "HunYuanDenseV1Config", head_dim=20,
        rope_parameters={"rope_type": "dynamic", "factor": 1.0, "alpha": 50.0, "rope_theta": 1e4},
    ),
    "gpt_neox": causal("GPTNeoXForCausalLM", "GPTNeoXConfig", hidden_size=96, num_key_value_heads=None),
    "gpt_neox-sequential": causal(
        "GPTNeoXForCausalLM", "GPTNeoXConfig", hidden_size=96, num_key_value_heads=None, use_parallel_residual=False,
        hidden_act="relu",
    ),
    "gpt2": causal(
        "GPT2LMHeadModel", "GPT2Config", n_embd=72, n_layer=3, n_head=6, n_positions=512, num_key_value_heads=None,
        scale_attn_by_inverse_layer_idx=True,
    ),
    "opt": causal("OPTForCausalLM", "OPTConfig", ffn_dim=100, num_key_value_heads=None),
    "llama-gelu": lambda: llama(hidden_act="gelu"),
    "lfm2": causal(
        "Lfm2ForCausalLM", "Lfm2Config", num_hidden_layers=5, full_attn_idxs=[2, 3], block_multiple_of=8,
        tie_embedding=True,
    ),
    "lfm2-biased": causal(
        "Lfm2ForCausalLM", "Lfm2Config", num_hidden_layers=4, layer_types=["conv", _FAR, _FAR, _FAR], conv_bias=True,
        conv_L_cache=4, block_auto_adjust_ff_dim=False,
    ),
    "qwen3_moe": causal(
        "Qwen3MoeForCausalLM", "Qwen3MoeConfig", head_dim=20, num_experts=13, num_experts_per_tok=5,
        moe_intermediate_size=40, norm_topk_prob=True, mlp_only_layers=[1],
    ),
    "llama4": causal(
        "Llama4ForCausalLM", "Llama4TextConfig", head_dim=20, num_hidden_layers=5, intermediate_size=44,
        intermediate_size_mlp=100, num_local_experts=7, interleave_moe_layer_step=2, no_rope_layers=[1, 1, 0, 1, 0],
        attention_chunk_size=11, floor_scale=8, attn_scale=0.4,
        rope_parameters={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0,
                         "original_max_position_embeddings": 64, "rope_theta": 1e4},
    ),
    "qwen2_moe": causal(
        "Qwen2MoeForCausalLM", "Qwen2MoeConfig", num_experts=6, num_experts_per_tok=3, moe_intermediate_size=36,
        shared_expert_intermediate_size=44, decoder_sparse_step=2,
    ),
}  # fmt: skip

_EXPERTS = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 1, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
_LATENT = {
    "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 16,
    "num_key_value_heads": 6,
}  # fmt: skip
THROUGH_TRANSFORMERS: dict[str, Callable[[], Any]] = {  # architectures without a model file of ours
    "olmo": causal("OlmoForCausalLM", "OlmoConfig"),
    "ernie4_5": causal("Ernie4_5ForCausalLM", "Ernie4_5Config", tie_word_embeddings=True),
    "helium": causal("HeliumForCausalLM", "HeliumConfig", head_dim=12),
    "phi": causal("PhiForCausalLM", "PhiConfig"),
    "persimmon": causal("PersimmonForCausalLM", "PersimmonConfig", num_key_value_heads=None, hidden_size=96),
    "cwm": causal("CwmForCausalLM", "CwmConfig", bos_token_id=1, head_dim=20, **_WINDOWS),
    "vaultgemma": causal(
        "VaultGemmaForCausalLM", "VaultGemmaConfig", head_dim=20, sliding_window=8, attn_logit_softcapping=5.0,
        layer_types=_WINDOWS["layer_types"],
    ),
    "gpt_bigcode": causal(
        "GPTBigCodeForCausalLM", "GPTBigCodeConfig", n_embd=72, n_layer=3, n_head=6, n_positions=512
    ),
    "diff_llama": causal("DiffLlamaForCausalLM", "DiffLlamaConfig"),
    "nanochat": causal("NanoChatForCausalLM", "NanoChatConfig"),
    "deepseek_v3": causal("DeepseekV3ForCausalLM", "DeepseekV3Config", **_LATENT, **_EXPERTS),
    "dots1": causal("Dots1ForCausalLM", "Dots1Config", **_EXPERTS),
    "flex_olmo": causal("FlexOlmoForCausalLM", "FlexOlmoConfig", num_experts=5, num_experts_per_tok=2),
}  # fmt: skip

_GROUPS = {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 4, "routed_scaling_factor": 1.8}
SPARSE: dict[str, Callable[[], Any]] = {  # more families with experts
    "phimoe": causal(
        "PhimoeForCausalLM", "PhimoeConfig", num_local_experts=5, intermediate_size=36, attention_bias=True,
        lm_head_bias=True, router_jitter_noise=0.2,
    ),
    "mixtral": causal("MixtralForCausalLM", "MixtralConfig", num_local_experts=5, intermediate_size=60),
    "gpt_oss": causal(
        "GptOssForCausalLM", "GptOssConfig", head_dim=20, num_local_experts=7, num_experts_per_tok=3,
        intermediate_size=40, **_WINDOWS,
    ),
    "glm4_moe": causal(
        "Glm4MoeForCausalLM", "Glm4MoeConfig", head_dim=24, n_routed_experts=12, moe_intermediate_size=36,
        use_qk_norm=True, attention_bias=True, **_GROUPS,
    ),
    "minimax_m2": causal(
        "MiniMaxM2ForCausalLM", "MiniMaxM2Config", head_dim=24, rotary_dim=12, num_local_experts=9,
        num_experts_per_tok=4, intermediate_size=36,
    ),
    "olmoe": causal("OlmoeForCausalLM", "OlmoeConfig", num_experts=6, num_experts_per_tok=2, intermediate_size=36),
    "olmoe_clipped": causal(
        "OlmoeForCausalLM", "OlmoeConfig", num_experts=6, num_experts_per_tok=2, intermediate_size=36, clip_qkv=0.3,
        norm_topk_prob=True,
    ),
    "dbrx": causal(
        "DbrxForCausalLM", "DbrxConfig", d_model=72, attn_config={"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 0.3},
        ffn_config={"moe_num_experts": 5, "moe_top_k": 2, "ffn_hidden_size": 36},
    ),
    "dbrx_unscaled": causal(
        "DbrxForCausalLM", "DbrxConfig", d_model=72, attn_config={"kv_n_heads": 1, "rope_theta": 1e4, "clip_qkv": 8},
        ffn_config={"moe_num_experts": 7, "moe_top_k": 3, "ffn_hidden_size": 20, "moe_normalize_expert_weights": None},
    ),
    "granite_moe": causal(
        "GraniteMoeForCausalLM", "GraniteMoeConfig", num_local_experts=5, num_experts_per_tok=3, intermediate_size=36,
        embedding_multiplier=12.0, attention_multiplier=0.2, residual_multiplier=0.22, logits_scaling=8.0,
    ),
    "ernie4_5_moe": causal(
        "Ernie4_5_MoeForCausalLM", "Ernie4_5_MoeConfig", moe_num_experts=8, moe_k=3, moe_intermediate_size=36,
        moe_norm_min=0.9,
    ),
    "hunyuan_moe": causal(
        "HunYuanMoEV1ForCausalLM", "HunYuanMoEV1Config", head_dim=20, num_experts=6, moe_topk=2, intermediate_size=36,
    ),
    "lfm2_moe": causal(
        "Lfm2MoeForCausalLM", "Lfm2MoeConfig", num_hidden_layers=5, layer_types=["conv", "conv", _FAR, "conv", "conv"],
        num_experts=9, num_experts_per_tok=3, moe_intermediate_size=36, routed_scaling_factor=1.3,
    ),
    "exaone_moe": causal(
        "ExaoneMoeForCausalLM", "ExaoneMoeConfig", head_dim=20, num_experts=12, moe_intermediate_size=36,
        num_shared_experts=2, **_WINDOWS, **_GROUPS,
    ),
}  # fmt: skip

_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
CHECKPOINTS: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "llama-linear": lambda: llama(rope_scaling={"rope_type": "linear", "factor": 4.0}, attention_bias=True),
    "llama-dynamic": lambda: llama(rope_scaling={"rope_type": "dynamic", "factor": 2.0}, mlp_bias=True),
    "llama-llama3": lambda: llama(
        rope_scaling={**_LLAMA3, "original_max_position_embeddings": 64}, tie_word_embeddings=True
    ),
    "llama-yarn": lambda: llama(rope_scaling=_YARN),
    "mistral": mistral,
    "mistral-window": lambda: mistral(sliding_window=8),
    "qwen2": qwen2,
    "qwen2-window": lambda: qwen2(use_sliding_window=True, max_window_layers=1),
    "qwen3": qwen3,
    **FAMILIES,
    **SPARSE,
    "omni": omni,
    "qwen2_5_vl": qwen2_5_vl,
}


@functools.cache
def checkpoint(name: str) -> Path:
    """The folder of a checkpoint, made on first use; callers only read the folder."""
    from tests.tiny_films import CHECKPOINTS as FILMS
    from tests.tiny_seeing import CHECKPOINTS as SEEING
    from tests.tiny_states import CHECKPOINTS as STATES
    from tests.tiny_through import CHECKPOINTS as THROUGH

    names = ("tiny.py", "tiny_seeing.py", "tiny_through.py", "tiny_films.py", "tiny_states.py")
    names += tuple(f"models/{name}.py" for name in MAKERS)
    sources = b"".join((Path(__file__).parent / name).read_bytes() for name in names)
    digest = hashlib.sha256(sources + importlib.metadata.version("transformers").encode())
    root = Path(tempfile.gettempdir()) / f"omniloop-tiny-{os.getuid()}-{digest.hexdigest()[:12]}"
    root.mkdir(mode=0o700, exist_ok=True)
    folder = root / name
    if not folder.is_dir():
        draft = Path(tempfile.mkdtemp(dir=root))
        modules = [importlib.import_module(f"tests.models.{module}") for module in MAKERS]
        own = next((module for module in modules if name in module.CHECKPOINTS), None)
        if own is not None:
            own.checkpoint(draft, own.CHECKPOINTS[name])
        else:
            save({**CHECKPOINTS, **THROUGH_TRANSFORMERS, **SEEING, **STATES, **THROUGH, **FILMS}[name](), draft)
        try:
            draft.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(draft)
    return folder


def save(model: Any, folder: Path, dtype: str = "float32", max_shard_size: str = "1GB") -> Path:
    """Writes every file of a served folder; a `max_shard_size` such as "50KB" makes a sharded checkpoint."""
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    with quiet():
        model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=max_shard_size)
    eos = [IDS["<|im_end|>"], IDS["<|endoftext|>"]]
    _write(folder / "generation_config.json", {"eos_token_id": eos, "pad_token_id": eos[1], "do_sample": False})
    write_tokenizer(folder)
    from tests import tiny_films, tiny_seeing, tiny_through

    kind = getattr(model, "processors", model.config.model_type)
    processors = {**tiny_through.PROCESSORS, **tiny_films.PROCESSORS}
    if kind in processors:
        tiny_through.write_processors(kind, folder, processors[kind])
    elif getattr(model.config, "audio_config", None) or model.config.model_type == "qwen2_5_vl":
        _write_processors(folder)
    elif hasattr(model.config, "vision_config"):
        tiny_seeing.write_processors(model.config, folder)
    return folder


def reference(folder: Path, dtype: str = "float32") -> Any:
    """The reference: the checkpoint loaded by transformers."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    with quiet():
        options = {"dtype": getattr(torch, dtype), "attn_implementation": "eager"}
        config = AutoConfig.from_pretrained(folder)
        if hasattr(config, "vision_config") and not hasattr(config, "audio_config"):
            return AutoModelForImageTextToText.from_pretrained(folder, **options).eval()
        if config.model_type != "qwen2_5_omni_thinker":
            return AutoModelForCausalLM.from_pretrained(folder, **options).eval()
        from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniThinkerForConditionalGeneration

        return Qwen2_5OmniThinkerForConditionalGeneration.from_pretrained(folder, **options).eval()


def write_tokenizer(folder: Path) -> None:
    """Writes a byte-level BPE tokenizer with a few merges and the special tokens, and the chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [tuple(merge.split()) for merge in MERGES]
    vocab = {token: index for index, token in enumerate([*letters, *("".join(pair) for pair in pairs)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    assert {token: tokenizer.token_to_id(token) for token in SPECIAL} == IDS
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {
        "image_token": "<|IMAGE|>",
        "video_token": "<|VIDEO|>",
        "audio_token": "<|AUDIO|>",
        "vision_bos_token": "<|vision_bos|>",
        "vision_eos_token": "<|vision_eos|>",
        "audio_bos_token": "<|audio_bos|>",
        "audio_eos_token": "<|audio_eos|>",
    }
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 512,
        "clean_up_tokenization_spaces": False,
        "extra_special_tokens": named,
    }
    _write(folder / "tokenizer_config.json", settings)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def _write_processors(folder: Path) -> None:
    picture = {
        "processor_class": "Qwen2_5OmniProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "resample": 3,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "min_pixels": (2 * PATCH * MERGE) ** 2,
        "max_pixels": (8 * PATCH * MERGE) ** 2,
        "patch_size": PATCH,
        "temporal_patch_size": TEMPORAL,
        "merge_size": MERGE,
    }
    picture["size"] = {"shortest_edge": picture["min_pixels"], "longest_edge": picture["max_pixels"]}
    sound = {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": MELS,
        "sampling_rate": 16000,
        "hop_length": 160,
        "n_fft": 400,
        "chunk_length": 30,
        "n_samples": 480000,
        "nb_max_frames": 3000,
        "padding_side": "right",
        "padding_value": 0.0,
        "dither": 0.0,
        "return_attention_mask": True,
    }
    _write(folder / "preprocessor_config.json", {**picture, "image_processor_type": "Qwen2VLImageProcessor", **sound})
    frames = {"do_sample_frames": True, "fps": 2.0, "min_frames": 2, "max_frames": 16}
    film = {**picture, "video_processor_type": "Qwen2VLVideoProcessor", **frames}
    _write(folder / "video_preprocessor_config.json", film)


def _model(kind: Any, config: Any) -> Any:
    """A model with seeded weights: norms near 1, small biases, matrices that preserve the magnitude of their input."""
    import torch

    with quiet():
        model = kind._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, tensor in sorted(model.named_parameters()):
            seed = hashlib.sha256(name.encode()).digest()[:6]
            generator = torch.Generator().manual_seed(int.from_bytes(seed, "little"))
            if not tensor.dim():
                continue
            if tensor.dim() == 1:
                gain = 0.0 if config.model_type in KEPT_AS_WEIGHT_LESS_1 else 1.0
                tensor.normal_(gain if name.endswith("weight") else 0.0, 0.1, generator=generator)
            else:
                free = "embed_tokens" in name and not config.tie_word_embeddings
                matrix = tensor[0] if ".experts." in name else tensor  # the fan-in of one expert
                fan_in = 1.0 if free else matrix[0].numel()
                tensor.normal_(0.0, 1.5 * fan_in**-0.5, generator=generator)
        model.tie_weights()
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(len(name)))
            if name.endswith(("layer_scalar", "std_bias", "std_scale")):
                buffer.normal_(1.0, 0.2, generator=torch.Generator().manual_seed(sum(name.encode())))
            if name.endswith(("put_min", "put_max")):  # bounds for the inputs and outputs of matrix products
                buffer.fill_(0.9 if name.endswith("max") else -0.8)
    return model


def seeded(kind: Any, config: Any) -> Any:
    """A model of a class of transformers, with seeded weights."""
    return _model(kind, config)


def quiet() -> Any:
    """Silences warnings of transformers about its own internals while loading: tests treat warnings as errors."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from transformers.utils import logging

    logging.disable_progress_bar()
    return warnings.catch_warnings(action="ignore")


def _write(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
