"""Configurations of hybrid models for shapes.py: published sizes, random weights."""

from __future__ import annotations

from typing import Any

LINEAR, FULL = "linear_attention", "full_attention"
ROPE = {
    "rope_type": "default",
    "rope_theta": 10_000_000.0,
    "partial_rotary_factor": 0.25,
    "mrope_section": [11, 11, 10],
    "mrope_interleaved": True,
}


def qwen(layers: int, **numbers: Any) -> dict[str, Any]:
    """A configuration of Qwen3.5; every fourth layer has attention, the others have states."""
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "num_hidden_layers": layers,
        "layer_types": [LINEAR, LINEAR, LINEAR, FULL] * (layers // 4),
        "head_dim": 256,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_conv_kernel_dim": 4,
        "vocab_size": 248_320,
        "max_position_embeddings": 262_144,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "attn_output_gate": True,
        "rope_parameters": ROPE,
        "tie_word_embeddings": False,
        "mtp_num_hidden_layers": 0,
        "torch_dtype": "bfloat16",
        "eos_token_id": 248_044,
        **numbers,
    }


EXPERTS = {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
QWEN_35B_A3B = qwen(
    40,
    hidden_size=2048,
    num_attention_heads=16,
    num_key_value_heads=2,
    linear_num_value_heads=32,
    **EXPERTS,
)
QWEN_27B = qwen(
    64,
    hidden_size=5120,
    num_attention_heads=24,
    num_key_value_heads=4,
    linear_num_value_heads=48,
    intermediate_size=17_408,
)


def in_fp8(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration in FP8, one scale per block of 128 x 128; routers, gates of states, head stay bfloat16."""
    floats = ["linear_attn.in_proj_a", "linear_attn.in_proj_b", "mlp.gate", "mlp.shared_expert_gate"]
    layers = range(config["num_hidden_layers"])
    skipped = [f"model.layers.{layer}.{name}" for layer in layers for name in floats]
    said = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    return {**config, "quantization_config": {**said, "modules_to_not_convert": ["lm_head", *skipped]}}


NANO = {  # Nemotron 3 Nano 30B-A3B: 23 layers of Mamba-2, 6 of attention, 23 of experts
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "num_hidden_layers": 52,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "hidden_size": 2688,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 1856,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "use_bias": False,
    "attention_bias": False,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "mamba_hidden_act": "silu",
    "layer_norm_epsilon": 1e-5,
    "vocab_size": 131_072,
    "max_position_embeddings": 262_144,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}
STATES = {
    "qwen-35b-a3b": QWEN_35B_A3B,
    "qwen-27b": QWEN_27B,
    "nano": NANO,
    "qwen-35b-a3b-fp8": in_fp8(QWEN_35B_A3B),
    "qwen-27b-fp8": in_fp8(QWEN_27B),
}
