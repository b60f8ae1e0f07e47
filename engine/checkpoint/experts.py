"""Reads ExpertsConfig, and the layers that have experts, from a decoder's section of config.json.

In: the section, and the family's settings for keys that its config.json leaves out or names differently. Out: frozen
configurations whose routing is possible: the allowed groups hold at least top_k experts. Thread: any.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from engine.base.errors import ConfigError
from engine.base.model_config import ExpertsConfig, Routing, TextConfig
from engine.checkpoint.section import Section

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")  # keys of the number of experts


def read_experts(
    body: Section, *, width: str = "moe_intermediate_size", chosen: str = "num_experts_per_tok", **family: Any
) -> ExpertsConfig:
    """width, chosen: the keys of an expert's intermediate size and of the number of experts per token.

    family: fields of Routing and of ExpertsConfig that the keys common to all families do not set.
    """
    key = next((key for key in EXPERTS if body.values.get(key) is not None), EXPERTS[0])
    of_routing = {name: value for name, value in family.items() if name in Routing.__dataclass_fields__}
    of_layer = {name: value for name, value in family.items() if name not in of_routing}
    routing = Routing(body.size(key), body.size(chosen), **of_routing)
    check_routing(body.path, key, chosen, routing)
    return ExpertsConfig(routing, body.size(width), **of_layer)


def check_routing(path: str, key: str, chosen: str, routing: Routing) -> None:
    """ConfigError if a token may choose more experts than there are; `key` and `chosen`: the keys of the two counts."""
    experts, groups, topk_group = routing.num_experts, routing.n_group, routing.topk_group
    if routing.top_k > experts:
        raise ConfigError(
            f"{path}: {chosen}={routing.top_k}: a token chooses 1 to {experts} of {key}={experts} experts"
        )
    if (
        experts % groups
        or topk_group > groups
        or (routing.group_rank == "best two" and experts // groups < 2 <= groups)
    ):
        raise ConfigError(
            f"{path}: {key}={experts} experts in {groups} groups of which {topk_group} are kept: groups of equal size "
            "and at most all of them are allowed"
        )
    if topk_group * (experts // groups) < routing.top_k:
        raise ConfigError(
            f"{path}: {topk_group} of {groups} groups hold {topk_group * (experts // groups)} experts; "
            f"{chosen}={routing.top_k} needs at least as many"
        )


def one_by_one(text: TextConfig) -> TextConfig:
    """The same decoder, with files that hold a layer's experts separately, whatever the family's releases do."""
    layers = (
        layer if layer.experts is None else replace(layer, experts=replace(layer.experts, layout="apart"))
        for layer in text.layers
    )
    return replace(text, layers=tuple(layers))


def with_experts(text: TextConfig, experts: ExpertsConfig, layers: Collection[int] | None = None) -> TextConfig:
    """The same decoder with experts in the layers with these numbers, or in all layers."""
    changed = (
        replace(layer, experts=experts) if layers is None or number in layers else layer
        for number, layer in enumerate(text.layers)
    )
    return replace(text, layers=tuple(changed))
