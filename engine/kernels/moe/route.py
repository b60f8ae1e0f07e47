"""Router: chooses each token's experts and their weights from the router's logits by the rules of a `Routing`.

    logits  = x W^T (+ bias), float32
    scores  = softmax(logits) or sigmoid(logits), float32; or, expert by expert, a softmax over logits near the highest
    ranks   = scores + correction; minus infinity outside the token's best groups
    experts = the top_k highest ranks; among equal ranks the lower number wins
    weights = these experts' scores, divided by their sum if renormalised, times the routing's and the expert's scale

Of an engine's ranks each may have some of the experts. Then experts are numbered from the rank's first on, and numbers
from `held` on mean no expert of this rank. All ranks choose alike, because the numbers change after the choice.
A token with a NaN among its ranks chooses the experts 0 ... top_k - 1, all with weight NaN: its own request fails like
any request with a NaN, and no other token changes. A row's bits depend on no other row. Padding rows choose the expert
`num_experts`, which does not exist, with weight 0: the following kernels read no weights for them.
An accelerator needs one launch: programs divide a tile's experts among them, and the program that arrives last has all
logits of the tile's tokens and chooses. Users: engine/layers/moe.
"""

# ruff: noqa: PT018 (a launcher checks in few lines)
from __future__ import annotations

import torch
from torch import Tensor

from engine.base.model_config import Routing
from engine.kernels.gemm.split_k import MAX_TILES, arrivals
from engine.kernels.gemm.weight import Weight
from engine.kernels.moe.capture import Capture
from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.target import target, tl, triton

BLOCK_M = 16  # tokens of a tile; constant, because the bits of a token's logits depend on the tile
BLOCK_N = 16  # experts of a program
WIDER = ((2048, 64), (256, 32))  # (least rows, experts of a program) for 16-bit routers: fewer reads of rows
BLOCK_K = 128
STAGES = 6  # if loads bypass registers: an iteration computes for a fifth of its loads' time


@triton.jit
def first_of(values, column, COLUMNS: tl.constexpr):
    """Return the highest value of each row, [rows, 1], and the first column that holds it."""
    best = tl.max(values, 1)[:, None]
    return best, tl.min(tl.where(values == best, column, COLUMNS), 1)[:, None]


@triton.jit
def keep_groups(ranks, column, GROUPS: tl.constexpr, TOPK_GROUP: tl.constexpr, SIZE: tl.constexpr, TWO: tl.constexpr,
                COLUMNS: tl.constexpr):  # fmt: skip
    """Set ranks [rows, COLUMNS] to minus infinity outside the best groups of SIZE columns."""
    lowest = float("-inf")
    group = column // SIZE
    of_group = tl.full(ranks.shape, lowest, tl.float32)
    for number in range(GROUPS):
        mine = tl.where(group == number, ranks, lowest)
        rank, at = first_of(mine, column, COLUMNS)
        if TWO:
            second, at = first_of(tl.where(column == at, lowest, mine), column, COLUMNS)
            rank += second
        of_group = tl.where(group == number, rank, of_group)
    capture = tl.full(ranks.shape, lowest, tl.float32)
    for _ in range(TOPK_GROUP):
        rank, at = first_of(of_group, column, COLUMNS)
        capture = tl.where(group == at // SIZE, ranks, capture)
        of_group = tl.where(group == at // SIZE, lowest, of_group)
    return capture


@triton.jit
def numbered(expert, first, experts):
    """Return experts' numbers as counted from expert `first` on."""
    return tl.where(expert < first, expert - first + experts, expert - first)


@triton.jit
def choose_tile(
    chosen, weights, capture, mapping, capture_line, logits, correction, scales, m, rows, live, experts, first, eps,
    least_sum, scale, SIGMOID: tl.constexpr, NEAR: tl.constexpr, TOP_K: tl.constexpr, RENORMALISE: tl.constexpr,
    GROUPS: tl.constexpr, TOPK_GROUP: tl.constexpr, SIZE: tl.constexpr, TWO: tl.constexpr, COLUMNS: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    """Choose experts for the tokens m, whose logits are already written; tokens from `live` on are padding."""
    column = tl.arange(0, COLUMNS)[None, :]
    real = column < experts
    at = logits + m.to(tl.int64)[:, None] * experts + column
    x = tl.load(at, mask=(m < rows)[:, None] & real, other=0.0, cache_modifier=".cg")
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-x))
    elif NEAR is not None:
        scores = x
    else:
        x = tl.where(real, x, float("-inf"))
        powers = tl.exp(x - tl.max(x, 1)[:, None])
        scores = powers / tl.sum(powers, 1)[:, None]
    ranks = scores
    if correction is not None:
        ranks += tl.load(correction + column, mask=real, other=0.0)
    # NaN is found by a sum of flags, because a maximum may drop NaN.
    broken = tl.sum(tl.where(real & (ranks != ranks), 1, 0), 1)[:, None] > 0
    ranks = tl.where(broken, 0.0, ranks)
    scores = tl.where(broken, float("nan"), scores)
    ranks = tl.where(real, ranks, float("-inf"))
    if TOPK_GROUP < GROUPS:
        ranks = keep_groups(ranks, column, GROUPS, TOPK_GROUP, SIZE, TWO, COLUMNS)
    slot = tl.arange(0, SLOTS)[None, :]
    numbers = tl.zeros([x.shape[0], SLOTS], tl.int32)
    given = tl.zeros([x.shape[0], SLOTS], tl.float32)
    total = tl.zeros([x.shape[0], 1], tl.float32)
    for place in range(TOP_K):
        best, expert = first_of(ranks, column, COLUMNS)
        if NEAR is None:
            score = tl.sum(tl.where(column == expert, scores, 0.0), 1)[:, None]
        else:
            apart = best - x > NEAR * tl.maximum(tl.abs(x), best)
            score = 1.0 / tl.sum(tl.where(apart, 0.0, tl.exp(ranks - best)), 1)[:, None]
            score = tl.where(broken, float("nan"), score)
        numbers = tl.where(slot == place, expert, numbers)
        given = tl.where(slot == place, score, given)
        ranks = tl.where(column == expert, float("-inf"), ranks)
        total += score
    if RENORMALISE:
        given = given / tl.maximum(total + eps, least_sum, propagate_nan=tl.PropagateNan.ALL)
    given *= scale
    if scales is not None:
        given *= tl.load(scales + numbers)
    target = m.to(tl.int64)[:, None] * TOP_K + slot
    inside, real_row = (m < rows)[:, None] & (slot < TOP_K), (m < live)[:, None]
    tl.store(chosen + target, tl.where(real_row, numbered(numbers, first, experts), experts), mask=inside)
    tl.store(weights + target, tl.where(real_row, given, 0.0), mask=inside)
    if capture is not None:
        place = tl.load(mapping + m, mask=m < live, other=-1)[:, None]
        tl.store(
            capture + place * capture_line + slot, numbers.to(capture.dtype.element_ty), mask=inside & (place >= 0)
        )


@triton.jit(do_not_specialize=["rows", "first"])
def route_kernel(
    chosen,  # [rows, TOP_K] int32
    weights,  # [rows, TOP_K] float32
    capture,  # [places, TOP_K] uint8 or int16, lines capture_line apart, or None
    logits,  # [rows, experts] float32
    arrived,  # [MAX_TILES] int32; zero before and after
    x,  # [rows, depth]
    router,  # [experts, depth]
    bias,  # [experts], or None
    correction,  # [experts] float32, or None
    scales,  # [experts] float32, or None
    count,  # [1] int32: rows from here on are padding; None: there is none
    mapping,  # [rows] int64: the place where each row's experts are captured, negative: none; or None
    capture_line,
    rows,
    experts,
    first,  # the expert that has number 0 in `chosen`
    depth,
    eps,
    least_sum,
    scale,
    SIGMOID: tl.constexpr,
    NEAR: tl.constexpr,  # a float, or None
    TOP_K: tl.constexpr,
    RENORMALISE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOPK_GROUP: tl.constexpr,
    SIZE: tl.constexpr,  # experts of a group
    TWO: tl.constexpr,  # a group's rank is the sum of its best two
    COLUMNS: tl.constexpr,  # power of two >= experts
    SLOTS: tl.constexpr,  # power of two >= TOP_K
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A program computes logits of BLOCK_N experts for BLOCK_M tokens; the last program of a tile of tokens chooses."""
    tile = tl.program_id(1)
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    grid_wait(OVERLAP)
    live = rows
    if count is not None:
        live = tl.minimum(tl.load(count), rows)
    end = tl.where(tile * BLOCK_M < live, depth, 0)  # a tile of padding reads neither rows nor router
    for begin in range(0, end, BLOCK_K):
        k = begin + tl.arange(0, BLOCK_K)
        inside = (k < depth)[None, :]
        x_at = x + m.to(tl.int64)[:, None] * depth + k[None, :]
        tokens = tl.load(x_at, mask=(m < live)[:, None] & inside, other=0.0)
        each = tl.load(router + n[:, None] * depth + k[None, :], mask=(n < experts)[:, None] & inside, other=0.0)
        sums = tl.dot(tokens.to(router.dtype.element_ty), each.T, sums, input_precision="ieee")
    if bias is not None:
        sums += tl.load(bias + n, mask=n < experts, other=0.0).to(tl.float32)[None, :]
    at = logits + m.to(tl.int64)[:, None] * experts + n[None, :]
    tl.store(at, sums, mask=(m < rows)[:, None] & (n < experts)[None, :])
    tl.debug_barrier()  # every thread's logits are written before the arrival is counted
    programs = tl.num_programs(0)
    if tl.atomic_add(arrived + tile, 1, sem="acq_rel") == programs - 1:
        choose_tile(chosen, weights, capture, mapping, capture_line, logits, correction, scales, m, rows, live, experts,
                    first, eps, least_sum, scale, SIGMOID, NEAR, TOP_K, RENORMALISE, GROUPS, TOPK_GROUP, SIZE, TWO,
                    COLUMNS, SLOTS)  # fmt: skip
        tl.store(arrived + tile, 0)


def route(
    x: Tensor,
    router: Weight,
    correction: Tensor | None,
    routing: Routing,
    count: Tensor | None = None,
    capture: Capture | None = None,
    scales: Tensor | None = None,
    lasting: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Route x [T, H] by router [E, H], correction [E] float32 -> experts [T, top_k] int32, weights [T, top_k] float32.

    scales: float32 [E], factors for the experts' weights.
    count: int32 [1] on the device; rows from `count` on are padding.
    capture: gets the experts, too.
    lasting: int32 [T * top_k] or more; the returned experts use this memory.
    """
    if x.is_cuda:
        return launch_route(
            x, router.dense(), router.dense_bias(), correction, routing, count, capture, scales, lasting
        )
    chosen, weights = choose_experts(router.linear(x.to(torch.float32)), correction, routing, scales)
    if capture is not None:
        capture.write(chosen)
    chosen, weights = without_padding(chosen, weights, routing, count)
    return chosen if lasting is None else lasting[: chosen.numel()].view(chosen.shape).copy_(chosen), weights


def launch_route(
    x: Tensor,
    router: Tensor,
    bias: Tensor | None,
    correction: Tensor | None,
    routing: Routing,
    count: Tensor | None = None,
    capture: Capture | None = None,
    scales: Tensor | None = None,
    lasting: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch the Triton kernel: contiguous x [T, H], router [E, H] in x's dtype or float32, bias [E]. Needs
    `arrivals`."""
    (rows, depth), experts = x.shape, routing.num_experts
    assert router.shape == (experts, depth) and router.is_contiguous() and x.is_contiguous()
    tiles = triton.cdiv(rows, BLOCK_M)
    assert tiles <= MAX_TILES, f"{rows} tokens in a step; at most {MAX_TILES * BLOCK_M} are routed"
    chosen = torch.empty(rows * routing.top_k, dtype=torch.int32, device=x.device) if lasting is None else lasting
    chosen = chosen[: rows * routing.top_k].view(rows, routing.top_k)
    weights = torch.empty(rows, routing.top_k, dtype=torch.float32, device=x.device)
    logits = torch.empty(rows, experts, dtype=torch.float32, device=x.device)
    ids, mapping, line = (None, None, 0) if capture is None else (capture.ids, capture.mapping, capture.ids.stride(0))
    assert capture is None or (capture.ids.shape[1:] == (routing.top_k,) and capture.ids.stride(1) == 1)
    assert capture is None or len(capture.mapping) == rows
    block_n = BLOCK_N
    if router.itemsize == 2:
        block_n = next((wide for least, wide in WIDER if rows >= least and experts >= wide), BLOCK_N)
    route_kernel[(triton.cdiv(experts, block_n), tiles)](
        chosen, weights, ids, logits, arrivals(x.device), x, router, bias, correction, scales, count, mapping, line,
        rows, experts, routing.first, depth, routing.eps, routing.least_sum, routing.scale,
        SIGMOID=routing.score == "sigmoid", NEAR=routing.nearness if routing.score == "near" else None,
        TOP_K=routing.top_k, RENORMALISE=routing.norm_topk_prob, GROUPS=routing.n_group, TOPK_GROUP=routing.topk_group,
        SIZE=experts // routing.n_group, TWO=routing.group_rank == "best two",
        COLUMNS=triton.next_power_of_2(experts), SLOTS=triton.next_power_of_2(routing.top_k),
        BLOCK_M=BLOCK_M, BLOCK_N=block_n, BLOCK_K=BLOCK_K, num_warps=4,
        num_stages=STAGES if target().loads_past_registers else 3, **launch_options(),
    )  # fmt: skip
    return chosen, weights


def route_reference(
    x: Tensor,
    router: Tensor,
    bias: Tensor | None,
    correction: Tensor | None,
    routing: Routing,
    count: Tensor | None = None,
    scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    logits = torch.nn.functional.linear(x.to(wide), router.to(wide), None if bias is None else bias.to(wide))
    return without_padding(*choose_experts(logits, correction, routing, scales), routing, count)


def without_padding(chosen: Tensor, weights: Tensor, routing: Routing, count: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the choice, numbered from routing.first on, and changed so that rows from `count` on choose no expert."""
    if routing.first:
        chosen = (chosen - routing.first) % routing.num_experts
    if count is None:
        return chosen, weights
    padding = torch.arange(len(chosen), device=chosen.device)[:, None] >= count
    return chosen.masked_fill(padding, routing.num_experts), weights.masked_fill(padding, 0.0)


def choose_experts(
    logits: Tensor, correction: Tensor | None, routing: Routing, scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Choose by logits [T, E] float32 or float64: experts [T, top_k] int32, weights [T, top_k] in the logits' dtype."""
    if routing.score == "near":
        return near_experts(logits, routing)
    # A row's softmax does not depend on the other rows. torch's float32 sigmoid does: for the end of a tensor it uses
    # other instructions, which may differ in the last bit. Float64 hides this bit.
    scores = torch.softmax(logits, -1) if routing.score == "softmax" else logits.double().sigmoid().to(logits.dtype)
    ranks = scores if correction is None else scores + correction
    broken = ranks.isnan().any(-1, keepdim=True)
    scores, ranks = scores.masked_fill(broken, float("nan")), ranks.masked_fill(broken, 0.0)
    if routing.topk_group < routing.n_group:
        ranks = ranks.masked_fill(~_of_chosen_groups(ranks, routing), float("-inf"))
    chosen = ranks.sort(dim=-1, descending=True, stable=True).indices[:, : routing.top_k]
    weights = scores.gather(-1, chosen)
    if routing.norm_topk_prob:
        total = weights[:, :1]
        for slot in range(1, routing.top_k):  # in slot order for any number of tokens
            total = total + weights[:, slot : slot + 1]
        weights = weights / (total + routing.eps).clamp(min=routing.least_sum)
    weights = weights * routing.scale
    return chosen.to(torch.int32), weights if scales is None else weights * scales[chosen]


def near_experts(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """Choose the highest remaining logit top_k times; its weight is its softmax share among remaining logits near
    it."""
    broken = logits.isnan().any(-1, keepdim=True)
    left = logits.masked_fill(broken, 0.0)
    numbers, weights = [], []
    for _ in range(routing.top_k):
        best = left.amax(-1, keepdim=True)
        expert = (left == best).int().argmax(-1, keepdim=True)
        apart = best - logits > routing.nearness * torch.maximum(logits.abs(), best)
        powers = (left - best).exp().masked_fill(apart, 0.0)
        numbers.append(expert)
        weights.append(1.0 / powers.sum(-1, keepdim=True))
        left = left.scatter(-1, expert, float("-inf"))
    return torch.cat(numbers, -1).to(torch.int32), torch.cat(weights, -1).masked_fill(broken, float("nan"))


def _of_chosen_groups(ranks: Tensor, routing: Routing) -> Tensor:
    """Return [T, E] bool: the experts in each token's best groups."""
    grouped = ranks.unflatten(-1, (routing.n_group, -1))  # [T, groups, E / groups]
    if routing.group_rank == "maximum":
        of_group = grouped.amax(-1)
    else:
        best = grouped.sort(dim=-1, descending=True).values
        of_group = best[..., 0] + best[..., 1]
    capture = of_group.sort(dim=-1, descending=True, stable=True).indices[:, : routing.topk_group]
    mask = torch.zeros_like(of_group, dtype=torch.bool).scatter_(1, capture, value=True)
    return mask[..., None].expand_as(grouped).flatten(1)
