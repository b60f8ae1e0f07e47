"""Routing of a few rows, with the norm before it, in one launch; moe/route's tiles would be mostly empty.

    n       = x / sqrt(mean(x^2) + norm_eps) * gain, rounded
    logits  = n W^T (+ bias), float32; scores, ranks, experts and weights as in moe/route

A program multiplies one row by the router's rows of a few experts, which it reads before it waits for the row. The
program that arrives last has all logits of its row and chooses: the highest of all keys, top_k times. A row's bits
depend on no other row, but moe/route, for more rows, sums in another order. If experts multiply codes, one more program
per row makes the codes. If a shared expert has a gate, one more program per row multiplies n by the gate's weight.
Users: engine/layers/moe.
"""

# ruff: noqa: PT018 (a launcher checks in few lines)
from __future__ import annotations

import torch
from torch import Tensor

from engine.base.model_config import Routing
from engine.kernels.gemm.codes import Inputs
from engine.kernels.gemm.dense import DenseWeight
from engine.kernels.gemm.quantise_floats import CodedRows, code_row, empty_coded, quantise_floats
from engine.kernels.gemm.split_k import arrivals
from engine.kernels.gemm.weight import Weight
from engine.kernels.moe.capture import Capture
from engine.kernels.moe.route import numbered, route, route_reference
from engine.kernels.norm import rms_norm, rms_norm_reference
from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.target import target, tl, triton

MAX_ROWS = 16
MAX_DEPTH = 8192  # columns of a row, which a program holds in registers
MAX_EXPERTS = 256  # a larger number was not measured
WARPS = 4
LEAST_KEY = tl.constexpr(-(1 << 62))


@triton.jit
def choose_row(
    chosen, weights, capture, mapping, capture_line, logits, correction, scales, row, real_row, experts, first, eps,
    least_sum, scale, SIGMOID: tl.constexpr, TOP_K: tl.constexpr, RENORMALISE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Choose the experts of one row, whose logits are already written."""
    mine = tl.arange(0, COLUMNS)
    real = mine < experts
    x = tl.load(logits + row * experts + mine, mask=real, other=float("-inf"), cache_modifier=".cg")
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-x))
    else:
        scores = tl.exp(x - tl.max(x, 0))
        scores /= tl.sum(scores, 0)
    ranks = scores
    if correction is not None:
        ranks += tl.load(correction + mine, mask=real, other=0.0)
    broken = tl.sum(tl.where(real & (ranks != ranks), 1, 0), 0) > 0
    ranks, scores = tl.where(broken, 0.0, ranks), tl.where(broken, float("nan"), scores)
    # A key orders like a rank; of equal ranks the expert with the lower number has the higher key.
    bits = (ranks + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0
    key = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) * COLUMNS + (COLUMNS - 1 - mine)
    key = tl.where(real, key, LEAST_KEY)
    place = tl.full([COLUMNS], TOP_K, tl.int32)
    for turn in tl.static_range(TOP_K):
        best = key == tl.max(key, 0)
        place = tl.where(best, turn, place)
        key = tl.where(best, LEAST_KEY, key)
    taken = real & (place < TOP_K)
    given = scores
    if RENORMALISE:
        total = tl.sum(tl.where(taken, scores, 0.0), 0)
        given = given / tl.maximum(total + eps, least_sum, propagate_nan=tl.PropagateNan.ALL)
    given *= scale
    if scales is not None:
        given *= tl.load(scales + mine, mask=real, other=0.0)
    tl.store(chosen + row * TOP_K + place, tl.where(real_row, numbered(mine, first, experts), experts), mask=taken)
    tl.store(weights + row * TOP_K + place, tl.where(real_row, given, 0.0), mask=taken)
    if capture is not None:
        line = tl.where(taken & real_row, tl.load(mapping + row), -1)
        tl.store(capture + line * capture_line + place, mine.to(capture.dtype.element_ty), mask=line >= 0)


@triton.jit(do_not_specialize=["first"])
def route_rows_kernel(
    chosen,  # [rows, TOP_K] int32
    weights,  # [rows, TOP_K] float32
    normed,  # [rows, depth]
    codes,  # [rows, depth] uint8 of `normed`, or None
    code_scales,  # [groups, rows] float32
    gates,  # [rows] float32: n . gate
    given,  # [] float32 when STATIC
    capture,  # [places, TOP_K] uint8 or int16, lines capture_line apart, or None
    logits,  # [rows, experts] float32
    arrived,  # [MAX_TILES] int32; zero before and after
    x,  # [rows, depth]
    gain,  # [depth] float32
    router,  # [experts, depth]
    bias,  # [experts], or None
    gate,  # [depth]: the weight of the shared expert's gate, or None
    correction,  # [experts] float32, or None
    scales,  # [experts] float32, or None
    count,  # [1] int32: rows from here on are padding; None: there is none
    mapping,  # [rows] int64: the place where each row's experts are captured, negative: none; or None
    capture_line,
    experts,
    first,  # the expert that has number 0 in `chosen`
    depth,
    norm_eps,
    eps,
    least_sum,
    scale,
    SIGMOID: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALISE: tl.constexpr,
    COLUMNS: tl.constexpr,  # power of two >= experts
    BLOCK_N: tl.constexpr,  # experts of a program
    BLOCK_K: tl.constexpr,  # power of two >= depth
    STATIC: tl.constexpr,  # STATIC, POWERS, GROUP, NATIVE: as in gemm/quantise_floats
    POWERS: tl.constexpr,
    GROUP: tl.constexpr,
    NATIVE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A program computes BLOCK_N experts' logits of a row, or a row's codes, or its product with the gate's weight."""
    row, n, k = tl.program_id(1), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    k_in = k < depth
    each = tl.load(router + n[:, None] * depth + k[None, :], mask=(n < experts)[:, None] & k_in[None, :], other=0.0)
    gains = tl.load(gain + k, mask=k_in, other=0.0)
    grid_wait(OVERLAP)
    real_row = True
    if count is not None:
        real_row = row < tl.load(count)
    wide = tl.load(x + row.to(tl.int64) * depth + k, mask=k_in, other=0.0).to(tl.float32)
    wide *= 1.0 / tl.sqrt_rn(tl.sum(wide * wide, 0) / depth + norm_eps)
    tokens = (wide * gains).to(x.dtype.element_ty)
    if tl.program_id(0) == 0:
        tl.store(normed + row.to(tl.int64) * depth + k, tokens, mask=k_in)
    # Numbers, from the end: of the program for the gate, and of the last program with experts.
    GATE: tl.constexpr = 1 if codes is None else 2
    LAST: tl.constexpr = GATE if gate is None else GATE + 1
    if gate is not None and tl.program_id(0) == tl.num_programs(0) - GATE:
        own = tl.load(gate + k, mask=k_in, other=0.0).to(tl.float32)
        tl.store(gates + row, tl.sum(own * tokens.to(tl.float32), 0))
    elif codes is not None and tl.program_id(0) == tl.num_programs(0) - 1:
        code_row(codes, code_scales, tokens.to(tl.float32), given, row.to(tl.int64), tl.num_programs(1), depth, STATIC,
                 POWERS, GROUP, BLOCK_K, NATIVE)  # fmt: skip
    else:
        sums = tl.sum(each.to(tl.float32) * tokens.to(tl.float32)[None, :], 1)
        if bias is not None:
            sums += tl.load(bias + n, mask=n < experts, other=0.0).to(tl.float32)
        tl.store(logits + row * experts + n, sums, mask=n < experts)
        tl.debug_barrier()  # every thread's logits are written before the arrival is counted
        if tl.atomic_add(arrived + row, 1, sem="acq_rel") == tl.num_programs(0) - LAST:
            choose_row(chosen, weights, capture, mapping, capture_line, logits, correction, scales, row, real_row,
                       experts, first, eps, least_sum, scale, SIGMOID, TOP_K, RENORMALISE, COLUMNS)  # fmt: skip
            tl.store(arrived + row, 0)


def is_plain(routing: Routing) -> bool:
    """Whether ranks alone determine which experts are chosen."""
    return routing.score != "near" and routing.topk_group == routing.n_group


def takes(x: Tensor, router: Weight, routing: Routing) -> bool:
    """Whether the kernel routes the rows x [T, H]; never if a row's bits must not depend on the batch."""
    few = len(x) <= MAX_ROWS and routing.num_experts <= MAX_EXPERTS and x.shape[1] <= MAX_DEPTH
    return x.is_cuda and few and is_plain(routing) and isinstance(router, DenseWeight)


def route_of_normed(
    x: Tensor, gain: Tensor, norm_eps: float, router: Weight, correction: Tensor | None, routing: Routing,
    count: Tensor | None = None, capture: Capture | None = None, scales: Tensor | None = None,
    lasting: Tensor | None = None, inputs: Inputs | None = None, gate: Weight | None = None,
) -> tuple[Tensor, Tensor, Tensor, CodedRows | None, Tensor | None]:  # fmt: skip
    """Return rms_norm(x, gain, norm_eps) [T, H], the results of moe/route's `route`, and the rows' codes if `inputs`.

    x [T, H] contiguous, gain [H] float32; the other arguments are those of `route`. gate [1, H]: the last result is the
    rows' products with it, [T, 1] float32, or None if the kernel does not compute them.
    """
    if takes(x, router, routing):
        own = gate.weight if isinstance(gate, DenseWeight) and gate.bias is None else None
        rest = router.dense(), router.dense_bias(), correction, routing, count, capture, scales, lasting, inputs
        return launch_route_rows(x, gain, norm_eps, *rest, target().widens_fp8, own)
    if inputs is None:
        rows, codes = rms_norm(x, gain, norm_eps), None
    else:
        rows = torch.empty_like(x)
        codes = quantise_floats(x, inputs, gain, norm_eps, normed=rows)
    return rows, *route(rows, router, correction, routing, count, capture, scales, lasting), codes, None


def launch_route_rows(
    x: Tensor, gain: Tensor, norm_eps: float, router: Tensor, bias: Tensor | None, correction: Tensor | None,
    routing: Routing, count: Tensor | None = None, capture: Capture | None = None, scales: Tensor | None = None,
    lasting: Tensor | None = None, inputs: Inputs | None = None, native: bool = False, gate: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, CodedRows | None, Tensor | None]:  # fmt: skip
    """Launch the Triton kernel; arguments as `route_of_normed`; router is a matrix [E, H] of any dtype, bias [E].

    Needs `arrivals`. native: an instruction rounds to e4m3; the bits are the same without it.
    """
    (rows, depth), experts, top_k = x.shape, routing.num_experts, routing.top_k
    assert router.shape == (experts, depth) and router.is_contiguous() and x.is_contiguous()
    chosen = torch.empty(rows * top_k, dtype=torch.int32, device=x.device) if lasting is None else lasting
    chosen = chosen[: rows * top_k].view(rows, top_k)
    weights = torch.empty(rows, top_k, dtype=torch.float32, device=x.device)
    logits = torch.empty(rows, experts, dtype=torch.float32, device=x.device)
    normed = torch.empty_like(x)
    ids, mapping, line = (None, None, 0) if capture is None else (capture.ids, capture.mapping, capture.ids.stride(0))
    assert capture is None or (
        capture.ids.shape[1:] == (top_k,) and capture.ids.stride(1) == 1 and len(capture.mapping) == rows
    )
    coded = None if inputs is None else empty_coded(rows, depth, inputs, x.device)
    codes, code_scales = (None, None) if coded is None else coded
    gates = None if gate is None else torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    assert gate is None or (gate.numel() == depth and gate.is_contiguous())
    form = inputs or Inputs()
    block_k = max(form.group, triton.next_power_of_2(depth))
    block_n = 4 if block_k <= MAX_DEPTH // 2 else 2
    route_rows_kernel[(triton.cdiv(experts, block_n) + (gate is not None) + (inputs is not None), rows)](
        chosen, weights, normed, codes, code_scales, gates, form.scale, ids, logits, arrivals(x.device), x, gain,
        router, bias, gate, correction, scales, count, mapping, line, experts, routing.first, depth, norm_eps,
        routing.eps, routing.least_sum, routing.scale, SIGMOID=routing.score == "sigmoid", TOP_K=top_k,
        RENORMALISE=routing.norm_topk_prob, COLUMNS=triton.next_power_of_2(experts), BLOCK_N=block_n, BLOCK_K=block_k,
        STATIC=form.scale is not None, POWERS=form.powers, GROUP=form.group, NATIVE=native, num_warps=WARPS,
        num_stages=1, **launch_options(),
    )  # fmt: skip
    return normed, chosen, weights, coded, gates


def route_rows_reference(
    x: Tensor, gain: Tensor, norm_eps: float, router: Tensor, bias: Tensor | None, correction: Tensor | None,
    routing: Routing, count: Tensor | None = None, scales: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    rows = rms_norm_reference(x, gain, norm_eps)
    return rows, *route_reference(rows, router, bias, correction, routing, count, scales)
