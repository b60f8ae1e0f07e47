"""Arcee (AFM-4.5B): Llama with an MLP without a gate: up, relu², down."""

from __future__ import annotations

from functools import partial

from engine.checkpoint.text import read_text
from engine.models.base.family import Family
from engine.models.text.llama import DECODER_IGNORE, DECODER_ROWS, Llama
from engine.weights.table import Row, Table

PLAIN_MLP_ROWS = (
    *(row for row in DECODER_ROWS if row.target != "layers.*.mlp.gate_up"),
    Row(("layers.*.mlp.up_proj",), "layers.*.mlp.up", "rows"),
)


class Arcee(Llama):
    """Llama's layers with a plain MLP."""

    WEIGHTS = Table(PLAIN_MLP_ROWS, ignore=DECODER_IGNORE)


FAMILY = Family(
    name="Arcee",
    architectures=("ArceeForCausalLM",),
    model=Arcee,
    text=partial(read_text, activation="relu2", eps=1e-5, gated_mlp=False),
)
