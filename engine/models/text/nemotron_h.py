"""Nemotron-H (Nano 2, Nemotron 3): a layer is Mamba-2, attention without rotation, an MLP or experts.

Thread: device. MLPs and experts use relu² without gates. Experts' scores are sigmoids; a correction bias affects only
the choice of experts. Experts may work on narrower rows (moe_latent_size). The loader skips the layers of the module
`mtp`, which predict further tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from engine.base.mixers import NoMixer
from engine.base.model_config import TextConfig
from engine.checkpoint.experts import with_experts
from engine.checkpoint.mixers import (
    LINEAR,
    MLP,
    MOE,
    NEMOTRON,
    layer_kinds,
    numbers,
    read_mamba2,
    with_mixer,
    without_kinds,
)
from engine.checkpoint.rope import FULL, no_rope
from engine.checkpoint.section import Section
from engine.checkpoint.text import every_layer, read_text
from engine.models.base.family import Family
from engine.models.base.single import SingleDecoder
from engine.models.text.bamba import norm_row, state_rows
from engine.models.text.glm4_moe import read_noaux_experts
from engine.models.text.sparse import as_stored
from engine.weights.table import Row, Table

MIXER = "layers.*.mixer."
EXPERTS = MIXER + "experts"
KEYS: Mapping[str, str] = {"layer_norm_epsilon": "rms_norm_eps", "mlp_hidden_act": "hidden_act"}
ROWS = (
    Row(("embeddings",), "embed"),
    Row(("layers.*.norm",), "layers.*.attention_norm"),
    Row((MIXER + "q_proj", MIXER + "k_proj", MIXER + "v_proj"), "layers.*.attention.qkv", "rows"),
    Row((MIXER + "o_proj",), "layers.*.o", "columns"),
    Row((MIXER + "up_proj",), "layers.*.mlp.up", "rows"),
    Row((MIXER + "down_proj",), "layers.*.mlp.down", "columns"),
    Row((MIXER + "gate",), "layers.*.experts.router"),
    Row((MIXER + "gate",), "layers.*.experts.correction"),
    Row((EXPERTS,), "layers.*.experts.gate_up", "rows"),
    Row((EXPERTS,), "layers.*.experts.down", "columns"),
    Row((MIXER + "shared_experts.up_proj",), "layers.*.experts.shared.up", "rows"),
    Row((MIXER + "shared_experts.down_proj",), "layers.*.experts.shared.down", "columns"),
    Row((MIXER + "fc1_latent_proj",), "layers.*.experts.latent_in"),
    Row((MIXER + "fc2_latent_proj",), "layers.*.experts.latent_out"),
    *state_rows(MIXER),
    norm_row(MIXER),
    Row(("norm_f",), "norm"),
    Row(("lm_head",), "head", "rows"),
)


class NemotronH(SingleDecoder):
    """Names in files begin with `backbone`, in files of transformers 5 with `model`."""

    WEIGHTS = Table(ROWS, prefixes=("backbone.", "model."), ignore=("mtp.*",))

    def weight_table(self) -> Table:
        return as_stored(super().weight_table(), self.config.text)


def text(body: Section, outer: Section) -> TextConfig:
    """The configuration of the decoder."""
    kinds = layer_kinds(body, (FULL, LINEAR, MLP, MOE))
    read = read_text(without_kinds(body, len(kinds)), outer, eps=1e-5, activation="relu2", gated_mlp=False)
    read = every_layer(read, rope=no_rope(read.head_dim))
    read = replace(read, num_nextn_predict_layers=body.integer("num_nextn_predict_layers", 0))
    read = with_mixer(read, NoMixer(), numbers(kinds, MLP, MOE))
    if states := numbers(kinds, LINEAR):
        read = with_mixer(read, read_mamba2(body, NEMOTRON, False, "mamba_hidden_act", groups=8), states)
    if sparse := numbers(kinds, MOE):
        shared = body.size("moe_shared_expert_intermediate_size", body.size("moe_intermediate_size"))
        latent = 0 if body.values.get("moe_latent_size") is None else body.size("moe_latent_size")
        experts = read_noaux_experts(body, "n_shared_experts")
        experts = replace(experts, layout="upright", shared_width=shared, latent_size=latent)
        read = with_experts(read, experts, sparse)
    return read


FAMILY = Family(name="Nemotron-H", architectures=("NemotronHForCausalLM",), model=NemotronH, text=text, keys=KEYS)
