"""Nemotron 3 and 4, Minitron: LayerNorms stored as weight - 1, an ungated relu² MLP, half of each head rotated."""

from __future__ import annotations

from functools import partial

from engine.checkpoint.rope import RopeDefaults
from engine.checkpoint.text import read_text
from engine.models.base.family import Family
from engine.models.text.arcee import Arcee

FAMILY = Family(
    name="Nemotron",
    architectures=("NemotronForCausalLM",),
    model=Arcee,
    text=partial(
        read_text,
        rope=RopeDefaults(partial=0.5),
        activation="relu2",
        eps=1e-5,
        gated_mlp=False,
        layer_norm=True,
        norm_bias=True,
        norm_offset=1.0,
    ),
    keys={"norm_eps": "rms_norm_eps"},
)
