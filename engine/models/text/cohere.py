"""Command R and Aya (Cohere): attention and MLP in parallel after one LayerNorm without bias; scaled logits.

Neighbouring dimensions are rotated together. Command R+ (104B) has a LayerNorm on every head of queries and keys.
"""

from __future__ import annotations

from dataclasses import replace

from engine.base.model_config import TextConfig
from engine.checkpoint.rope import RopeDefaults
from engine.checkpoint.section import Section
from engine.checkpoint.text import Sliding, read_text
from engine.models.base.family import Family
from engine.models.text.llama import DECODER_IGNORE, DECODER_ROWS, Llama
from engine.weights.table import Table

KEYS = {"layer_norm_eps": "rms_norm_eps"}


class Cohere(Llama):
    """Llama's layers with one norm per layer."""

    WEIGHTS = Table(tuple(row for row in DECODER_ROWS if row.target != "layers.*.mlp_norm"), ignore=DECODER_IGNORE)


def cohere_text(body: Section, outer: Section, sliding: Sliding, theta: float) -> TextConfig:
    """The config that both generations share."""
    read = read_text(
        body,
        outer,
        sliding=sliding,
        pattern=4,
        rope=RopeDefaults(theta, interleaved=True),
        tied=True,
        eps=1e-5,
        layer_norm=True,
        parallel=True,
        shared_norm=True,
        qk_norm="head layer norm" if body.boolean("use_qk_norm", False) else "none",
    )
    return replace(read, logit_scale=body.number("logit_scale", 0.0625))


def text(body: Section, outer: Section) -> TextConfig:
    """The decoder."""
    return cohere_text(body, outer, "none", 500_000.0)


FAMILY = Family(name="Command R", architectures=("CohereForCausalLM",), model=Cohere, text=text, keys=KEYS)
