"""Tiny random checkpoints of hybrid families, in Hugging Face format; see tests/tiny.py.

ATTENTION: checkpoints without states: each layer has attention, or only an MLP or experts. STATES: checkpoints with
layers that have states. SEEING: checkpoints with states and towers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests import tiny
from tests.tiny_seeing import QWEN, TEXT

FULL = "full_attention"
GATED = {"head_dim": 40, "layer_types": [FULL] * 3}
EXPERTS = {
    "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 36, "shared_expert_intermediate_size": 44,
}  # fmt: skip
AXES = {
    "rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 2, 1], "mrope_interleaved": True,
    "partial_rotary_factor": 0.25,
}  # fmt: skip
NEMOTRON = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 36, "routed_scaling_factor": 2.5,
    "moe_shared_expert_intermediate_size": 44,
}  # fmt: skip
MULTIPLIERS = {
    "embedding_multiplier": 12.0, "attention_multiplier": 0.2, "residual_multiplier": 0.22, "logits_scaling": 8.0,
}  # fmt: skip
MAMBA2 = {"mamba_n_heads": 6, "mamba_d_head": 24, "mamba_d_state": 16}


def qwen3_5(kind: str = "Qwen3_5", **text: Any) -> Any:
    """Qwen3_5ForConditionalGeneration, or its variant with experts; a quarter of each head is rotated."""
    import transformers

    vision = {
        "depth": 3, "hidden_size": 72, "intermediate_size": 100, "num_heads": 2, "out_hidden_size": 96,
        "num_position_embeddings": 36,
    }  # fmt: skip
    text = {**TEXT, "rope_parameters": AXES, **text}
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=vision, **QWEN)
    return tiny.seeded(getattr(transformers, f"{kind}ForConditionalGeneration"), config)


ATTENTION: dict[str, Callable[[], Any]] = {
    "qwen3_5_text": tiny.causal("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", **GATED, rope_parameters=AXES),
    "qwen3_5_text-biased": tiny.causal(
        "Qwen3_5ForCausalLM", "Qwen3_5TextConfig", **GATED, attention_bias=True, tie_word_embeddings=True,
        rope_parameters=AXES,
    ),
    "qwen3_5_moe_text": tiny.causal(
        "Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", **GATED, **EXPERTS, rope_parameters=AXES
    ),
    "qwen3_next": tiny.causal(
        "Qwen3NextForCausalLM", "Qwen3NextConfig", **GATED, **EXPERTS, mlp_only_layers=[1], norm_topk_prob=True,
    ),
    "nemotron_h": tiny.causal(
        "NemotronHForCausalLM", "NemotronHConfig", head_dim=20, hidden_size=64,
        layers_block_type=[FULL, "mlp", "moe", FULL, "moe"], **NEMOTRON,
    ),
    "nemotron_h-latent": tiny.causal(
        "NemotronHForCausalLM", "NemotronHConfig", head_dim=20, layers_block_type=["moe", FULL, "mlp", "moe"],
        moe_latent_size=28, n_group=2, topk_group=1, **NEMOTRON,
    ),
    "bamba": tiny.causal("BambaForCausalLM", "BambaConfig", attn_layer_indices=[0, 1, 2], **MAMBA2),
    "jamba": tiny.causal(
        "JambaForCausalLM", "JambaConfig", attn_layer_period=1, attn_layer_offset=0, num_experts=5, pad_token_id=0
    ),
    "granite_hybrid": tiny.causal(
        "GraniteMoeHybridForCausalLM", "GraniteMoeHybridConfig", layer_types=[FULL] * 3, num_local_experts=5,
        num_experts_per_tok=3, shared_intermediate_size=44, **MULTIPLIERS, **MAMBA2,
    ),
    "granite_hybrid-dense": tiny.causal(
        "GraniteMoeHybridForCausalLM", "GraniteMoeHybridConfig", layer_types=[FULL] * 3, num_local_experts=0,
        shared_intermediate_size=44, position_embedding_type="rope", tie_word_embeddings=True, **MULTIPLIERS, **MAMBA2,
    ),
}  # fmt: skip
LINEAR = "linear_attention"
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 32, "linear_value_head_dim": 40,
}  # fmt: skip
MIXED = {"head_dim": 40, "num_key_value_heads": 1, "layer_types": [LINEAR, FULL, LINEAR]}
ALONE = {"num_hidden_layers": 2, "state_size": 16, "intermediate_size": 144}
GROUPS = {"mamba_n_groups": 2, "mamba_d_conv": 4}
FALCON = {
    "mamba_d_ssm": 144, "mamba_n_heads": 6, "mamba_d_head": 24, "mamba_d_state": 16, "mamba_n_groups": 2,
    "lm_head_multiplier": 0.4, "embedding_multiplier": 5.7, "mlp_multipliers": [0.88, 0.59], "key_multiplier": 0.39,
    "attention_in_multiplier": 1.3, "attention_out_multiplier": 0.94, "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.24, "ssm_multipliers": [0.35, 0.25, 0.4, 0.5, 0.3],
}  # fmt: skip
STATES: dict[str, Callable[[], Any]] = {  # all layers or some have states
    "qwen3_5_text-states": tiny.causal(
        "Qwen3_5ForCausalLM", "Qwen3_5TextConfig", **MIXED, **DELTA, rope_parameters=AXES
    ),
    "qwen3_next-states": tiny.causal("Qwen3NextForCausalLM", "Qwen3NextConfig", **MIXED, **DELTA, **EXPERTS),
    "nemotron_h-states": tiny.causal(
        "NemotronHForCausalLM", "NemotronHConfig", head_dim=20, layers_block_type=[LINEAR, "mlp", FULL, LINEAR, "moe"],
        mamba_num_heads=6, mamba_head_dim=24, n_groups=2, ssm_state_size=32, time_step_min=1e-30,
        num_key_value_heads=1, **NEMOTRON,
    ),
    "bamba-states": tiny.causal("BambaForCausalLM", "BambaConfig", attn_layer_indices=[1], **MAMBA2, **GROUPS),
    "jamba-states": tiny.causal(
        "JambaForCausalLM", "JambaConfig", attn_layer_period=3, attn_layer_offset=1, num_experts=5, pad_token_id=0,
        num_key_value_heads=1,
    ),
    "granite_hybrid-states": tiny.causal(
        "GraniteMoeHybridForCausalLM", "GraniteMoeHybridConfig", layer_types=[LINEAR, FULL, LINEAR],
        num_local_experts=5, num_experts_per_tok=3, shared_intermediate_size=44, **MULTIPLIERS, **MAMBA2, **GROUPS,
    ),
    "falcon_h1": tiny.causal("FalconH1ForCausalLM", "FalconH1Config", **FALCON),
    "falcon_h1-normed": tiny.causal(
        "FalconH1ForCausalLM", "FalconH1Config", mamba_rms_norm=True, attention_bias=True, projectors_bias=True,
        mlp_bias=True, tie_word_embeddings=True, **FALCON,
    ),
    "mamba": tiny.causal("MambaForCausalLM", "MambaConfig", **ALONE),
    "falcon_mamba": tiny.causal("FalconMambaForCausalLM", "FalconMambaConfig", **ALONE),
    "mamba2": tiny.causal("Mamba2ForCausalLM", "Mamba2Config", num_heads=6, head_dim=24, n_groups=2, **ALONE),
}  # fmt: skip
SEEING: dict[str, Callable[[], Any]] = {  # with towers
    "qwen3_5": lambda: qwen3_5(**MIXED, **DELTA),
    "qwen3_5_moe": lambda: qwen3_5("Qwen3_5Moe", **MIXED, **DELTA, **EXPERTS),
}
CHECKPOINTS = {**ATTENTION, **SEEING, **STATES}
