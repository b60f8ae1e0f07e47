"""Expert load: how a step distributes its pairs of a token and an expert over the experts of each layer.

In: the experts that the rows of the newest step chose, which moe/route leaves in a lasting place. Out, per layer: the
experts that a token chose, the pairs of the expert with most, and all pairs. On an accelerator one launch, a program
per layer, which may write into the host's memory. Users: engine/step/parts/expert_load, for one step in many.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.target import tl, triton

BLOCK = 1024  # pairs that a program counts at a time
COLUMNS = 3  # experts touched, pairs of the busiest, pairs


@triton.jit
def expert_load_kernel(
    out,  # [layers, 3] int32
    choices,  # [layers, line] int32: a row's experts side by side
    tops,  # [layers] int32: experts of a row
    num_rows,  # [1] int32: rows that are no padding
    num_last,  # [1] int32: those of the last layer
    line,
    experts,
    BINS: tl.constexpr,  # power of two > experts
    BLOCK: tl.constexpr,
):
    """One layer per program."""
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

    num_last: rows of the last layer. experts: the most that a layer has. out: on the device, or pinned.
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
    """The experts of pairs -> int32 [3]; `experts` and above are none."""
    found = torch.bincount(chosen.flatten().long(), minlength=experts)[:experts]
    return torch.stack([(found > 0).sum(), found.max(), found.sum()]).int()
