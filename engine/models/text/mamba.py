"""Mamba, FalconMamba and Mamba-2: every layer is a norm and a layer with a state; no attention, no MLP."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from engine.base.mixers import Mamba1Config, Mamba2Config
from engine.base.model_config import ModelConfig, TextConfig
from engine.checkpoint.mixers import MAMBA2, read_mamba1, read_mamba2, with_mixer, without_kinds
from engine.checkpoint.rope import UNBOUNDED, no_rope
from engine.checkpoint.section import Section
from engine.checkpoint.text import every_layer, read_text
from engine.models.base.family import Family
from engine.models.base.single import SingleDecoder
from engine.models.text.bamba import norm_row, state_rows
from engine.models.text.nemotron_h import MIXER
from engine.weights.table import Row, Table

KEYS: Mapping[str, str] = {"layer_norm_epsilon": "rms_norm_eps"}
ROWS = (
    Row(("embeddings",), "embed"),
    Row(("layers.*.norm",), "layers.*.attention_norm"),
    Row(("norm_f",), "norm"),
    Row(("lm_head",), "head", "rows"),
    *state_rows(MIXER),
)
PREFIXES = ("backbone.", "model.")


class Mamba(SingleDecoder):
    """The decoder of Mamba and FalconMamba."""

    WEIGHTS = Table(
        (
            *ROWS,
            Row((MIXER + "x_proj",), "layers.*.state.mixed", "columns"),
            Row((MIXER + "dt_proj",), "layers.*.state.steps", "rows"),
        ),
        prefixes=PREFIXES,
    )


class Mamba2(SingleDecoder):
    """The decoder of Mamba-2."""

    WEIGHTS = Table((*ROWS, norm_row(MIXER)), prefixes=PREFIXES)


def model(config: ModelConfig, dtype: torch.dtype, device: str) -> SingleDecoder:
    """Builds Mamba2 or Mamba, by the configuration of the first layer."""
    kind = Mamba2 if isinstance(config.text.layers[0].mixer, Mamba2Config) else Mamba
    return kind(config, dtype, device)


def mixer(body: Section) -> Mamba1Config | Mamba2Config:
    """The mixer of every layer; FalconMamba normalises dt, B and C without weights."""
    kind = body.values.get("model_type")
    if kind == "mamba2":
        return read_mamba2(body, MAMBA2, groups=8)
    if kind == "falcon_mamba":
        return read_mamba1(body, norms="bare", eps=body.number("mixer_rms_eps", 1e-6))
    return read_mamba1(body)


def text(body: Section, outer: Section) -> TextConfig:
    """The configuration of the decoder; by default Mamba ties embedding and head, Mamba-2 does not."""
    count, hidden, mixes = body.size("num_hidden_layers"), body.size("hidden_size"), mixer(body)
    # No layer has attention or an MLP, so nothing uses these sizes.
    absent = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": hidden, "intermediate_size": hidden}
    section = without_kinds(body, count, max_position_embeddings=UNBOUNDED, **absent)
    found = read_text(section, outer, eps=1e-5, tied=isinstance(mixes, Mamba1Config))
    return with_mixer(every_layer(found, rope=no_rope(2)), mixes, range(count))


FAMILY = Family(
    name="Mamba",
    architectures=("MambaForCausalLM", "FalconMambaForCausalLM", "Mamba2ForCausalLM"),
    model=model,
    text=text,
    keys=KEYS,
)
