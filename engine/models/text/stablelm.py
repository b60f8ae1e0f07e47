"""StableLM 2 and StableLM 3B: LayerNorms, a quarter of each head rotated.

StableLM 2 12B has attention and MLP in parallel, and a LayerNorm on every query and key head.
"""

from __future__ import annotations

from dataclasses import replace

from engine.base.model_config import TextConfig
from engine.checkpoint.rope import RopeDefaults
from engine.checkpoint.section import Section
from engine.checkpoint.text import read_text
from engine.layers.attention import HeadNorms
from engine.models.base.family import Family
from engine.models.text.llama import ATTENTION, Llama
from engine.weights.table import Row, Table


class StableLm(Llama):
    """Llama's layers; every head's norm is a separate module."""

    def weight_table(self) -> Table:
        table, text = super().weight_table(), self.config.text
        if text.qk_norm == "none":
            return table
        attention = self.layers[0].attention
        assert attention is not None
        rows = []
        for kind, norm in (("q", attention.q_norm), ("k", attention.k_norm)):
            assert isinstance(norm, HeadNorms)
            heads = range(norm.first, norm.first + norm.num_heads)
            names = (f"{ATTENTION}{kind}_layernorm.norms.{head}" for head in heads)
            rows.append(Row(tuple(names), f"layers.*.attention.{kind}_norm"))
        named = {row.target for row in rows}
        return replace(table, rows=(*(row for row in table.rows if row.target not in named), *rows))


def text(body: Section, outer: Section) -> TextConfig:
    """The decoder."""
    parallel = body.boolean("use_parallel_residual", False)
    return read_text(
        body,
        outer,
        rope=RopeDefaults(partial=0.25),
        eps=1e-5,
        qkv_bias=body.boolean("use_qkv_bias", False),
        o_bias=False,
        qk_norm="head layer norm" if body.boolean("qk_layernorm", False) else "none",
        split_head_norms=True,
        layer_norm=True,
        norm_bias=True,
        parallel=parallel,
        shared_norm=parallel,
    )


FAMILY = Family(
    name="StableLM",
    architectures=("StableLmForCausalLM",),
    model=StableLm,
    text=text,
    keys={"layer_norm_eps": "rms_norm_eps"},
)
