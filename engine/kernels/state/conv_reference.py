"""The short convolution in plain torch, one row of the step at a time: the reference for kernels and the CPU fallback.

In: the products of the step's tokens. Out: silu(bias + sum over j of taps[j] * input of the position j earlier).
Writes the row's inputs into its ring, and the inputs before each base that the step leaves into the run of that base.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from engine.kernels.state.places import Place
from engine.kernels.state.rows import StepRow, by_token, wide


def convolved(
    inputs: Tensor,
    taps: Tensor,
    bias: Tensor | None,
    pages: Tensor,
    row: StepRow,
    before: Place,
    ring: Place,
    size: int,
) -> Tensor:
    """inputs [tokens of the row, width], taps [count, width], the token's own tap first -> results, wide, same shape.

    `before`: the place of the count - 1 inputs before a base; `ring`: the place of inputs by position modulo `size`.
    """
    behind, tokens = len(taps) - 1, len(inputs)
    held = row.read_tail(pages, ring, size)
    first = before.read(pages, row.base_blocks) if row.base else inputs.new_zeros(behind, inputs.shape[1])
    line = torch.cat([first.to(inputs.dtype), held.to(inputs.dtype), inputs])  # first: position base - behind
    row.write_tail(pages, ring, size, inputs)
    for at, runs in row.targets.items():
        for blocks in runs:
            before.write(pages, blocks, line[at - row.base : at - row.base + behind])
    line = line[len(line) - tokens - behind :].to(wide(inputs.dtype))
    total = line.new_zeros(tokens, inputs.shape[1]) if bias is None else bias.to(line.dtype).repeat(tokens, 1)
    for tap, weight in enumerate(taps.to(line.dtype)):
        total += line[behind - tap : behind - tap + tokens] * weight
    return by_token(silu, total)
