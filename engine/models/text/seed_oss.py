"""Seed-OSS: Llama with biases of queries, keys and values, and a separate switch for the output projection's bias."""

from __future__ import annotations

from engine.base.model_config import TextConfig
from engine.checkpoint.section import Section
from engine.checkpoint.text import read_text
from engine.models.base.family import Family
from engine.models.text.llama import Llama


def text(body: Section, outer: Section) -> TextConfig:
    """The decoder."""
    biased, out_biased = body.boolean("attention_bias", True), body.boolean("attention_out_bias", False)
    return read_text(body, outer, head_dim=128, qkv_bias=biased, o_bias=out_biased)


FAMILY = Family(name="Seed-OSS", architectures=("SeedOssForCausalLM",), model=Llama, text=text)
