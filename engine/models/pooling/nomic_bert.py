"""Nomic's BERT (nomic-embed-text, snowflake-arctic-embed-m-long): BERT with rotary positions, SwiGLU and no biases.

nomic-embed-text-v2-moe has biases, a plain GELU, and experts instead of every second MLP. Released files use GPT-2's
keys for sizes (https://huggingface.co/nomic-ai/nomic-bert-2048); transformers' files use BERT's keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.base.errors import ConfigError
from engine.base.model_config import ExpertsConfig, ModelConfig, TextConfig
from engine.checkpoint.experts import read_experts, with_experts
from engine.checkpoint.rope import RopeDefaults
from engine.checkpoint.section import Section
from engine.checkpoint.text import refuse
from engine.kernels.activation import BY_NAME
from engine.layers.linear import GatedLinear, Linear
from engine.layers.plain_moe import PlainMoE
from engine.models.base.encoder import Encoder, EncoderLayer
from engine.models.base.family import Family
from engine.models.pooling.bert import head, post_norm_text
from engine.models.pooling.classes import VECTORS_AND_SCORES, classes
from engine.weights.table import Row, Table

LAYER = "encoder.layers.*."
ROWS = (
    Row(("embeddings.word_embeddings",), "embed"),
    Row(("embeddings.token_type_embeddings",), "types"),
    Row(("emb_ln",), "embed_norm"),
    Row((LAYER + "attn.Wqkv",), "layers.*.qkv", "rows"),
    Row((LAYER + "attn.out_proj",), "layers.*.o", "columns"),
    Row((LAYER + "norm1",), "layers.*.attention_norm"),
    Row((LAYER + "mlp.fc12", LAYER + "mlp.fc11"), "layers.*.gated_up", "rows"),
    Row((LAYER + "mlp.fc1",), "layers.*.plain_up", "rows"),
    Row((LAYER + "mlp.fc2",), "layers.*.dense_down", "columns"),
    Row((LAYER + "mlp.router.layer",), "layers.*.experts.router"),
    Row((LAYER + "mlp.experts.mlp",), "layers.*.experts.matrices"),
    Row((LAYER + "mlp.experts",), "layers.*.experts.bias"),
    Row((LAYER + "norm2",), "layers.*.mlp_norm"),
)
IGNORED = ("pooler.dense.*", "cls.*", "lm_head.*")
KEYS = {
    "n_embd": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers",
    "n_inner": "intermediate_size", "n_positions": "max_position_embeddings", "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
}  # fmt: skip


class NomicLayer(EncoderLayer):
    """BERT's layer; with `experts` a mixture of experts replaces the MLP, whose parts then have no weights."""

    is_dealt = True

    def __init__(self, text: TextConfig, experts: ExpertsConfig | None) -> None:
        super().__init__(text)
        self.experts = None
        if experts is not None:
            self.experts = PlainMoE(text.hidden_size, experts, self.activation)

    @property
    def gated_up(self) -> Linear | None:
        """Gate and up of a gated MLP; None: the layer has none."""
        return self.up if self.experts is None and isinstance(self.up, GatedLinear) else None

    @property
    def plain_up(self) -> Linear | None:
        """The first linear layer of an MLP without a gate; None: the layer has none."""
        return self.up if self.experts is None and not isinstance(self.up, GatedLinear) else None

    @property
    def dense_down(self) -> Linear | None:
        """The last linear layer of an MLP; None: the layer has experts."""
        return self.down if self.experts is None else None

    def after_mlp(self, x: Tensor) -> Tensor:
        if self.experts is None:
            return super().after_mlp(x)
        made = self.experts(x)
        return self.mlp_norm(made if self.exchange is None else self.exchange.total(made), residual=x)


class NomicBert(Encoder):
    """One or two token types, no table of positions."""

    WEIGHTS = Table(ROWS, prefixes=("bert.", "nomic_bert."), ignore=IGNORED)
    reads_pairs = True

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
        types = Section(config.raw, "config.json").size("type_vocab_size", 2)
        super().__init__(config, dtype, device, types, first_position=None)

    def made_layers(self, text: TextConfig) -> list[EncoderLayer]:
        return [NomicLayer(text, layer.experts) for layer in text.layers]


def text(body: Section, outer: Section) -> TextConfig:
    """The encoder."""
    refuse(
        body,
        causal=False,
        prenorm=False,
        parallel_block=False,
        use_rms_norm=False,
        rotary_emb_fraction=1.0,
        rotary_emb_interleaved=False,
        rotary_emb_scale_base=None,
        scale_attn_weights=True,
    )
    named = str(body.values.get("activation_function") or "swiglu")
    gated = named == "swiglu"
    if not gated and named not in BY_NAME:
        raise ConfigError(
            f"{body.path}: activation_function={named!r} is not supported; supported are swiglu, {', '.join(BY_NAME)}"
        )
    if gated:
        refuse(body, hidden_act="silu", mlp_fc1_bias=False, mlp_fc2_bias=False, moe_every_n_layers=0)
    attention, first = body.boolean("qkv_proj_bias", False), body.boolean("mlp_fc1_bias", False)
    refuse(body, mlp_fc2_bias=first)
    whole = Section({**body.values, "hidden_act": "silu" if gated else named}, body.path, body.outer)
    read = post_norm_text(
        whole,
        RopeDefaults(1000.0),
        qkv_bias=attention,
        o_bias=attention,
        mlp_bias=first,
        gated_mlp=gated,
        qkv_layout="joined",
    )
    return _sparse(body, read)


def _sparse(body: Section, read: TextConfig) -> TextConfig:
    """The config with experts in the second of every `moe_every_n_layers` layers; norm_topk_prob is off."""
    every = body.integer("moe_every_n_layers", 0)
    if not every:
        return read
    refuse(body, num_shared_experts=0, expert_choice_router=False, moe_normalize_expert_weights=False, ffn_div=1)
    experts = read_experts(body, width="intermediate_size", chosen="moe_top_k", layout="one below the other")
    return with_experts(read, experts, [number for number in range(len(read.layers)) if number % every == 1])


def untrained(body: Section) -> int:
    """Number of positions beyond the trained positions; they are not served, because dynamic frequencies would change
    with an input's length."""
    if not body.values.get("rotary_scaling_factor"):
        return 0
    longest = body.size("max_position_embeddings")
    return longest - body.integer("max_trained_positions", 2048, least=1, most=longest)


FAMILY = Family(
    name="Nomic BERT",
    architectures=classes("NomicBert", *VECTORS_AND_SCORES),
    model=NomicBert,
    text=text,
    head=head,
    keys=KEYS,
    first_position=untrained,
)
