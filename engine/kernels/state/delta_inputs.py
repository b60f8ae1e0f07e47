"""Triton kernel that prepares a step of the gated delta rule for short rows: everything that needs no state.

A program computes one key head of one row, with the value heads that share the key head. It convolves the row's tokens,
writes k, g and inputs into the tail, and writes the inputs before a new base. The step kernel follows and reads:

    heads   q, k [key heads, 2, key_dim]; v [value heads, value_dim]                                          float32
    near    e^{G_t - G_j} (k_j.k_t) and .. (k_j.q_t) for each position j after the base, 0 and k_t.q_t for the token
            itself; of a row's first token also e^{G_n - G_j} for the positions j that a fold adds to the base
            [value heads, 3, places]                             G: sums of gates from the base on, G_n: at its end

Users: delta_step.
"""

from __future__ import annotations

from torch import Tensor

from engine.attention.state_meta import StateMeta
from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.state.delta import UNIT, DeltaShape, DeltaWeights, StatePages
from engine.kernels.state.runs import input_row, plan_of, row_at, sigmoid, softplus
from engine.kernels.target import target, tl, triton


@triton.jit
def gate_of(a, a_log, bias):
    """-exp(a_log) * softplus(a + bias), float32."""
    return -tl.exp(a_log) * softplus(a.to(tl.float32) + bias)


@triton.jit
def decay_behind(gate, j, place, end):
    """exp(sum of the gates at positions place + 1..end - 1); gate and j [lanes], place a number or [lanes, 1]."""
    return tl.exp(tl.sum(tl.where((j > place) & (j < end), gate, 0.0), -1))


@triton.jit
def earlier_rows(
    position, begin, behind, first, projected, pages, before, tail, projected_stride, page_stride, WIDTH: tl.constexpr,
    RING: tl.constexpr, TAPS: tl.constexpr, BEFORE_FIRST: tl.constexpr, INPUT_FIRST: tl.constexpr,
    INPUT_EACH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Addresses of the inputs of the TAPS - 1 positions before a position."""
    rows = ()
    for tap in tl.static_range(1, TAPS):
        rows += (  # type: ignore[assignment]
            input_row(
                position - tap, begin, behind, first, projected, pages, before, tail, projected_stride, page_stride,
                WIDTH, RING, TAPS, BEFORE_FIRST, INPUT_FIRST, INPUT_EACH, EARLY,
            ),
        )  # fmt: skip
    return rows


@triton.jit
def loaded(rows, position, lane, column, size, TAPS: tl.constexpr, EARLY: tl.constexpr):
    """Loads these TAPS - 1 inputs: lanes below `size`; inputs of positions before the first are 0."""
    found = ()
    for tap in tl.static_range(1, TAPS):
        wanted = lane < tl.where(position >= tap, size, 0)
        found += (tl.load(rows[tap - 1] + column, mask=wanted, other=0.0, cache_modifier=".cg" if EARLY else ""),)  # type: ignore[assignment]
    return found


@triton.jit
def convolved(own, earlier, taps, column, inside, WIDTH: tl.constexpr, TAPS: tl.constexpr):
    """silu(sum over taps of tap * input), float32."""
    total = own.to(tl.float32) * tl.load(taps + column, mask=inside, other=0.0)
    for tap in tl.static_range(1, TAPS):
        total += earlier[tap - 1].to(tl.float32) * tl.load(taps + tap * WIDTH + column, mask=inside, other=0.0)
    return total * sigmoid(total)


@triton.jit
def past_of(
    keys, gates, tail, slot, seen, query, in_key, key_head, key_stride, gate_stride, KEY_WIDTH: tl.constexpr,
    VALUE_HEADS: tl.constexpr, SHARES: tl.constexpr, KEY_FIRST: tl.constexpr, KEY_EACH: tl.constexpr,
    GATE_FIRST: tl.constexpr, GATE_EACH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Loads the keys of the positions `seen` [PLACES, BLOCK_K], and the gates of the heads that share the key head."""
    at = row_at(tail, slot, key_stride, seen, KEY_FIRST, KEY_EACH, KEY_WIDTH, EARLY)[:, None] + query[None, :]
    past = tl.load(keys + at, mask=seen[:, None] & in_key[None, :], other=0.0, cache_modifier=".cg" if EARLY else "")
    gate_at = gates + row_at(tail, slot, gate_stride, seen, GATE_FIRST, GATE_EACH, VALUE_HEADS, EARLY)
    found = ()
    for share in tl.static_range(SHARES):
        head = key_head * SHARES + share
        found += (tl.load(gate_at + head, mask=seen, other=0.0, cache_modifier=".cg" if EARLY else ""),)  # type: ignore[assignment]
    return past, found


@triton.jit
def make_token(
    earlier_q, earlier_k, earlier_v, past, past_gates, position, token, held, heads, near, projected, taps, a_log,
    dt_bias, keys, gates, tail, j, query, value, in_key, in_value, key_head, projected_stride, key_stride, gate_stride,
    KEY_WIDTH: tl.constexpr, WIDTH: tl.constexpr, VALUE_HEADS: tl.constexpr, SHARES: tl.constexpr, A: tl.constexpr,
    TAPS: tl.constexpr, SCALE: tl.constexpr, UNIT: tl.constexpr, RING: tl.constexpr, KEY_FIRST: tl.constexpr,
    KEY_EACH: tl.constexpr, GATE_FIRST: tl.constexpr, GATE_EACH: tl.constexpr, INPUT_FIRST: tl.constexpr,
    INPUT_EACH: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Writes a token's heads and near, and its key, gates and inputs into the tail; `held`: positions before it."""
    own = projected + token * projected_stride
    own_q = tl.load(own + query, mask=in_key, other=0.0)
    own_k = tl.load(own + KEY_WIDTH + query, mask=in_key, other=0.0)
    own_v = tl.load(own + value, mask=in_value, other=0.0)
    q = convolved(own_q, earlier_q, taps, query, in_key, WIDTH, TAPS)
    k = convolved(own_k, earlier_k, taps, KEY_WIDTH + query, in_key, WIDTH, TAPS)
    v = convolved(own_v, earlier_v, taps, value, in_value, WIDTH, TAPS)
    q *= tl.rsqrt(tl.sum(q * q, 0) + UNIT) * SCALE
    rounded = (k * tl.rsqrt(tl.sum(k * k, 0) + UNIT)).to(keys.dtype.element_ty)
    k = rounded.to(tl.float32)  # as later steps read it
    made = heads + token * WIDTH
    tl.store(made + query, q, mask=in_key)
    tl.store(made + KEY_WIDTH + query, k, mask=in_key)
    tl.store(made + value, v, mask=in_value)
    new = position % RING
    put = keys + row_at(tail, new, key_stride, position >= 0, KEY_FIRST, KEY_EACH, KEY_WIDTH)
    tl.store(put + query, rounded, mask=in_key)
    put = keys + row_at(tail, new, key_stride, position >= 0, INPUT_FIRST, INPUT_EACH, WIDTH)
    tl.store(put + query, own_q, mask=in_key)
    tl.store(put + KEY_WIDTH + query, own_k, mask=in_key)
    tl.store(put + value, own_v, mask=in_value)
    put_gate = gates + row_at(tail, new, gate_stride, position >= 0, GATE_FIRST, GATE_EACH, VALUE_HEADS)
    wide = past.to(tl.float32)
    of_k, of_q = tl.sum(wide * k[None, :], 1), tl.sum(wide * q[None, :], 1)
    of_q = tl.where(j == held, tl.sum(k * q, 0), of_q)
    for share in tl.static_range(SHARES):
        head = key_head * SHARES + share
        gate_own = gate_of(tl.load(own + A + head), tl.load(a_log + head), tl.load(dt_bias + head))
        gate = tl.where(j == held, gate_own, past_gates[share])
        between = decay_behind(gate[None, :], j[None, :], j[:, None], held + 1)
        place = near + (token * VALUE_HEADS + head) * (3 * PLACES) + j
        tl.store(place, of_k * between)
        tl.store(place + PLACES, of_q * between)
        tl.store(put_gate + head, gate_own)


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
    near,  # [T, VALUE_HEADS, 3, PLACES] float32
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
    row, key_head = tl.program_id(1), tl.program_id(0)
    shares: tl.constexpr = VALUE_HEADS // KEY_HEADS
    key_width: tl.constexpr = KEY_HEADS * KEY_DIM
    width: tl.constexpr = 2 * key_width + VALUE_HEADS * VALUE_DIM
    # Keys and gates of earlier steps, too, are read before the wait.
    first, count, behind, settled, held, base_blocks, tail, short = plan_of(
        row, runs, base_run, tail_run, base, new_base, start, query_start, checkpoint_run, runs_stride, RING
    )
    begin = behind + held
    c, d, j = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V), tl.arange(0, PLACES)
    in_key, in_value, slot = c < KEY_DIM, d < shares * VALUE_DIM, (behind + j) % RING
    query, value = key_head * KEY_DIM + c, 2 * key_width + key_head * shares * VALUE_DIM + d
    rows = earlier_rows(
        tl.where(short, begin, 0), begin, behind, first, projected, keys, base_blocks, tail, projected_stride,
        key_stride, width, RING, TAPS, BEFORE_FIRST, INPUT_FIRST, INPUT_EACH, True,
    )  # fmt: skip
    at = tl.where(short, begin, 0)
    earlier_q = loaded(rows, at, c, query, KEY_DIM, TAPS, True)
    earlier_k = loaded(rows, at, c, key_width + query, KEY_DIM, TAPS, True)
    earlier_v = loaded(rows, at, d, value, shares * VALUE_DIM, TAPS, True)
    past, past_gates = past_of(
        keys, gates, tail, slot, j < tl.where(short, held, 0), query, in_key, key_head, key_stride, gate_stride,
        key_width, VALUE_HEADS, shares, KEY_FIRST, KEY_EACH, GATE_FIRST, GATE_EACH, True,
    )  # fmt: skip
    grid_wait(OVERLAP)
    if short:
        make_token(
            earlier_q, earlier_k, earlier_v, past, past_gates, begin, first.to(tl.int64), held, heads, near, projected,
            taps, a_log, dt_bias, keys, gates, tail, j, query, value, in_key, in_value, key_head, projected_stride,
            key_stride, gate_stride, key_width, width, VALUE_HEADS, shares, A, TAPS, SCALE, UNIT, RING, KEY_FIRST,
            KEY_EACH, GATE_FIRST, GATE_EACH, INPUT_FIRST, INPUT_EACH, PLACES,
        )  # fmt: skip
        for t in range(1, count):
            tl.debug_barrier()  # the token reads k and g of the one before
            position = begin + t
            rows = earlier_rows(
                position, begin, behind, first, projected, keys, base_blocks, tail, projected_stride, key_stride,
                width, RING, TAPS, BEFORE_FIRST, INPUT_FIRST, INPUT_EACH, False,
            )  # fmt: skip
            earlier_q = loaded(rows, position, c, query, KEY_DIM, TAPS, False)
            earlier_k = loaded(rows, position, c, key_width + query, KEY_DIM, TAPS, False)
            earlier_v = loaded(rows, position, d, value, shares * VALUE_DIM, TAPS, False)
            past, past_gates = past_of(
                keys, gates, tail, slot, j < held + t, query, in_key, key_head, key_stride, gate_stride, key_width,
                VALUE_HEADS, shares, KEY_FIRST, KEY_EACH, GATE_FIRST, GATE_EACH, False,
            )  # fmt: skip
            make_token(
                earlier_q, earlier_k, earlier_v, past, past_gates, position, (first + t).to(tl.int64), held + t, heads,
                near, projected, taps, a_log, dt_bias, keys, gates, tail, j, query, value, in_key, in_value, key_head,
                projected_stride, key_stride, gate_stride, key_width, width, VALUE_HEADS, shares, A, TAPS, SCALE, UNIT,
                RING, KEY_FIRST, KEY_EACH, GATE_FIRST, GATE_EACH, INPUT_FIRST, INPUT_EACH, PLACES,
            )  # fmt: skip
        if settled > 0:
            tl.debug_barrier()  # gates of the row's tokens are read again
            slot_at = row_at(tail, slot, gate_stride, j < settled, GATE_FIRST, GATE_EACH, VALUE_HEADS)
            for share in tl.static_range(shares):
                head = key_head * shares + share
                gate = tl.load(gates + slot_at + head, mask=j < settled, other=0.0)
                weights = decay_behind(gate[None, :], j[None, :], j[:, None], settled)
                place = near + (first.to(tl.int64) * VALUE_HEADS + head) * (3 * PLACES) + 2 * PLACES + j
                tl.store(place, tl.where(j < settled, weights, 0.0))
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
    near = heads.new_empty(tokens, shape.value_heads, 3, places)
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
        BLOCK_V=triton.next_power_of_2(shape.value_heads // shape.key_heads * shape.value_dim),
        num_warps=warps_of(shape.key_heads * len(meta.base)), **launch_options(),
    )  # fmt: skip
    return heads, near


def warps_of(programs: int) -> int:
    """Warps per program, as measured on an H200: few programs need several, many wait for fewer sums over warps."""
    each = programs / target().num_units
    return 4 if each <= 2 else 2 if each <= 8 else 1
