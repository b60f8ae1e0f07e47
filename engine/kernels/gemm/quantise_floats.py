"""Quantises rows to FP8 (e4m3): q[m, k] = e4m3(clamp(x[m, k] / s, -448, 448)), rounded to nearest, ties to even.

s is the largest magnitude / 448 of the row or of each 128 columns, or a given scale. Zeros get scale 1; with `powers` s
is the next power of two. With a gain the rows are normed first, as in kernels/norm, and rounded to x's dtype. With an
activation a row is gate, then up, and activate(gate, up) in x's dtype is quantised, which saves a kernel. Users:
gemm/float8_weight and moe/dispatch_float8, if the checkpoint quantises inputs in this way.
"""

# ruff: noqa: PT018 (a launcher checks in few lines)
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels.activation import Activation, activate, glu_reference
from engine.kernels.gemm.codes import Inputs, quantised_e4m3
from engine.kernels.norm import rms_norm_reference
from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.target import target, tl, triton

GROUP = 128  # columns per scale, for inputs without a scale per row


class CodedRows(NamedTuple):
    """Rows quantised to FP8."""

    codes: Tensor  # [M, K] uint8
    scales: Tensor  # [groups, M] float32

    def dense(self) -> Tensor:
        """A copy, [M, K] float64."""
        groups, columns = len(self.scales), self.codes.shape[1]
        scales = self.scales.double().t().repeat_interleave(columns if groups == 1 else GROUP, 1)
        return self.codes.view(torch.float8_e4m3fn).double() * scales[:, :columns]


@triton.jit
def e4m3_codes(values, NATIVE: tl.constexpr):
    """float32 of magnitudes up to 448 -> the bits of e4m3 in uint8; on devices without e4m3 by integer arithmetic.

    An instruction of sm_89 and later rounds two numbers, with the same bits as the integer arithmetic, which takes
    about fifteen instructions per number, half of the kernel's time.
    """
    if NATIVE:
        codes = values.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = values.to(tl.uint32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        rounded = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20  # exponent and three bits, 127 added to it
        # Below 2^-6 a code is a multiple of 2^-9: adding 1.5 * 2^23 leaves no room for a fraction.
        small = (tl.abs(values) * 512.0 + 12582912.0) - 12582912.0
        code = tl.where(tl.abs(values) < 0.015625, small.to(tl.uint32), rounded - 960)
        codes = (code | (bits >> 31 << 7)).to(tl.uint8)
    return codes


@triton.jit
def scale_of(most, POWERS: tl.constexpr):
    """The scale of numbers whose largest magnitude is `most`; POWERS: the next power of two."""
    return to_power(tl.where(most > 0, tl.fdiv(most, 448.0), 1.0), POWERS)


@triton.jit
def to_power(scale, POWERS: tl.constexpr):
    """With POWERS: the scale rounded up to a power of two."""
    if POWERS:
        bits = scale.to(tl.uint32, bitcast=True)
        scale = (((bits + 0x7FFFFF) >> 23) << 23).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def coded(values, scale, NATIVE: tl.constexpr):
    """The codes of float32 values / scales of the same shape; NaN stays NaN, so that its request ends with an error."""
    exact = tl.fdiv(values, scale)
    codes = e4m3_codes(tl.minimum(tl.maximum(exact, -448.0), 448.0), NATIVE)
    return tl.where(exact == exact, codes, 0x7F)


@triton.jit
def code_row(
    out, scales, values, given, row, rows, width, STATIC: tl.constexpr, POWERS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Stores codes and scales of a whole row, float32 [BLOCK], zeros beyond its width."""
    RUN: tl.constexpr = GROUP if GROUP else BLOCK
    runs = tl.reshape(values, [BLOCK // RUN, RUN])
    number, column = tl.arange(0, BLOCK // RUN), tl.arange(0, BLOCK)
    if STATIC:
        scale = to_power(tl.load(given + number * 0), POWERS)
    else:
        scale = scale_of(tl.max(tl.abs(runs), 1), POWERS)
    tl.store(scales + number * rows + row, scale, mask=number * RUN < width)
    codes = coded(runs, tl.broadcast_to(scale[:, None], runs.shape), NATIVE)
    tl.store(out + row * width + column, tl.reshape(codes, [BLOCK]), mask=column < width)


@triton.jit(do_not_specialize=["rows"])
def quantise_floats_kernel(
    out,  # [rows, width] uint8
    scales,  # [groups, rows] float32
    normed,  # [rows, width] for the normed rows before quantisation; or None
    x,  # [rows, width], rows x_stride apart; with ACT [rows, 2 * width]: gate, then up
    gain,  # [width] when NORM
    given,  # [] float32 when STATIC
    rows,
    width,
    x_stride,
    eps,
    NORM: tl.constexpr,
    ACT: tl.constexpr,  # an Activation; -1: none
    STATIC: tl.constexpr,
    POWERS: tl.constexpr,
    GROUP: tl.constexpr,  # columns that share a scale; 0: all
    BLOCK: tl.constexpr,  # power of two >= width, at least GROUP
    NATIVE: tl.constexpr,  # an instruction rounds to e4m3
    OVERLAP: tl.constexpr,
):
    """One row per program, in registers."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    gains = 0.0
    if NORM:
        gains = tl.load(gain + column, mask=inside, other=0.0).to(tl.float32)
    grid_wait(OVERLAP)
    kept = tl.load(x + row * x_stride + column, mask=inside, other=0.0)
    values = kept.to(tl.float32)
    if NORM:
        values = values * (1.0 / tl.sqrt_rn(tl.sum(values * values, 0) / width + eps)) * gains
        values = values.to(kept.dtype).to(tl.float32)
    if ACT >= 0:
        up = tl.load(x + row * x_stride + width + column, mask=inside, other=0.0).to(tl.float32)
        values = activate(values, up, ACT).to(kept.dtype).to(tl.float32)
    if normed is not None:
        tl.store(normed + row * width + column, values.to(kept.dtype), mask=inside)
    code_row(out, scales, values, given, row, rows, width, STATIC, POWERS, GROUP, BLOCK, NATIVE)


def quantise_floats(
    x: Tensor, inputs: Inputs, gain: Tensor | None = None, eps: float = 0.0, activation: Activation | None = None,
    normed: Tensor | None = None,
) -> CodedRows:  # fmt: skip
    """x [M, K] with contiguous rows -> codes uint8 [M, K], scales float32 [groups, M]; with gain [K] norm(x) is
    quantised.

    With an activation x is [M, 2K] and there is no gain. normed [M, K] of x's dtype gets the rows before quantisation.
    """
    if x.is_cuda:
        return launch_quantise_floats(x, inputs, gain, eps, activation, normed, target().widens_fp8)
    return quantise_floats_reference(x, inputs, gain, eps, activation, normed)


def launch_quantise_floats(
    x: Tensor,
    inputs: Inputs,
    gain: Tensor | None,
    eps: float,
    activation: Activation | None = None,
    normed: Tensor | None = None,
    native: bool = False,
) -> CodedRows:
    """The kernel; arguments as `quantise_floats`. `native`: an instruction rounds to e4m3; the bits are the same."""
    rows, width = len(x), x.shape[1] // (1 if activation is None else 2)
    assert x.stride(1) == 1 and (gain is None or (activation is None and len(gain) == width))
    assert normed is None or (normed.is_contiguous() and normed.dtype is x.dtype)
    made = empty_coded(rows, width, inputs, x.device)
    block = max(inputs.group, triton.next_power_of_2(width))
    most = 16 if activation is None else 32  # warps; a thread holds both halves of its columns
    if rows:
        quantise_floats_kernel[(rows,)](
            made.codes, made.scales, normed, x, x if gain is None else gain,
            made.scales if inputs.scale is None else inputs.scale, rows, width, x.stride(0), eps,
            NORM=gain is not None, ACT=-1 if activation is None else int(activation), STATIC=inputs.scale is not None,
            POWERS=inputs.powers, GROUP=inputs.group, BLOCK=block, NATIVE=native,
            num_warps=min(most, max(1, block // 512)), **launch_options(),
        )  # fmt: skip
    return made


def empty_coded(rows: int, width: int, inputs: Inputs, device: torch.device) -> CodedRows:
    """Memory for the codes of `rows` rows."""
    groups = -(-width // inputs.group) if inputs.group else 1
    return CodedRows(
        torch.empty(rows, width, dtype=torch.uint8, device=device),
        torch.empty(groups, rows, dtype=torch.float32, device=device),
    )


def quantise_floats_reference(
    x: Tensor, inputs: Inputs, gain: Tensor | None, eps: float, activation: Activation | None = None,
    normed: Tensor | None = None,
) -> CodedRows:  # fmt: skip
    if activation is not None:
        x = glu_reference(x, activation)
    x = x if gain is None else rms_norm_reference(x, gain, eps)
    if normed is not None:
        normed.copy_(x)
    return CodedRows(*quantised_e4m3(x, inputs))
