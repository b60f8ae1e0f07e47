"""In-place norms of queries and keys before they are split into heads, or with separate weights for every head.

    rms:     y = x / sqrt(mean(x^2) + eps) * weight                        centred: y = (x - mean) / std * weight

over groups of columns: all queries and all keys of a token (Olmo 2, Olmo 3), or each head (Cohere). Columns after the
keys are values and stay unchanged; Gemma 4 passes only its values, without keys. Users: attention layers with a norm
that `qkv_rope_store` does not support; they call this just before it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.norm import layer_norm_reference, rms_norm_reference
from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.target import tl, triton


@triton.jit
def projection_norm_kernel(
    qkv,  # [rows, ...], rows `stride` apart: q_width columns of queries, then k_width of keys; changed in place
    q_weight,  # [q_width] float32
    k_weight,  # [k_width] float32
    stride,
    q_width,
    q_group,  # columns that are normalised together
    k_group,
    eps,
    CENTRE: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two >= both groups
    OVERLAP: tl.constexpr,
):
    """A program normalises one group of one row: first all groups of queries, then the groups of keys."""
    grid_wait(OVERLAP)
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    q_groups = q_width // q_group
    is_query = group < q_groups
    width = tl.where(is_query, q_group, k_group)
    first = tl.where(is_query, group * q_group, (group - q_groups) * k_group)  # first column within queries or keys
    column = tl.arange(0, BLOCK)
    inside = column < width
    weight = (q_weight if is_query else k_weight) + first
    target = qkv + row * stride + tl.where(is_query, 0, q_width) + first + column
    x = tl.load(target, mask=inside, other=0.0).to(tl.float32)
    if CENTRE:
        x = tl.where(inside, x - tl.sum(x, 0) / width, 0.0)
    scale = 1.0 / tl.sqrt_rn(tl.sum(x * x, 0) / width + eps)
    y = x * scale * tl.load(weight + column, mask=inside, other=0.0)
    tl.store(target, y.to(qkv.dtype.element_ty), mask=inside)


def normalise_projections(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, q_group: int, k_group: int, eps: float, centre: bool
) -> None:
    """Normalise in qkv [T, (Hq + 2 Hkv) * D] the first len(q_weight) columns and the next len(k_weight), in groups.

    Weights are float32; q_group divides len(q_weight), and k_group divides len(k_weight).
    """
    launch = launch_projection_norm if qkv.is_cuda else projection_norm_reference
    launch(qkv, q_weight, k_weight, q_group, k_group, eps, centre)


def launch_projection_norm(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, q_group: int, k_group: int, eps: float, centre: bool
) -> None:
    """Launch the Triton kernel; arguments as `normalise_projections`."""
    q_width, k_width = len(q_weight), len(k_weight)
    assert qkv.stride(1) == 1, "rows must be contiguous"
    assert not q_width % q_group, f"{q_width} columns of queries in groups of {q_group}"
    assert not k_width % k_group, f"{k_width} columns of keys in groups of {k_group}"
    block = triton.next_power_of_2(max(q_group, k_group))
    projection_norm_kernel[(len(qkv), q_width // q_group + k_width // k_group)](
        qkv, q_weight, k_weight, qkv.stride(0), q_width, q_group, k_group, eps,
        CENTRE=centre, BLOCK=block, num_warps=min(16, max(1, block // 512)), **launch_options(),
    )  # fmt: skip


def projection_norm_reference(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, q_group: int, k_group: int, eps: float, centre: bool
) -> None:
    first = 0
    for weight, group in ((q_weight, q_group), (k_weight, k_group)):
        columns = qkv[:, first : first + len(weight)]
        groups = columns.unflatten(1, (len(weight) // group, group))
        ones = torch.ones(group, device=qkv.device)
        wide = groups.to(torch.promote_types(qkv.dtype, torch.float32))
        y = layer_norm_reference(wide, ones, None, eps) if centre else rms_norm_reference(wide, ones, eps)
        columns.copy_(y.flatten(1) * weight)
        first += len(weight)
