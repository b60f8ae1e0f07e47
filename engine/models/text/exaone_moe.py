"""EXAONE MoE (K-EXAONE): norms of heads, GLM-4.5's experts; if there are windows, full layers do not rotate."""

from __future__ import annotations

from dataclasses import replace

from engine.base.errors import ConfigError
from engine.base.model_config import TextConfig
from engine.checkpoint.experts import with_experts
from engine.checkpoint.rope import no_rope
from engine.checkpoint.section import Section
from engine.checkpoint.text import read_text
from engine.models.base.family import Family
from engine.models.text.glm4_moe import read_noaux_experts
from engine.models.text.llama import DECODER_IGNORE, DECODER_ROWS, Llama
from engine.models.text.sparse import sparse_rows
from engine.weights.table import Table


class ExaoneMoE(Llama):
    """Llama's layers with experts; multi-token-prediction parts in the files are not read."""

    WEIGHTS = Table((*DECODER_ROWS, *sparse_rows(correction="")), ignore=(*DECODER_IGNORE, "mtp.*"))


def text(body: Section, outer: Section) -> TextConfig:
    """The decoder's config; `mlp_layer_types` names dense and sparse layers, by default the first layers are dense."""
    read = read_text(body, outer, sliding="layers", pattern=4, eps=1e-5, qk_norm="head")
    if body.values.get("sliding_window", 0) is not None:
        none = no_rope(read.head_dim)
        layers = tuple(each if each.window else replace(each, rope=none) for each in read.layers)
        read = replace(read, layers=layers)
    count, dense = len(read.layers), body.integer("first_k_dense_replace", 1)
    kinds = body.items("mlp_layer_types", ["dense" if number < dense else "sparse" for number in range(count)])
    if len(kinds) != count or set(kinds) - {"dense", "sparse"}:
        raise ConfigError(f"{body.path}: mlp_layer_types={list(kinds)} must be {count} times 'dense' or 'sparse'")
    sparse = [number for number, kind in enumerate(kinds) if kind == "sparse"]
    return with_experts(read, read_noaux_experts(body, "num_shared_experts", scale=2.5), sparse)


FAMILY = Family(name="EXAONE MoE", architectures=("ExaoneMoeForCausalLM",), model=ExaoneMoE, text=text)
