"""ChatGLM2, ChatGLM3, GLM-4 (2024) and GLM-4V: Llama with other weight names; GLM-4V also has a vision tower.

The first half of each head is rotated, in pairs of neighbouring dimensions; gate and up are one matrix. Names and
formulas follow modeling_chatglm.py in the checkpoints (https://huggingface.co/THUDM/glm-4v-9b), which is not executed.
All tokens of a picture's patches have the same position, so the processor (mm/processors/chatglm.py) passes positions
as rows, one per axis; all rows are equal, and the first is read.

ChatGLM2-6B-32k differs: its code divides positions by rope_ratio, while the code of all other checkpoints multiplies
theta. No key of the file shows the difference. To serve it, pass --hf-overrides
'{"rope_ratio": 1, "rope_scaling": {"type": "linear", "factor": N}}', where N is the rope_ratio of its file.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch

from engine.base.errors import ConfigError
from engine.base.model_config import ModelConfig, TextConfig
from engine.base.request import Modality
from engine.checkpoint.rope import RopeDefaults
from engine.checkpoint.section import Section
from engine.checkpoint.text import read_text, refuse
from engine.encoders.eva_clip import ROWS, EvaClipConfig, EvaClipTower, read_vision
from engine.encoders.tower import by_modality
from engine.models.base.family import Family
from engine.models.text.llama import Llama
from engine.weights.table import Row, Table

LAYER = "encoder.layers.*."
KEYS = {
    "num_layers": "num_hidden_layers",
    "kv_channels": "head_dim",
    "multi_query_group_num": "num_key_value_heads",
    "ffn_hidden_size": "intermediate_size",
    "padded_vocab_size": "vocab_size",
    "seq_length": "max_position_embeddings",
    "layernorm_epsilon": "rms_norm_eps",
}


class ChatGLM(Llama):
    """Text in, also pictures if there is a tower; text out."""

    WEIGHTS = Table(
        (
            Row(("embedding.word_embeddings",), "embed"),
            Row((LAYER + "input_layernorm",), "layers.*.attention_norm"),
            Row((LAYER + "self_attention.query_key_value",), "layers.*.attention.qkv", "rows"),
            Row((LAYER + "self_attention.dense",), "layers.*.o", "columns"),
            Row((LAYER + "post_attention_layernorm",), "layers.*.mlp_norm"),
            Row((LAYER + "mlp.dense_h_to_4h",), "layers.*.mlp.gate_up", "rows"),
            Row((LAYER + "mlp.dense_4h_to_h",), "layers.*.mlp.down", "columns"),
            Row(("encoder.final_layernorm",), "norm"),
            Row(("output_layer",), "head", "rows"),
            *ROWS,
        ),
        prefixes=("transformer.",),
        ignore=("rotary_pos_emb.inv_freq",),
    )

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
        super().__init__(config, dtype, device)
        vision = config.towers.get("vision")
        self.vision = EvaClipTower(vision, dtype, device) if isinstance(vision, EvaClipConfig) else None
        self.towers = by_modality(self.vision)


def text(body: Section, outer: Section) -> TextConfig:
    """The decoder's config; all published checkpoints but the first ChatGLM-6B have the same switches."""
    if not body.boolean("multi_query_attention", False):
        raise ConfigError(f"{body.path}: multi_query_attention=true is needed; ChatGLM-6B (2023) is not supported")
    refuse(
        body,
        rmsnorm=True,
        post_layer_norm=True,
        original_rope=True,
        add_bias_linear=False,
        apply_residual_connection_post_layernorm=False,
        pre_seq_len=0,
        quantization_bit=0,
    )
    half = body.size("head_dim", 128) // 2
    ratio = body.number("rope_ratio", 1.0)
    if ratio <= 0:
        raise ConfigError(f"{body.path}: rope_ratio={ratio} must be larger than 0")
    rope = RopeDefaults(
        theta=10_000.0 * ratio,
        partial=0.5,
        interleaved=True,
        sections=(half // 2, 0, 0) if body.values.get("vision_config") is not None else (),
    )
    biased = body.boolean("add_qkv_bias", False)
    read = read_text(body, outer, head_dim=128, rope=rope, eps=1e-5, qkv_layout="joined", joined_mlp=True)
    return replace(read, qkv_bias=biased, o_bias=False, mlp_bias=False)


def media_token_ids(outer: Section) -> dict[str, int]:
    """The token that begins a picture stands for the picture."""
    return {} if outer.values.get("boi_token_id") is None else {"image": outer.integer("boi_token_id")}


def processor(outer: Section, taken: Collection[Modality]) -> str:
    """The processor's name; "" for text checkpoints. An empty section means: the name for any checkpoint."""
    return "chatglm:ChatGLM" if "image" in taken or not outer.values else ""


FAMILY = Family(
    name="ChatGLM, GLM-4V",
    architectures=("ChatGLMModel", "ChatGLMForConditionalGeneration", "GLM4VForCausalLM"),
    model=ChatGLM,
    text=text,
    towers={"vision": read_vision},
    processor=processor,
    keys=KEYS,
    media_token_ids=media_token_ids,
)
