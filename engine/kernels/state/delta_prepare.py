"""Computes the terms of a chunk of the gated delta rule that need no state; all chunks run in parallel.

    inverse  X = (I + A)^-1, A = strictly lower(beta_i (k_i.k_j) e^{G_i - G_j})                      [T, heads, SIZE]
    mixed    M = lower((q_i.k_j) e^{G_i - G_j})                                                      [T, heads, SIZE]
    levels   G, the sums of gates from the chunk's first position on, and betas                           [heads, T]

The triangle of 64 x 64 is inverted in blocks of 16 x 16, in float32: blocks on the diagonal by substitution, the other
blocks from the inverted ones. Repeated squaring would take fewer steps, but the powers of A overflow where keys are
equal. Users: delta_scan.
"""

from __future__ import annotations

from torch import Tensor

from engine.attention.state_meta import StateWork
from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.state.delta import DeltaShape, DeltaWeights
from engine.kernels.state.delta_inputs import gate_of
from engine.kernels.state.runs import decay_between, running_sum, sigmoid
from engine.kernels.target import tl, triton

SIZE = 64  # positions of a chunk
WARPS = 2


@triton.jit
def inverse_blocks(first, second, third, fourth, BLOCK: tl.constexpr):
    """Inverts I + a row by row for four strictly lower triangular a [BLOCK, BLOCK] at once, a thread has all four."""
    a = tl.join(tl.join(first, second), tl.join(third, fourth))
    i, j = tl.arange(0, BLOCK)[:, None, None, None], tl.arange(0, BLOCK)[None, :, None, None]
    found = tl.broadcast_to(tl.where(i == j, 1.0, 0.0), a.shape)
    for row in range(1, BLOCK):
        line = tl.sum(tl.where(i == row, a, 0.0), 0)  # this row of a
        line = tl.sum(line[:, None] * found, 0)
        found = tl.where(i == row, found - line[None], found)
    one, other = tl.split(found)
    one, next_one = tl.split(one)
    other, next_other = tl.split(other)
    return one, next_one, other, next_other


@triton.jit
def exact_dot(a, b):
    """A product in float32."""
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def part_of(values, place, PART: tl.constexpr):
    """Returns values[PART * place : PART * (place + 1)] of values [4 * PART]."""
    four = tl.reshape(values, [4, PART])
    return tl.sum(tl.where((tl.arange(0, 4) == place)[:, None], four, 0.0), 0)


@triton.jit
def lower_block(left, right, level_left, level_right, strict: tl.constexpr, PART: tl.constexpr):
    """Returns (left_i . right_j) e^{G_i - G_j} [PART, PART] for right [channels, PART].

    strict >= 0, for a block on the diagonal: entries with i - j < strict are 0.
    """
    i, j = tl.arange(0, PART)[:, None], tl.arange(0, PART)[None, :]
    product = tl.dot(left, right, input_precision="ieee")
    if strict < 0:
        wanted = (i >= 0) & (j >= 0)
    else:
        wanted = i - j >= strict
    return product * decay_between(level_left[:, None], level_right[None, :], wanted)


@triton.jit
def store_blocks(place, first, second, third, fourth, mask, PART: tl.constexpr):
    """Stores four blocks side by side; blocks above the diagonal are zeros, because `carry` reads whole rows."""
    tl.store(place, first, mask=mask)
    tl.store(place + PART, second, mask=mask)
    tl.store(place + 2 * PART, third, mask=mask)
    tl.store(place + 3 * PART, fourth, mask=mask)


@triton.jit
def delta_prepare_kernel(
    inverse,  # [T, VALUE_HEADS, 64]
    mixed,  # [T, VALUE_HEADS, 64]
    levels, betas,  # [VALUE_HEADS, T] float32
    active, projected, a_log, dt_bias, chunks, num_chunks,
    level_stride, projected_stride,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    B: tl.constexpr, A: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PART: tl.constexpr,  # 16: a quarter of a chunk
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program computes one chunk of one value head."""
    grid_wait(OVERLAP)
    number, head = tl.program_id(1), tl.program_id(0)
    if number < tl.load(num_chunks):
        token, count = tl.load(chunks + number * 4 + 1), tl.load(chunks + number * 4 + 2)
        key_head = head // (VALUE_HEADS // KEY_HEADS)
        i, c, part = tl.arange(0, 4 * PART), tl.arange(0, BLOCK_K), tl.arange(0, PART)
        there = i < count
        line = projected + (token + i).to(tl.int64) * projected_stride + head
        gate = gate_of(tl.load(line + A, mask=there, other=0.0), tl.load(a_log + head), tl.load(dt_bias + head))
        level = running_sum(tl.where(there, gate, 0.0), 4 * PART)
        beta = tl.load(line + B, mask=there, other=0.0).to(tl.float32)
        beta = tl.where(there, sigmoid(beta), 0.0)
        sums = head * level_stride + token + i
        tl.store(levels + sums, level, mask=there)
        tl.store(betas + sums, beta, mask=there)
        g0, g1, g2, g3 = (
            part_of(level, 0, PART), part_of(level, 1, PART), part_of(level, 2, PART), part_of(level, 3, PART),
        )  # fmt: skip
        b0, b1 = part_of(beta, 0, PART)[:, None], part_of(beta, 1, PART)[:, None]
        b2, b3 = part_of(beta, 2, PART)[:, None], part_of(beta, 3, PART)[:, None]
        width: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
        at = (token + part).to(tl.int64)[:, None] * width + key_head * KEY_DIM + c[None, :]
        k, step = active + KEY_HEADS * KEY_DIM + at, PART * width
        in_key, left = (c < KEY_DIM)[None, :], count - part[:, None]
        # Loads the keys again, transposed: tl.trans of registers gives wrong results on sm_90 (Triton 3.4 to 3.7).
        turned = (token + part).to(tl.int64)[None, :] * width + (KEY_HEADS + key_head) * KEY_DIM + c[:, None]
        t, in_keys, right = active + turned, (c < KEY_DIM)[:, None], count - part[None, :]
        # (I + A)^-1: blocks on the diagonal by substitution, the other blocks from the inverted ones.
        k0, t0 = tl.load(k, mask=in_key & (left > 0), other=0.0), tl.load(t, mask=in_keys & (right > 0), other=0.0)
        a00 = b0 * lower_block(k0, t0, g0, g0, 1, PART)
        k1 = tl.load(k + step, mask=in_key & (left > PART), other=0.0)
        a10 = b1 * lower_block(k1, t0, g1, g0, -1, PART)
        k2 = tl.load(k + 2 * step, mask=in_key & (left > 2 * PART), other=0.0)
        a20 = b2 * lower_block(k2, t0, g2, g0, -1, PART)
        k3 = tl.load(k + 3 * step, mask=in_key & (left > 3 * PART), other=0.0)
        a30 = b3 * lower_block(k3, t0, g3, g0, -1, PART)
        t1 = tl.load(t + step, mask=in_keys & (right > PART), other=0.0)
        a11 = b1 * lower_block(k1, t1, g1, g1, 1, PART)
        a21 = b2 * lower_block(k2, t1, g2, g1, -1, PART)
        a31 = b3 * lower_block(k3, t1, g3, g1, -1, PART)
        t2 = tl.load(t + 2 * step, mask=in_keys & (right > 2 * PART), other=0.0)
        a22 = b2 * lower_block(k2, t2, g2, g2, 1, PART)
        a32 = b3 * lower_block(k3, t2, g3, g2, -1, PART)
        t3 = tl.load(t + 3 * step, mask=in_keys & (right > 3 * PART), other=0.0)
        a33 = b3 * lower_block(k3, t3, g3, g3, 1, PART)
        x00, x11, x22, x33 = inverse_blocks(a00, a11, a22, a33, PART)
        x10 = -exact_dot(x11, exact_dot(a10, x00))
        x21 = -exact_dot(x22, exact_dot(a21, x11))
        x32 = -exact_dot(x33, exact_dot(a32, x22))
        x20 = -exact_dot(x22, exact_dot(a20, x00) + exact_dot(a21, x10))
        x31 = -exact_dot(x33, exact_dot(a31, x11) + exact_dot(a32, x21))
        x30 = -exact_dot(x33, exact_dot(a30, x00) + exact_dot(a31, x10) + exact_dot(a32, x20))
        at = ((token + part).to(tl.int64)[:, None] * VALUE_HEADS + head) * (4 * PART) + part[None, :]
        row, line = PART * VALUE_HEADS * 4 * PART, inverse + at
        kind = inverse.dtype.element_ty
        none = tl.zeros([PART, PART], kind)
        store_blocks(line, x00.to(kind), none, none, none, left > 0, PART)
        store_blocks(line + row, x10.to(kind), x11.to(kind), none, none, left > PART, PART)
        store_blocks(line + 2 * row, x20.to(kind), x21.to(kind), x22.to(kind), none, left > 2 * PART, PART)
        store_blocks(line + 3 * row, x30.to(kind), x31.to(kind), x32.to(kind), x33.to(kind), left > 3 * PART, PART)
        # M: the products of queries and keys.
        at = (token + i).to(tl.int64)[:, None] * width + key_head * KEY_DIM + c[None, :]
        queries = tl.load(active + at, mask=in_key & there[:, None], other=0.0)
        keys = (token + i).to(tl.int64)[None, :] * width + key_head * KEY_DIM + c[:, None]
        keys = tl.load(active + KEY_HEADS * KEY_DIM + keys, mask=in_keys & there[None, :], other=0.0)
        products = tl.dot(queries, keys, input_precision="ieee")
        products *= decay_between(level[:, None], level[None, :], i[:, None] >= i[None, :])
        at = ((token + i).to(tl.int64)[:, None] * VALUE_HEADS + head) * (4 * PART) + i[None, :]
        tl.store(mixed + at, products.to(mixed.dtype.element_ty), mask=there[:, None])


def launch_prepare(
    active: Tensor,
    projected: Tensor,
    weights: DeltaWeights,
    shape: DeltaShape,
    work: StateWork,
    gates: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns inverse, mixed (dtype of `active`, zeros above the diagonal); levels, betas [value_heads, T] float32.

    `gates`: the first columns of b and of a in `projected`; None: those of the shape.
    """
    inverse, mixed = active.new_empty(2, len(active), shape.value_heads, SIZE).unbind(0)
    levels, betas = weights.a_log.new_empty(2, shape.value_heads, len(active)).unbind(0)
    b, a = gates or shape.columns[2:4]
    delta_prepare_kernel[shape.value_heads, len(work.chunks)](
        inverse, mixed, levels, betas, active, projected, weights.a_log, weights.dt_bias, work.chunks, work.count,
        levels.stride(0), projected.stride(0), KEY_HEADS=shape.key_heads, VALUE_HEADS=shape.value_heads,
        KEY_DIM=shape.key_dim, VALUE_DIM=shape.value_dim, B=b, A=a,
        BLOCK_K=max(16, triton.next_power_of_2(shape.key_dim)), PART=SIZE // 4, num_warps=WARPS, **launch_options(),
    )  # fmt: skip
    return inverse, mixed, levels, betas
