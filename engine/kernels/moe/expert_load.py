"""Expert load: how a step distributes its pairs of a token and an expert over the experts of each layer.

In: the experts that the rows of the newest step chose, which moe/route stores in a permanent buffer. Out, per layer:
the number of experts chosen by any token, the pairs of the busiest expert, and all pairs. On an accelerator one launch
with a program per layer, which may write to host memory. Users: engine/step/parts/expert_load, for a sample of steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.target import tl, triton

BLOCK = 1024  # pairs that a program counts at a time
COLUMNS = 3  # chosen experts, pairs of the busiest expert, all pairs


@triton.jit
def expert_load_kernel(
    out,  # [layers, 3] int32
    choices,  # [layers, line] int32: the rows' experts, row after row
    tops,  # [layers] int32: experts per row
    num_rows,  # [1] int32: rows that are not padding
    num_last,  # [1] int32: rows of the last layer that are not padding
    line,
    experts,
    BINS: tl.constexpr,  # power of two > experts
    BLOCK: tl.constexpr,
):
    """Counts one layer per program."""
    layer, lane, number = tl.program_id(0), tl.arange(0, BLOCK), tl.arange(0, BINS)
    rows = tl.load(num_rows)
    if layer == tl.num_programs(0) - 1:
        rows = tl.load(num_last)
    pairs = rows * tl.load(tops + layer)
    found = tl.zeros([BINS], tl.int32)
    for first in range(0, pairs, BLOCK):
        at = layer.to(tl.int64) * line + first + lane
        found += tl.histogram(tl.load(choices + at, mask=first + lane < pairs, other=BINS - 1), BINS)
    found = tl.where(number < experts, found, 0)
    tl.store(out + layer * 3, tl.sum((found > 0).to(tl.int32), 0))
    tl.store(out + layer * 3 + 1, tl.max(found, 0))
    tl.store(out + layer * 3 + 2, tl.sum(found, 0))


def count_expert_load(
    out: Tensor, choices: Tensor, tops: Tensor, num_rows: Tensor, num_last: Tensor, experts: int
) -> None:
    """choices int32 [layers, line], tops int32 [layers], num_rows and num_last int32 [1] -> out int32 [layers, 3].

    num_last: rows of the last layer. experts: the maximum over the layers. out: on the device, or pinned.
    """
    count = launch_expert_load if choices.is_cuda else expert_load_reference
    count(out, choices, tops, num_rows, num_last, experts)


def launch_expert_load(
    out: Tensor, choices: Tensor, tops: Tensor, num_rows: Tensor, num_last: Tensor, experts: int
) -> None:
    """The Triton kernel."""
    assert choices.is_contiguous() and out.is_contiguous() and out.shape == (len(choices), COLUMNS)  # noqa: PT018
    bins = triton.next_power_of_2(experts + 1)
    expert_load_kernel[(len(choices),)](
        out, choices, tops, num_rows, num_last, choices.shape[1], experts, BINS=bins, BLOCK=BLOCK, num_warps=4
    )


def expert_load_reference(
    out: Tensor, choices: Tensor, tops: Tensor, num_rows: Tensor, num_last: Tensor, experts: int
) -> None:
    for layer, (chosen, top_k) in enumerate(zip(choices, tops.tolist())):
        rows = int(num_last if layer == len(choices) - 1 else num_rows)
        out[layer] = expert_load_of(chosen[: rows * top_k], experts)


def expert_load_of(chosen: Tensor, experts: int) -> Tensor:
    """The experts of pairs -> int32 [3]; numbers from `experts` on mean no expert."""
    found = torch.bincount(chosen.flatten().long(), minlength=experts)[:experts]
    return torch.stack([(found > 0).sum(), found.max(), found.sum()]).int()
