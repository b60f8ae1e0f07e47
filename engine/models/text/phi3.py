"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: Llama whose checkpoints have q|k|v in one matrix and gate|up in another.

Long contexts have separate frequencies (longrope, engine/layers/rope.py); Phi-4-mini rotates a part of each head.
"""

from __future__ import annotations

from dataclasses import replace

from engine.base.model_config import TextConfig
from engine.checkpoint.section import Section
from engine.checkpoint.text import read_text
from engine.models.base.family import Family
from engine.models.text.llama import ATTENTION, DECODER_IGNORE, DECODER_ROWS, Llama
from engine.weights.table import Table

JOINED = {"layers.*.attention.qkv": ATTENTION + "qkv_proj", "layers.*.mlp.gate_up": "layers.*.mlp.gate_up_proj"}


class Phi3(Llama):
    """Llama's layers with joined matrices."""

    WEIGHTS = Table(
        tuple(replace(row, names=(JOINED[row.target],)) if row.target in JOINED else row for row in DECODER_ROWS),
        ignore=DECODER_IGNORE,
    )


def text(body: Section, outer: Section) -> TextConfig:
    """The decoder's config; the first releases say "su" or "yarn" and mean longrope."""
    values = dict(body.values)
    for key in ("rope_parameters", "rope_scaling"):
        given = values.get(key)
        if isinstance(given, dict):
            kind = given.get("rope_type") or given.get("type")
            values[key] = {**given, "rope_type": "longrope" if kind in ("su", "yarn") else kind}
    body = Section(values, body.path)
    return read_text(body, outer, sliding="given", eps=1e-5, qkv_layout="joined", joined_mlp=True)


FAMILY = Family(name="Phi-3, Phi-4", architectures=("Phi3ForCausalLM",), inside=True, model=Phi3, text=text)
