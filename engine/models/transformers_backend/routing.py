"""Checks the router settings of config.json before transformers builds the decoder.

Each class of transformers computes one routing rule and ignores keys that name another rule; groups of unequal size
would fail only in a step. Thread: any. In: the decoder's section. Out: nothing, or ConfigError in one line.
"""

from __future__ import annotations

from typing import Any

from engine.base.errors import ConfigError
from engine.base.model_config import Routing
from engine.checkpoint.experts import EXPERTS, check_routing
from engine.checkpoint.section import Section

Rule = dict[str, tuple[str, ...]]  # a key of config.json -> the values that a class supports

CHOSEN = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts")  # keys of the number of experts per token
GREEDY = "greedy"  # chooses among all experts and ignores groups
SIGMOID: Rule = {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)}
RULES: dict[str, Rule] = {  # by model_type
    "deepseek_v2": {"scoring_func": ("softmax",), "topk_method": (GREEDY, "group_limited_greedy")},
    "deepseek_v3": SIGMOID,
    "glm4_moe_lite": SIGMOID,
}


def check_router(kind: str, body: Section) -> None:
    """Raises ConfigError for unsupported router settings. kind: the decoder's model_type."""
    for key, known in RULES.get(kind, {}).items():
        got = body.values.get(key)
        if got is not None and got not in known:
            allowed = " or ".join(map(repr, known))
            raise ConfigError(f"{body.path}: {key}={got!r} is not supported; supported is {allowed}")
    key, chosen = _given(body, EXPERTS), _given(body, CHOSEN)
    if key and chosen and body.values[key]:  # files of dense models may count 0 experts
        groups = {} if body.values.get("topk_method") == GREEDY else _groups(body)
        check_routing(body.path, key, chosen, Routing(body.size(key), body.size(chosen), **groups))


def _given(body: Section, names: tuple[str, ...]) -> str:
    """The first key with a count; "": none."""
    return next((name for name in names if isinstance(body.values.get(name), int)), "")


def _groups(body: Section) -> dict[str, Any]:
    return {"n_group": body.size("n_group", 1), "topk_group": body.size("topk_group", 1)}
