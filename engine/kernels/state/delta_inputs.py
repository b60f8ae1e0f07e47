"""Triton kernel that prepares a step of the gated delta rule for short rows: everything that needs no state.

A program computes one key head of one row, with the value heads that share the key head. It convolves the row's tokens
and writes k, g and inputs into the tail. The step kernel follows and reads:

    heads   q, k [key heads, 2, key_dim]; v [value heads, value_dim]                                          float32
    dots    k_j.k_t and k_j.q_t for each position j after the base, of the token itself only the latter
            [key heads, 2, places]                                                                            float32
    decays  e^{G_t - G_j}; then e^{G_t}        G: sums of gates from the base on    [value heads, 2, places]  float32

Users: delta_step.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from engine.attention.state_meta import StateMeta
from engine.kernels.pdl import fetch_run, grid_wait, launch_options
from engine.kernels.state.delta import UNIT, DeltaShape, DeltaWeights, StatePages
from engine.kernels.state.runs import input_row, plan_of, row_at, sigmoid, softplus
from engine.kernels.target import target, tl, triton


@triton.jit
def gate_of(a, a_log, bias):
    """-exp(a_log) * softplus(a + bias), float32."""
    return -tl.exp(a_log) * softplus(a.to(tl.float32) + bias)


@triton.jit
def decays_of(gates, first, j):
    """exp(sum of gates[j:]) for each lane, and exp(first + sum of all); gates [lanes]: lane j has position j + 1's."""
    sums = tl.cumsum(gates, 0, reverse=True)
    return tl.exp(sums), tl.exp(first + tl.sum(tl.where(j == 0, sums, 0.0), 0))


@triton.jit
def loaded(rows, position, lane, column, size, TAPS: tl.constexpr, EARLY: tl.constexpr):
    """Loads these TAPS - 1 inputs: lanes below `size`; inputs of positions before the first are 0."""
    found = ()
    for tap in tl.static_range(1, TAPS):
        wanted = lane < tl.where(position >= tap, size, 0)
        found += (tl.load(rows[tap - 1] + column, mask=wanted, other=0.0, cache_modifier=".cg" if EARLY else ""),)  # type: ignore[assignment]
    return found


@triton.jit
def earlier_inputs(
    position, begin, behind, first, projected, pages, before, tail, projected_stride, page_stride, c, d, query, value,
    KEY_DIM: tl.constexpr, KEY_WIDTH: tl.constexpr, VALUES: tl.constexpr, WIDTH: tl.constexpr, RING: tl.constexpr,
    TAPS: tl.constexpr, BEFORE_FIRST: tl.constexpr, INPUT_FIRST: tl.constexpr, INPUT_EACH: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Loads q, k and v of the TAPS - 1 positions before a position, the nearest first."""
    rows = ()
    for tap in tl.static_range(1, TAPS):
        rows += (  # type: ignore[assignment]
            input_row(
                position - tap, begin, behind, first, projected, pages, before, tail, projected_stride, page_stride,
                WIDTH, RING, TAPS, BEFORE_FIRST, INPUT_FIRST, INPUT_EACH, EARLY,
            ),
        )  # fmt: skip
    q = loaded(rows, position, c, query, KEY_DIM, TAPS, EARLY)
    k = loaded(rows, position, c, KEY_WIDTH + query, KEY_DIM, TAPS, EARLY)
    return q, k, loaded(rows, position, d, value, VALUES, TAPS, EARLY)


@triton.jit
def convolved(own, earlier, taps, column, inside, WIDTH: tl.constexpr, TAPS: tl.constexpr):
    """silu(sum over taps of tap * input), float32."""
    total = own.to(tl.float32) * tl.load(taps + column, mask=inside, other=0.0)
    for tap in tl.static_range(1, TAPS):
        total += earlier[tap - 1].to(tl.float32) * tl.load(taps + tap * WIDTH + column, mask=inside, other=0.0)
    return total * sigmoid(total)


@triton.jit
def past_gates_of(
    gates, tail, behind, count, j, key_head, gate_stride, VALUE_HEADS: tl.constexpr, SHARES: tl.constexpr,
    RING: tl.constexpr, GATE_FIRST: tl.constexpr, GATE_EACH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Loads the gates of `count` positions from `behind` on, for each head that shares the key head.

    A head has two numbers: [PLACES], where lane j has the gate of position j + 1, and the gate of position 0; else 0.
    """
    seen = j + 1 < count
    place = gates + row_at(tail, (behind + j + 1) % RING, gate_stride, seen, GATE_FIRST, GATE_EACH, VALUE_HEADS, EARLY)
    start = gates + row_at(tail, behind % RING, gate_stride, count > 0, GATE_FIRST, GATE_EACH, VALUE_HEADS, EARLY)
    found, first = (), ()
    for share in tl.static_range(SHARES):
        head = key_head * SHARES + share
        found += (tl.load(place + head, mask=seen, other=0.0, cache_modifier=".cg" if EARLY else ""),)  # type: ignore[assignment]
        first += (tl.load(start + head, mask=count > 0, other=0.0, cache_modifier=".cg" if EARLY else ""),)  # type: ignore[assignment]
    return found, first


@triton.jit
def puts_of(
    keys, gates, tail, new, short, key_stride, gate_stride, KEY_WIDTH: tl.constexpr, WIDTH: tl.constexpr,
    VALUE_HEADS: tl.constexpr, KEY_FIRST: tl.constexpr, KEY_EACH: tl.constexpr, GATE_FIRST: tl.constexpr,
    GATE_EACH: tl.constexpr, INPUT_FIRST: tl.constexpr, INPUT_EACH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Addresses of a token's keys, inputs and gates in slot `new` of the tail."""
    key = keys + row_at(tail, new, key_stride, short, KEY_FIRST, KEY_EACH, KEY_WIDTH, EARLY)
    own = keys + row_at(tail, new, key_stride, short, INPUT_FIRST, INPUT_EACH, WIDTH, EARLY)
    return key, own, gates + row_at(tail, new, gate_stride, short, GATE_FIRST, GATE_EACH, VALUE_HEADS, EARLY)


@triton.jit
def past_keys(
    keys, tail, begin, held, behind, query, in_key, key_stride, KEY_WIDTH: tl.constexpr, RING: tl.constexpr,
    KEY_FIRST: tl.constexpr, KEY_EACH: tl.constexpr, LINES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Keys of positions begin..begin + LINES - 1 after the base, of those below `held` [LINES, channels]."""
    i = begin + tl.arange(0, LINES)
    at = row_at(tail, (behind + i) % RING, key_stride, i < held, KEY_FIRST, KEY_EACH, KEY_WIDTH, EARLY)
    wanted = (i < held)[:, None] & in_key[None, :]
    return tl.load(keys + at[:, None] + query[None, :], mask=wanted, other=0.0, cache_modifier=".cg" if EARLY else "")


@triton.jit
def put_dots(made, past, q, k, begin, held, PLACES: tl.constexpr, LINES: tl.constexpr):
    """Writes k_j.k_t and k_j.q_t of LINES positions from `begin` on; past: their keys."""
    i, past = begin + tl.arange(0, LINES), past.to(tl.float32)
    tl.store(made + i, tl.sum(past * k[None, :], 1), mask=i < held)
    tl.store(made + PLACES + i, tl.sum(past * q[None, :], 1), mask=i < held)


@triton.jit
def make_token(
    earlier_q, earlier_k, earlier_v, past, past_gates, first_gates, puts, token, behind, held, heads, dots, decays,
    projected, taps, a_log, dt_bias, keys, tail, j, query, value, in_key, in_value, key_head, projected_stride,
    key_stride, KEY_WIDTH: tl.constexpr, WIDTH: tl.constexpr, VALUE_HEADS: tl.constexpr, SHARES: tl.constexpr,
    A: tl.constexpr, TAPS: tl.constexpr, SCALE: tl.constexpr, UNIT: tl.constexpr, RING: tl.constexpr,
    KEY_FIRST: tl.constexpr, KEY_EACH: tl.constexpr, PLACES: tl.constexpr, LINES: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Writes heads, dots, decays of a token, and its key, gates and inputs into the tail; `held`: positions before."""
    own = projected + token * projected_stride
    own_q = tl.load(own + query, mask=in_key, other=0.0)
    own_k = tl.load(own + KEY_WIDTH + query, mask=in_key, other=0.0)
    own_v = tl.load(own + value, mask=in_value, other=0.0)
    own_gates = ()
    for share in tl.static_range(SHARES):
        head = key_head * SHARES + share
        own_gates += (gate_of(tl.load(own + A + head), tl.load(a_log + head), tl.load(dt_bias + head)),)  # type: ignore[assignment]
    q = convolved(own_q, earlier_q, taps, query, in_key, WIDTH, TAPS)
    k = convolved(own_k, earlier_k, taps, KEY_WIDTH + query, in_key, WIDTH, TAPS)
    v = convolved(own_v, earlier_v, taps, value, in_value, WIDTH, TAPS)
    q *= tl.rsqrt(tl.sum(q * q, 0) + UNIT) * SCALE
    put_key, put_own, put_gate = puts
    rounded = (k * tl.rsqrt(tl.sum(k * k, 0) + UNIT)).to(put_key.dtype.element_ty)
    k = rounded.to(tl.float32)  # as later steps read it
    made = heads + token * WIDTH
    tl.store(made + query, q, mask=in_key)
    tl.store(made + KEY_WIDTH + query, k, mask=in_key)
    tl.store(made + value, v, mask=in_value)
    tl.store(put_key + query, rounded, mask=in_key)
    tl.store(put_own + query, own_q, mask=in_key)
    tl.store(put_own + KEY_WIDTH + query, own_k, mask=in_key)
    tl.store(put_own + value, own_v, mask=in_value)
    for share in tl.static_range(SHARES):
        head = key_head * SHARES + share
        later = tl.where(j + 1 == held, own_gates[share], past_gates[share])
        between, far = decays_of(later, tl.where(held > 0, first_gates[share], own_gates[share]), j)
        place = decays + (token * VALUE_HEADS + head) * (2 * PLACES)
        tl.store(place + j, between)
        tl.store(place + PLACES, far)
        tl.store(put_gate + head, own_gates[share])
    made = dots + (token * (VALUE_HEADS // SHARES) + key_head) * (2 * PLACES)
    tl.store(made + PLACES + held, tl.sum(k * q, 0))
    if AHEAD > 0:
        put_dots(made, past, q, k, 0, held, PLACES, AHEAD)
    for begin in tl.range(AHEAD, held, LINES, num_stages=1, disable_licm=True):
        further = past_keys(
            keys, tail, begin, held, behind, query, in_key, key_stride, KEY_WIDTH, RING, KEY_FIRST, KEY_EACH, LINES,
            False,
        )  # fmt: skip
        put_dots(made, further, q, k, begin, held, PLACES, LINES)


@triton.jit
def delta_inputs_kernel(
    heads,  # [T, 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM] float32
    dots,  # [T, KEY_HEADS, 2, PLACES] float32
    decays,  # [T, VALUE_HEADS, 2, PLACES] float32
    projected,  # [T, q | k | v | z | b | a]
    taps,  # [TAPS, q | k | v]
    a_log, dt_bias,  # [VALUE_HEADS]
    keys, gates,  # the pages in the dtypes of these parts; inputs have the dtype of keys
    runs, base_run, tail_run, base, new_base, start, query_start, checkpoint_run,
    runs_stride, projected_stride, key_stride, gate_stride,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    A: tl.constexpr,  # first column of the gates in `projected`
    TAPS: tl.constexpr, SCALE: tl.constexpr, UNIT: tl.constexpr, RING: tl.constexpr,
    KEY_FIRST: tl.constexpr, KEY_EACH: tl.constexpr, GATE_FIRST: tl.constexpr, GATE_EACH: tl.constexpr,
    BEFORE_FIRST: tl.constexpr, INPUT_FIRST: tl.constexpr, INPUT_EACH: tl.constexpr,
    PLACES: tl.constexpr,  # power of two >= RING
    LINES: tl.constexpr,  # positions whose keys are loaded at once
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,  # power of two >= columns of the values that share a key head
    AHEAD: tl.constexpr,  # earlier positions whose keys are loaded before the wait, a power of two; or 0
    FETCH: tl.constexpr,  # keys of other positions come into L2 before the wait
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program computes one key head of one row."""
    row, key_head = tl.program_id(1), tl.program_id(0)
    shares: tl.constexpr = VALUE_HEADS // KEY_HEADS
    key_width: tl.constexpr = KEY_HEADS * KEY_DIM
    width: tl.constexpr = 2 * key_width + VALUE_HEADS * VALUE_DIM
    # Keys and gates of earlier steps, too, are read before the wait.
    first, count, behind, _, held, base_blocks, tail, short = plan_of(
        row, runs, base_run, tail_run, base, new_base, start, query_start, checkpoint_run, runs_stride, RING
    )
    begin = behind + held
    c, d, j = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V), tl.arange(0, PLACES)
    in_key, in_value = c < KEY_DIM, d < shares * VALUE_DIM
    query, value = key_head * KEY_DIM + c, 2 * key_width + key_head * shares * VALUE_DIM + d
    at, seen = tl.where(short, begin, 0), tl.where(short, held, 0)
    earlier_q, earlier_k, earlier_v = earlier_inputs(
        at, begin, behind, first, projected, keys, base_blocks, tail, projected_stride, key_stride, c, d, query,
        value, KEY_DIM, key_width, shares * VALUE_DIM, width, RING, TAPS, BEFORE_FIRST, INPUT_FIRST, INPUT_EACH,
        True,
    )  # fmt: skip
    past = 0
    if AHEAD > 0:
        past = past_keys(
            keys, tail, 0, seen, behind, query, in_key, key_stride, key_width, RING, KEY_FIRST, KEY_EACH, AHEAD, True
        )
    if OVERLAP and FETCH and AHEAD < PLACES:
        size: tl.constexpr = KEY_DIM * keys.dtype.element_ty.primitive_bitwidth // 8
        there = (j >= AHEAD) & (j < seen)
        line = row_at(tail, (behind + j) % RING, key_stride, there, KEY_FIRST, KEY_EACH, key_width, True)
        fetch_run(keys + line + key_head * KEY_DIM, tl.where(there, size, 0))
    past_gates, first_gates = past_gates_of(
        gates, tail, behind, seen, j, key_head, gate_stride, VALUE_HEADS, shares, RING, GATE_FIRST, GATE_EACH, True
    )
    puts = puts_of(
        keys, gates, tail, begin % RING, short, key_stride, gate_stride, key_width, width, VALUE_HEADS, KEY_FIRST,
        KEY_EACH, GATE_FIRST, GATE_EACH, INPUT_FIRST, INPUT_EACH, True,
    )  # fmt: skip
    grid_wait(OVERLAP)
    if short:
        make_token(
            earlier_q, earlier_k, earlier_v, past, past_gates, first_gates, puts, first.to(tl.int64), behind, held,
            heads, dots, decays, projected, taps, a_log, dt_bias, keys, tail, j, query, value, in_key, in_value,
            key_head, projected_stride, key_stride, key_width, width, VALUE_HEADS, shares, A, TAPS, SCALE, UNIT, RING,
            KEY_FIRST, KEY_EACH, PLACES, LINES, AHEAD,
        )  # fmt: skip
        for t in range(1, count):
            tl.debug_barrier()  # the token reads k and g of the one before
            position = begin + t
            earlier_q, earlier_k, earlier_v = earlier_inputs(
                position, begin, behind, first, projected, keys, base_blocks, tail, projected_stride, key_stride, c, d,
                query, value, KEY_DIM, key_width, shares * VALUE_DIM, width, RING, TAPS, BEFORE_FIRST, INPUT_FIRST,
                INPUT_EACH, False,
            )  # fmt: skip
            if AHEAD > 0:
                past = past_keys(
                    keys, tail, 0, held + t, behind, query, in_key, key_stride, key_width, RING, KEY_FIRST, KEY_EACH,
                    AHEAD, False,
                )  # fmt: skip
            past_gates, first_gates = past_gates_of(
                gates, tail, behind, held + t, j, key_head, gate_stride, VALUE_HEADS, shares, RING, GATE_FIRST,
                GATE_EACH, False,
            )  # fmt: skip
            puts = puts_of(
                keys, gates, tail, position % RING, short, key_stride, gate_stride, key_width, width, VALUE_HEADS,
                KEY_FIRST, KEY_EACH, GATE_FIRST, GATE_EACH, INPUT_FIRST, INPUT_EACH, False,
            )  # fmt: skip
            make_token(
                earlier_q, earlier_k, earlier_v, past, past_gates, first_gates, puts, (first + t).to(tl.int64), behind,
                held + t, heads, dots, decays, projected, taps, a_log, dt_bias, keys, tail, j, query, value, in_key,
                in_value, key_head, projected_stride, key_stride, key_width, width, VALUE_HEADS, shares, A, TAPS,
                SCALE, UNIT, RING, KEY_FIRST, KEY_EACH, PLACES, LINES, AHEAD,
            )  # fmt: skip


def launch_delta_inputs(
    projected: Tensor,
    weights: DeltaWeights,
    shape: DeltaShape,
    cache: StatePages,
    meta: StateMeta,
    places: int,
    tuning: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (heads, dots, decays) of the tokens of short rows."""
    (keys, _, gates, inputs), before, a = cache.tail, cache.state[-1], shape.columns[3]
    assert projected.dtype is keys.dtype is inputs.dtype is before.dtype, f"{projected.dtype}, pages: {keys.dtype}"
    assert before.per_page == inputs.per_page, "lines of inputs are equal"
    assert projected.stride(1) == 1
    tokens = len(projected)
    heads = projected.new_empty(tokens, shape.conv_width, dtype=gates.dtype)
    dots = heads.new_empty(tokens, shape.key_heads, 2, places)
    decays = heads.new_empty(tokens, shape.value_heads, 2, places)
    values, of_gates = cache.pages.view(keys.dtype), cache.pages.view(gates.dtype)
    warps = warps_of(shape.key_heads * len(meta.base))
    options = {"num_warps": warps, "AHEAD": 16 if warps > 1 else 0, **(tuning or {})}
    delta_inputs_kernel[shape.key_heads, len(meta.base)](
        heads, dots, decays, projected, weights.taps, weights.a_log, weights.dt_bias, values, of_gates, meta.runs,
        meta.base_run, meta.tail_run, meta.base, meta.new_base, meta.start, meta.query_start,
        meta.checkpoint_run, meta.runs.stride(0), projected.stride(0), values.stride(0), of_gates.stride(0),
        KEY_HEADS=shape.key_heads, VALUE_HEADS=shape.value_heads, KEY_DIM=shape.key_dim, VALUE_DIM=shape.value_dim,
        A=a, TAPS=shape.taps, SCALE=shape.key_dim**-0.5, UNIT=UNIT, RING=shape.ring, KEY_FIRST=keys.first,
        KEY_EACH=keys.per_page, GATE_FIRST=gates.first, GATE_EACH=gates.per_page, BEFORE_FIRST=before.first,
        INPUT_FIRST=inputs.first, INPUT_EACH=inputs.per_page, PLACES=places, LINES=16,
        BLOCK_K=triton.next_power_of_2(shape.key_dim),
        BLOCK_V=triton.next_power_of_2(shape.value_heads // shape.key_heads * shape.value_dim),
        FETCH=in_sixteens(cache.pages, shape.key_dim * keys.dtype.itemsize),
        **options, **launch_options(),
    )  # fmt: skip
    return heads, dots, decays


def in_sixteens(pages: Tensor, *sizes: int) -> bool:
    """Whether pages and these numbers of bytes are whole 16 bytes, as copies into L2 must be."""
    return all(size % 16 == 0 for size in (pages.data_ptr(), pages.stride(0) * pages.itemsize, *sizes))


def warps_of(programs: int) -> int:
    """Warps per program, as measured on an H200: few programs need several, many wait for fewer sums over warps."""
    each = programs / target().num_units
    return 4 if each <= 2 else 2 if each <= 8 else 1
