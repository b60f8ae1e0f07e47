"""The experts function that transformers' modules call; on an accelerator it uses our grouped kernel.

transformers' grouped matrix product, in float32 and on most cards in bfloat16, reads the number of rows per expert on
the host, which a graph cannot record. Our kernel finds the rows on the device. On a CPU transformers' function runs.
If the server captures the experts of tokens, each call stores its tokens' experts.
Thread: device. In: tokens and the experts that the module's router chose. Out: the weighted sum of experts per token.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from engine.base.model_config import Routing
from engine.kernels.moe.dense import pairs_of
from engine.kernels.moe.grouped import launch_grouped, tile_of
from engine.kernels.moe.sort import Pairs
from engine.kernels.target import target
from engine.models.transformers_backend.calls import ExpertsCall, running

NAME = "omniloop"  # this function's name in transformers' table


def experts(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """hidden [T, H], chosen and weights [T, top_k] -> [T, H]; `module` holds the matrices of all experts."""
    if hidden.is_meta:
        layer, of_tokens = len(running.calls.attention) - 1, chosen.shape[0] == hidden.shape[0] == running.tokens
        running.calls.experts.append(ExpertsCall(layer, Routing(module.num_experts, chosen.shape[1]), of_tokens))
    else:
        chosen = captured(chosen, weights)
    if hidden.is_cuda:
        return experts_on_device(module, hidden, chosen, weights)
    from transformers.integrations.moe import batched_mm_experts_forward, grouped_mm_experts_forward

    run = batched_mm_experts_forward if hidden.is_meta else grouped_mm_experts_forward  # the first does not read values
    found: Tensor = run(module, hidden, chosen, weights)
    return found


def captured(chosen: Tensor, weights: Tensor) -> Tensor:
    """Returns `chosen`, on an accelerator as int32. Stores the experts of the batch's tokens, highest score first."""
    batch, number = running.batch, running.num_expert_calls
    if batch is not None:  # None: a tower's forward, outside of a step
        running.num_expert_calls = number + 1
        call = running.calls.experts[number]
        if batch.routed is not None:  # modules return experts in any order
            order = weights.argsort(dim=1, descending=True, stable=True)
            batch.routed.layer(number).write(chosen.gather(1, order))
        if call.lasting is not None:
            return call.lasting[: chosen.numel()].view(chosen.shape).copy_(chosen)
        call.newest = chosen
    return chosen.int().contiguous() if chosen.is_cuda else chosen


def experts_on_device(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """`experts` by our kernels; chosen is int32."""
    pairs = pairs_of(chosen, module.num_experts, invariant=False)
    name = "gate_up_proj" if module.has_gate else "up_proj"
    made = _product(module, name, hidden, pairs, of_tokens=True)
    made = module._apply_gate(made) if module.has_gate else module.act_fn(made)
    made = _product(module, "down_proj", made, pairs)
    if getattr(module, "has_post_expert_norm", False):  # transformers before 5.20 has no such norm
        made = module.post_expert_norm(made)
    weighted = made * weights.reshape(-1, 1)
    return weighted.view(len(hidden), pairs.top_k, -1).sum(1).to(hidden.dtype)


def _product(module: Any, name: str, rows: Tensor, pairs: Pairs, of_tokens: bool = False) -> Tensor:
    """Multiplies rows by their experts' matrices. `of_tokens`: [T, K] -> [pairs, N] sorted by expert; else rows sorted
    by expert -> [pairs, N] in the order of pairs."""
    weight = getattr(module, name)  # [E, N, K]
    weight = weight.transpose(1, 2).contiguous() if module.is_transposed else weight
    bias = getattr(module, f"{name}_bias") if module.has_bias else None
    count = 0 if pairs.order is None else pairs.count
    tile = tile_of(target(), count, len(weight), False, weight.element_size())
    return launch_grouped(rows.to(weight.dtype).contiguous(), weight, bias, pairs, None, tile, of_tokens=of_tokens)
