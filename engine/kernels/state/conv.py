"""Triton kernels of the short convolution; inputs come from this step, from a row's ring, or from before its base.

    active  silu(bias + sum over j of taps[j] * input of the position j earlier). The first 2 * KEY_HEADS pieces are
            heads of queries and keys: each is divided by its norm, and queries also by sqrt(KEY_DIM)

For short rows conv_kernel writes the inputs and the columns LOW..HIGH of `active` into the ring, and the inputs before
a new base into the run of that base; later steps read all of them. For long rows the scan's last kernel writes the
ring, because other programs may still read it, and before_kernel writes the inputs before each base that the step
leaves. Sums are float32. Users: delta_rule, ssd, selective_rule.
"""

from __future__ import annotations

from torch import Tensor

from engine.attention.state_meta import MAX_CHECKPOINTS, StateMeta
from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.state.delta import StatePages
from engine.kernels.state.runs import CHECKPOINTS, input_row, is_short, row_at, row_of, sigmoid
from engine.kernels.target import tl, triton

COLUMNS = 256  # columns of a program if columns are not split into heads
BEFORE = 1024  # columns of a program of before_kernel
TOKENS = 16  # tokens of one program if a step has more than 256 tokens


@triton.jit
def conv_rows(
    token, right, first, row_begin, behind, short, base_blocks, tail, active, projected, taps, bias, pages, column,
    last, is_key, scale, projected_stride, page_stride, WIDTH: tl.constexpr, TAPS: tl.constexpr,
    KEY_HEADS: tl.constexpr, UNIT: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, RING: tl.constexpr,
    BEFORE_FIRST: tl.constexpr, RING_FIRST: tl.constexpr, RING_EACH: tl.constexpr, AGAIN_FIRST: tl.constexpr,
    AGAIN_EACH: tl.constexpr, GROUP: tl.constexpr, SHORT: tl.constexpr,
):  # fmt: skip
    """Computes the tokens token..right - 1 of one row, GROUP tokens at a time; the loads of a group overlap."""
    for begin in range(token, right, GROUP):
        found = ()
        for number in tl.static_range(GROUP + TAPS - 1):
            position = row_begin + begin - first + number - (TAPS - 1)
            source = input_row(
                position, row_begin, behind, first, projected, pages, base_blocks, tail, projected_stride, page_stride,
                WIDTH, RING, TAPS, BEFORE_FIRST, RING_FIRST, RING_EACH,
            )  # fmt: skip
            end = tl.where((position >= 0) & (position < row_begin + right - first), last, 0)
            found += (tl.load(source + column, mask=column < end, other=0.0),)  # type: ignore[assignment]
        for number in tl.static_range(GROUP):
            total = tl.zeros_like(scale)
            if bias is not None:
                total += tl.load(bias + column, mask=column < last, other=0.0)
            for tap in tl.static_range(TAPS):
                weight = tl.load(taps + tap * WIDTH + column, mask=column < last, other=0.0)
                total += found[number + TAPS - 1 - tap].to(tl.float32) * weight
            total *= sigmoid(total)
            if KEY_HEADS > 0:
                length = tl.rsqrt(tl.sum(total * total, 0) + UNIT)
                total *= tl.where(is_key, length * scale, 1.0)
            one = first + (begin + number - first)  # this sum makes a tensor of a Python number
            made, end = total.to(active.dtype.element_ty), tl.where(one < right, last, 0)
            tl.store(active + one.to(tl.int64) * WIDTH + column, made, mask=column < end)
            if SHORT:
                slot, stored = (row_begin + one - first) % RING, short & (one < right)
                at = row_at(tail, slot, page_stride, stored, RING_FIRST, RING_EACH, WIDTH)
                tl.store(pages + at + column, found[number + TAPS - 1], mask=column < tl.where(stored, last, 0))
                if HIGH > LOW:
                    again = (column >= LOW) & (column < tl.where(stored, tl.minimum(last, HIGH), 0))
                    at = row_at(tail, slot, page_stride, stored, AGAIN_FIRST, AGAIN_EACH, HIGH - LOW)
                    tl.store(pages + at + column - LOW, made.to(pages.dtype.element_ty), mask=again)


@triton.jit
def write_before(
    run, end, behind, begin, first, base_blocks, tail, runs, projected, pages, column, last, runs_stride,
    projected_stride, page_stride, WIDTH: tl.constexpr, TAPS: tl.constexpr, RING: tl.constexpr,
    BEFORE_FIRST: tl.constexpr, INPUT_FIRST: tl.constexpr, INPUT_EACH: tl.constexpr,
):  # fmt: skip
    """Writes columns below `last` of the TAPS - 1 inputs before position `end` into a run."""
    left = runs + run.to(tl.int64) * runs_stride
    for place in range(TAPS - 1):
        position = end - (TAPS - 1) + place
        source = input_row(
            position, begin, behind, first, projected, pages, base_blocks, tail, projected_stride, page_stride,
            WIDTH, RING, TAPS, BEFORE_FIRST, INPUT_FIRST, INPUT_EACH,
        )  # fmt: skip
        found = tl.load(source + column, mask=column < tl.where(position >= 0, last, 0), other=0.0)
        target = pages + row_at(left, place, page_stride, run > 0, BEFORE_FIRST, INPUT_EACH, WIDTH)
        tl.store(target + column, found, mask=column < last)


@triton.jit(do_not_specialize=["num_rows"])
def conv_kernel(
    active,  # [T, WIDTH]
    projected,  # [T, ...], WIDTH columns of it
    taps,  # [TAPS, WIDTH] float32
    bias,  # [WIDTH] float32, or None
    pages,
    runs, base_run, write_run, tail_run, base, new_base, start, query_start, checkpoint_run,
    num_rows,
    runs_stride,
    projected_stride,
    page_stride,
    WIDTH: tl.constexpr,
    TAPS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    PIECE: tl.constexpr,  # columns of a piece after the keys
    BLOCK: tl.constexpr,  # power of two >= KEY_DIM, PIECE
    SCALE: tl.constexpr,  # factor of queries
    UNIT: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    RING: tl.constexpr,
    BEFORE_FIRST: tl.constexpr,
    RING_FIRST: tl.constexpr,
    RING_EACH: tl.constexpr,
    AGAIN_FIRST: tl.constexpr,  # page of the ring's columns LOW..HIGH in a run
    AGAIN_EACH: tl.constexpr,
    STEPS: tl.constexpr,  # 2 ** STEPS >= num_rows
    TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    SHORT: tl.constexpr,  # computes short rows too
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program computes TOKENS tokens, one piece of columns; bisection of query_start finds the first row."""
    grid_wait(OVERLAP)
    token = tl.program_id(0) * TOKENS
    until = tl.minimum(token + TOKENS, tl.load(query_start + num_rows))
    piece, lane = tl.program_id(1), tl.arange(0, BLOCK)
    is_key = piece < 2 * KEY_HEADS
    other = 2 * KEY_HEADS * KEY_DIM + (piece - 2 * KEY_HEADS) * PIECE
    column = tl.where(is_key, piece * KEY_DIM, other) + lane
    last = tl.minimum(tl.where(is_key, (piece + 1) * KEY_DIM, other + PIECE), WIDTH)
    scale = tl.where(piece < KEY_HEADS, SCALE, 1.0) + tl.zeros([BLOCK], tl.float32)
    row = row_of(token, query_start, num_rows, STEPS)
    while token < until:
        first = tl.load(query_start + row)
        right = tl.minimum(tl.load(query_start + row + 1), until)
        if token < right:
            short = is_short(row, base, start, query_start, checkpoint_run, token < right, RING)
            wanted = short
            if not SHORT:
                wanted = short == 0
            if SHORT | wanted:
                base_blocks = runs + tl.load(base_run + row).to(tl.int64) * runs_stride
                tail = runs + tl.load(tail_run + row).to(tl.int64) * runs_stride
                begin, behind = tl.load(start + row), tl.load(base + row)
                conv_rows(
                    token, right, first, begin, behind, short, base_blocks, tail, active,
                    projected, taps, bias, pages, column, last, is_key, scale, projected_stride, page_stride, WIDTH,
                    TAPS, KEY_HEADS, UNIT, LOW, HIGH, RING, BEFORE_FIRST, RING_FIRST, RING_EACH, AGAIN_FIRST,
                    AGAIN_EACH, GROUP, SHORT,
                )  # fmt: skip
                if SHORT:
                    end = tl.load(new_base + row)
                    if short & (token == first) & (end > behind):
                        write_before(
                            tl.load(write_run + row), end, behind, begin, first, base_blocks, tail, runs, projected,
                            pages, column, last, runs_stride, projected_stride, page_stride, WIDTH, TAPS, RING,
                            BEFORE_FIRST, RING_FIRST, RING_EACH,
                        )  # fmt: skip
        token = tl.maximum(token, right)
        row += 1


@triton.jit
def before_kernel(
    projected,  # [T, ...], WIDTH columns of it
    pages,
    runs, base_run, write_run, tail_run, base, new_base, start, query_start, checkpoint_run, checkpoint_at,
    runs_stride,
    projected_stride,
    page_stride,
    WIDTH: tl.constexpr,
    TAPS: tl.constexpr,
    RING: tl.constexpr,
    BEFORE_FIRST: tl.constexpr,
    INPUT_FIRST: tl.constexpr,
    INPUT_EACH: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program writes COLUMNS columns of the inputs before one base of a long row: a new base, or a checkpoint."""
    grid_wait(OVERLAP)
    number, row = tl.program_id(1), tl.program_id(2)
    first = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - first
    if number == CHECKPOINTS:
        run, ends = tl.load(write_run + row), tl.load(new_base + row)
    else:
        run = tl.load(checkpoint_run + row * CHECKPOINTS + number)
        ends = tl.load(checkpoint_at + row * CHECKPOINTS + number)
    behind, begin = tl.load(base + row), tl.load(start + row)
    chosen = (count > 0) & (run > 0) & (ends > behind)
    chosen &= is_short(row, base, start, query_start, checkpoint_run, count > 0, RING) == 0
    if chosen:
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        base_blocks = runs + tl.load(base_run + row).to(tl.int64) * runs_stride
        tail = runs + tl.load(tail_run + row).to(tl.int64) * runs_stride
        write_before(
            run, ends, behind, begin, first, base_blocks, tail, runs, projected, pages, column, WIDTH, runs_stride,
            projected_stride, page_stride, WIDTH, TAPS, RING, BEFORE_FIRST, INPUT_FIRST, INPUT_EACH,
        )  # fmt: skip


def launch_conv(
    projected: Tensor, taps: Tensor, bias: Tensor | None, cache: StatePages, meta: StateMeta, ring: int,
    again: tuple[int, int] = (0, 0), key_heads: int = 0, key_dim: int = 1, piece: int = COLUMNS, unit: float = 0.0,
    short: bool = True,
) -> Tensor:  # fmt: skip
    """projected [T, columns], inputs in its first `width` columns -> active [T, width] of the same dtype.

    Without `short`, the kernels skip short rows. `again`: the columns of `active` that go into the tail's first part;
    the last part of the tail and of the state holds inputs. `key_heads`, `key_dim`: number and columns of the heads of
    keys (as many of queries); `piece`: columns of each other piece; `unit`: added to the sum of squares of a head.
    `ring`: 0 if each row begins at its base.
    """
    (before, inputs), width = (cache.state[-1], cache.tail[-1]), taps.shape[1]
    pages, rows, tokens = cache.pages.view(inputs.dtype), len(meta.base), len(projected)
    assert projected.dtype is inputs.dtype is before.dtype, f"{projected.dtype} in pages of {inputs.dtype}"
    assert projected.stride(1) == 1
    assert inputs.width == before.width == width
    assert inputs.per_page == before.per_page, "lines of inputs are equal"
    active = projected.new_empty(tokens, width)
    pieces = 2 * key_heads + triton.cdiv(width - 2 * key_heads * key_dim, piece)
    each = 1 if tokens <= 256 and ring else TOKENS  # a replay computes every step with the same program
    block = triton.next_power_of_2(max(piece, key_dim if key_heads else 1))
    conv_kernel[triton.cdiv(tokens, each), pieces](
        active, projected, taps, bias, pages, meta.runs, meta.base_run, meta.write_run, meta.tail_run, meta.base,
        meta.new_base, meta.start, meta.query_start, meta.checkpoint_run, rows,
        meta.runs.stride(0), projected.stride(0), pages.stride(0), WIDTH=width, TAPS=len(taps), KEY_HEADS=key_heads,
        KEY_DIM=key_dim, PIECE=piece, BLOCK=block, SCALE=key_dim**-0.5, UNIT=unit, LOW=again[0], HIGH=again[1],
        RING=ring, BEFORE_FIRST=before.first, RING_FIRST=inputs.first,
        RING_EACH=inputs.per_page, AGAIN_FIRST=cache.tail[0].first, AGAIN_EACH=cache.tail[0].per_page,
        STEPS=max(1, (rows - 1).bit_length()), TOKENS=each, GROUP=min(4, each), SHORT=short,
        num_warps=max(1, block // 128), **launch_options(),
    )  # fmt: skip
    if not meta.decode_only:
        before_kernel[triton.cdiv(width, BEFORE), MAX_CHECKPOINTS + 1, rows](
            projected, pages, meta.runs, meta.base_run, meta.write_run, meta.tail_run, meta.base, meta.new_base,
            meta.start, meta.query_start, meta.checkpoint_run, meta.checkpoint_at, meta.runs.stride(0),
            projected.stride(0), pages.stride(0), WIDTH=width, TAPS=len(taps), RING=ring, BEFORE_FIRST=before.first,
            INPUT_FIRST=inputs.first, INPUT_EACH=inputs.per_page, COLUMNS=BEFORE, num_warps=4, **launch_options(),
        )  # fmt: skip
    return active
