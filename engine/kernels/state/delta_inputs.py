"""Triton kernel that prepares a step of the gated delta rule for short rows: everything that needs no state.

A program computes one key head of one row, with the value heads that share the key head. It convolves the row's tokens,
writes k, g and inputs into the tail, and writes the inputs before a new base. The step kernel follows and reads:

    heads   q, k [key heads, 2, key_dim]; v [value heads, value_dim]                                          float32
    near    e^{G_t - G_j} (k_j.k_t) and .. (k_j.q_t) for each position j after the base [value heads, 2, places];
            for the token itself (j = t): 0 and k_t.q_t                          G: sums of gates from the base on

Users: delta_step.
"""

from __future__ import annotations

from torch import Tensor

from engine.attention.state_meta import StateMeta
from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.state.delta import UNIT, DeltaShape, DeltaWeights, StatePages
from engine.kernels.state.runs import CHECKPOINTS, input_row, row_at, sigmoid, softplus
from engine.kernels.target import tl, triton


@triton.jit
def gate_of(a, a_log, bias):
    """-exp(a_log) * softplus(a + bias), float32."""
    return -tl.exp(a_log) * softplus(a.to(tl.float32) + bias)


@triton.jit
def decay_behind(gate, j, place, end):
    """exp(sum of the gates at positions place + 1..end - 1); gate and j [lanes], place a number or [lanes, 1]."""
    return tl.exp(tl.sum(tl.where((j > place) & (j < end), gate, 0.0), -1))


@triton.jit
def input_rows(
    position, begin, behind, first, projected, pages, before, tail, projected_stride, page_stride, WIDTH: tl.constexpr,
    RING: tl.constexpr, TAPS: tl.constexpr, BEFORE_FIRST: tl.constexpr, INPUT_FIRST: tl.constexpr,
    INPUT_EACH: tl.constexpr,
):  # fmt: skip
    """Addresses of the inputs of a position and of the TAPS - 1 positions before the position."""
    rows = ()
    for tap in tl.static_range(TAPS):
        rows += (  # type: ignore[assignment]
            input_row(
                position - tap, begin, behind, first, projected, pages, before, tail, projected_stride, page_stride,
                WIDTH, RING, TAPS, BEFORE_FIRST, INPUT_FIRST, INPUT_EACH,
            ),
        )  # fmt: skip
    return rows


@triton.jit
def loaded(rows, position, lane, column, size, TAPS: tl.constexpr):
    """Loads these TAPS inputs: lanes below `size`; inputs of positions before the first are 0."""
    found = ()
    for tap in tl.static_range(TAPS):
        wanted = lane < tl.where(position >= tap, size, 0)
        found += (tl.load(rows[tap] + column, mask=wanted, other=0.0),)  # type: ignore[assignment]
    return found


@triton.jit
def convolved(found, taps, column, inside, WIDTH: tl.constexpr, TAPS: tl.constexpr):
    """silu(sum over taps of tap * input), float32."""
    total = found[0].to(tl.float32) * tl.load(taps + column, mask=inside, other=0.0)
    for tap in tl.static_range(1, TAPS):
        total += found[tap].to(tl.float32) * tl.load(taps + tap * WIDTH + column, mask=inside, other=0.0)
    return total * sigmoid(total)


@triton.jit
def keep_before(
    settled, behind, begin, first, row, query, shared, value, in_value, projected, keys, base_blocks, tail, runs,
    write_run, runs_stride, projected_stride, key_stride, KEY_WIDTH: tl.constexpr, WIDTH: tl.constexpr,
    RING: tl.constexpr, TAPS: tl.constexpr, BEFORE_FIRST: tl.constexpr, INPUT_FIRST: tl.constexpr,
    INPUT_EACH: tl.constexpr,
):  # fmt: skip
    """Writes the inputs before a new base into its run: columns of the head's query, key and values."""
    left = runs + tl.load(write_run + row).to(tl.int64) * runs_stride
    for place in range(TAPS - 1):
        position = behind + settled - (TAPS - 1) + place
        source = input_row(
            position, begin, behind, first, projected, keys, base_blocks, tail, projected_stride, key_stride, WIDTH,
            RING, TAPS, BEFORE_FIRST, INPUT_FIRST, INPUT_EACH,
        )  # fmt: skip
        target = keys + row_at(left, place, key_stride, position >= 0, BEFORE_FIRST, INPUT_EACH, WIDTH)
        tl.store(target + query, tl.load(source + query, mask=shared, other=0.0), mask=shared)
        query_k = KEY_WIDTH + query
        tl.store(target + query_k, tl.load(source + query_k, mask=shared, other=0.0), mask=shared)
        tl.store(target + value, tl.load(source + value, mask=in_value, other=0.0), mask=in_value)


@triton.jit
def delta_inputs_kernel(
    heads,  # [T, 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM] float32
    near,  # [T, VALUE_HEADS, 2, PLACES] float32
    projected,  # [T, q | k | v | z | b | a]
    taps,  # [TAPS, q | k | v]
    a_log, dt_bias,  # [VALUE_HEADS]
    keys, gates,  # the pages in the dtypes of these parts; inputs have the dtype of keys
    runs, base_run, write_run, tail_run, base, new_base, start, query_start, checkpoint_run,
    runs_stride, projected_stride, key_stride, gate_stride,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    A: tl.constexpr,  # first column of the gates in `projected`
    TAPS: tl.constexpr, SCALE: tl.constexpr, UNIT: tl.constexpr, RING: tl.constexpr,
    KEY_FIRST: tl.constexpr, KEY_EACH: tl.constexpr, GATE_FIRST: tl.constexpr, GATE_EACH: tl.constexpr,
    BEFORE_FIRST: tl.constexpr, INPUT_FIRST: tl.constexpr, INPUT_EACH: tl.constexpr,
    PLACES: tl.constexpr,  # power of two >= RING
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,  # power of two >= columns of the values that share a key head
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program computes one key head of one row."""
    grid_wait(OVERLAP)
    row, key_head = tl.program_id(1), tl.program_id(0)
    shares: tl.constexpr = VALUE_HEADS // KEY_HEADS
    key_width: tl.constexpr = KEY_HEADS * KEY_DIM
    width: tl.constexpr = 2 * key_width + VALUE_HEADS * VALUE_DIM
    first = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - first
    behind, begin = tl.load(base + row), tl.load(start + row)
    settled, held = tl.load(new_base + row) - behind, begin - behind
    base_blocks = runs + tl.load(base_run + row).to(tl.int64) * runs_stride
    tail = runs + tl.load(tail_run + row).to(tl.int64) * runs_stride
    if (count > 0) & (held + count <= RING) & (tl.load(checkpoint_run + row * CHECKPOINTS) == 0):
        c, d, j = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V), tl.arange(0, PLACES)
        in_key, in_value, slot = c < KEY_DIM, d < shares * VALUE_DIM, (behind + j) % RING
        query, value = key_head * KEY_DIM + c, 2 * key_width + key_head * shares * VALUE_DIM + d
        for t in range(count):
            rows = input_rows(
                begin + t, begin, behind, first, projected, keys, base_blocks, tail, projected_stride, key_stride,
                width, RING, TAPS, BEFORE_FIRST, INPUT_FIRST, INPUT_EACH,
            )  # fmt: skip
            inputs_q = loaded(rows, begin + t, c, query, KEY_DIM, TAPS)
            inputs_k = loaded(rows, begin + t, c, key_width + query, KEY_DIM, TAPS)
            inputs_v = loaded(rows, begin + t, d, value, shares * VALUE_DIM, TAPS)
            seen = j < held + t
            past_at = row_at(tail, slot, key_stride, seen, KEY_FIRST, KEY_EACH, key_width)[:, None] + query[None, :]
            past = tl.load(keys + past_at, mask=seen[:, None] & in_key[None, :], other=0.0).to(tl.float32)
            gate_at = gates + row_at(tail, slot, gate_stride, seen, GATE_FIRST, GATE_EACH, VALUE_HEADS)
            q = convolved(inputs_q, taps, query, in_key, width, TAPS)
            k = convolved(inputs_k, taps, key_width + query, in_key, width, TAPS)
            v = convolved(inputs_v, taps, value, in_value, width, TAPS)
            q *= tl.rsqrt(tl.sum(q * q, 0) + UNIT) * SCALE
            kept_k = (k * tl.rsqrt(tl.sum(k * k, 0) + UNIT)).to(keys.dtype.element_ty)
            k = kept_k.to(tl.float32)  # rounded as later steps read it
            token = (first + t).to(tl.int64)
            made = heads + token * width
            tl.store(made + query, q, mask=in_key)
            tl.store(made + key_width + query, k, mask=in_key)
            tl.store(made + value, v, mask=in_value)
            new = (begin + t) % RING
            put = keys + row_at(tail, new, key_stride, count > 0, KEY_FIRST, KEY_EACH, key_width)
            tl.store(put + query, kept_k, mask=in_key)
            put = keys + row_at(tail, new, key_stride, count > 0, INPUT_FIRST, INPUT_EACH, width)
            tl.store(put + query, inputs_q[0], mask=in_key)
            tl.store(put + key_width + query, inputs_k[0], mask=in_key)
            tl.store(put + value, inputs_v[0], mask=in_value)
            put_gate = gates + row_at(tail, new, gate_stride, count > 0, GATE_FIRST, GATE_EACH, VALUE_HEADS)
            of_k, of_q = tl.sum(past * k[None, :], 1), tl.sum(past * q[None, :], 1)
            of_q = tl.where(j == held + t, tl.sum(k * q, 0), of_q)
            for share in tl.static_range(shares):
                head = key_head * shares + share
                a = tl.load(projected + token * projected_stride + A + head)
                own = gate_of(a, tl.load(a_log + head), tl.load(dt_bias + head))
                gate = tl.where(j == held + t, own, tl.load(gate_at + head, mask=seen, other=0.0))
                between = decay_behind(gate[None, :], j[None, :], j[:, None], held + t + 1)
                place = near + (token * VALUE_HEADS + head) * (2 * PLACES) + j
                tl.store(place, of_k * between)
                tl.store(place + PLACES, of_q * between)
                tl.store(put_gate + head, own)
            if count > 1:
                tl.debug_barrier()  # further tokens read k and g
        if settled > 0:
            keep_before(
                settled, behind, begin, first, row, query, in_key, value, in_value, projected, keys, base_blocks, tail,
                runs, write_run, runs_stride, projected_stride, key_stride, key_width, width, RING, TAPS, BEFORE_FIRST,
                INPUT_FIRST, INPUT_EACH,
            )  # fmt: skip


def launch_delta_inputs(
    projected: Tensor, weights: DeltaWeights, shape: DeltaShape, cache: StatePages, meta: StateMeta, places: int
) -> tuple[Tensor, Tensor]:
    """Returns (heads, near) of the tokens of short rows."""
    (keys, _, gates, inputs), before, a = cache.tail, cache.state[-1], shape.columns[3]
    assert projected.dtype is keys.dtype is inputs.dtype is before.dtype, f"{projected.dtype}, pages: {keys.dtype}"
    assert before.per_page == inputs.per_page, "lines of inputs are equal"
    assert projected.stride(1) == 1
    tokens = len(projected)
    heads = projected.new_empty(tokens, shape.conv_width, dtype=gates.dtype)
    near = heads.new_empty(tokens, shape.value_heads, 2, places)
    values, of_gates = cache.pages.view(keys.dtype), cache.pages.view(gates.dtype)
    delta_inputs_kernel[shape.key_heads, len(meta.base)](
        heads, near, projected, weights.taps, weights.a_log, weights.dt_bias, values, of_gates, meta.runs,
        meta.base_run, meta.write_run, meta.tail_run, meta.base, meta.new_base, meta.start, meta.query_start,
        meta.checkpoint_run, meta.runs.stride(0), projected.stride(0), values.stride(0), of_gates.stride(0),
        KEY_HEADS=shape.key_heads, VALUE_HEADS=shape.value_heads, KEY_DIM=shape.key_dim, VALUE_DIM=shape.value_dim,
        A=a, TAPS=shape.taps, SCALE=shape.key_dim**-0.5, UNIT=UNIT, RING=shape.ring, KEY_FIRST=keys.first,
        KEY_EACH=keys.per_page, GATE_FIRST=gates.first, GATE_EACH=gates.per_page, BEFORE_FIRST=before.first,
        INPUT_FIRST=inputs.first, INPUT_EACH=inputs.per_page, PLACES=places,
        BLOCK_K=triton.next_power_of_2(shape.key_dim),
        BLOCK_V=triton.next_power_of_2(shape.value_heads // shape.key_heads * shape.value_dim), num_warps=4,
        **launch_options(),
    )  # fmt: skip
    return heads, near
