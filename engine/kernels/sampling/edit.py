"""Single logits changed by what the host knows: biases, and -inf for tokens that may not follow.

    logits[row, token] += value        for every edit (row, token, value)

A ban adds -inf, so NaN and +inf stay what they are and are still found. Users: engine/sampling/device.
"""

# ruff: noqa: PT018 (a launcher checks in few lines)
from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.target import tl, triton

BLOCK = 256


# Numbers that change from step to step must not make another kernel each.
@triton.jit(do_not_specialize=["num_edits", "rows"])
def edit_kernel(
    logits,  # [rows, vocab] float32
    edits,  # [num_edits, 3] int32
    num_edits,
    rows,
    vocab,
    BLOCK: tl.constexpr,
):
    """BLOCK edits per program; what lies outside of the logits is left out."""
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = number < num_edits
    row = tl.load(edits + number * 3, mask=inside, other=-1)
    token = tl.load(edits + number * 3 + 1, mask=inside, other=-1)
    value = tl.load(edits + number * 3 + 2, mask=inside, other=0).to(tl.float32, bitcast=True)
    inside = (row >= 0) & (row < rows) & (token >= 0) & (token < vocab)
    place = logits + row.to(tl.int64) * vocab + token
    tl.store(place, tl.load(place, mask=inside, other=0.0) + value, mask=inside)


def edit(logits: Tensor, edits: Tensor) -> None:
    """Changes logits float32 [rows, vocab] in place; edits int32 [n, 3], the value as float32 bits.

    No (row, token) twice: the host adds such up first.
    """
    if not logits.is_cuda:
        edit_reference(logits, edits)
        return
    launch_edit(logits, edits)


def launch_edit(logits: Tensor, edits: Tensor) -> None:
    """The kernel; nothing is launched for no edits."""
    assert logits.is_contiguous() and edits.is_contiguous() and edits.shape[1] == 3
    if len(edits):
        edit_kernel[(triton.cdiv(len(edits), BLOCK),)](logits, edits, len(edits), *logits.shape, BLOCK=BLOCK)


def edit_reference(logits: Tensor, edits: Tensor) -> None:
    row, token, value = edits[:, 0].long(), edits[:, 1].long(), edits[:, 2].contiguous().view(torch.float32)
    inside = (row >= 0) & (row < logits.shape[0]) & (token >= 0) & (token < logits.shape[1])
    row, token = row[inside], token[inside]
    logits[row, token] = logits[row, token] + value[inside]
