"""HunYuan with experts (v1, Hunyuan-A13B): HunYuan dense with experts and a shared MLP in every layer."""

from __future__ import annotations

from engine.base.errors import ConfigError
from engine.base.model_config import TextConfig
from engine.checkpoint.experts import read_experts, with_experts
from engine.checkpoint.section import Section
from engine.checkpoint.text import read_text
from engine.models.base.family import Family
from engine.models.text.hunyuan_v1_dense import HunYuanDense
from engine.models.text.llama import DECODER_IGNORE
from engine.models.text.sparse import sparse_rows
from engine.weights.table import Table

BY_LAYER = ("moe_topk", "moe_intermediate_size", "num_shared_expert", "num_experts")  # a number, or one per layer


class HunYuanMoE(HunYuanDense):
    """HunYuan's names."""

    WEIGHTS = Table(
        (*HunYuanDense.WEIGHTS.rows, *sparse_rows(router="gate.wg", shared="shared_mlp")), ignore=DECODER_IGNORE
    )


def text(body: Section, outer: Section) -> TextConfig:
    """The decoder's config. Files may list some values per layer; different values are refused."""
    values = dict(body.values)
    for key in BY_LAYER:
        given = values.get(key)
        if isinstance(given, list):
            if len(set(map(str, given))) != 1:
                raise ConfigError(f"{body.path}: {key}={given} differs between layers; one number for all is supported")
            values[key] = given[0]
    values.setdefault("moe_intermediate_size", values.get("intermediate_size"))
    body = Section(values, body.path)
    read = read_text(body, outer, eps=1e-5, qk_norm="head after rotation")
    shared = read.intermediate_size * body.integer("num_shared_expert", 1)
    return with_experts(read, read_experts(body, chosen="moe_topk", norm_topk_prob=True, shared_width=shared))


FAMILY = Family(name="HunYuan MoE", architectures=("HunYuanMoEV1ForCausalLM",), model=HunYuanMoE, text=text)
