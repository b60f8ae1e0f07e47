"""The CPU's kernels: products, norms, activations, rotation, attention and states, in C (`c/cpu/`), on a thread pool.

Thread: the device thread, or any thread that computes. The only state is the pool, which serves one caller at a time;
a second caller computes on its own thread. In: addresses of tensors (`data_ptr()`), sizes and strides in elements; the
launchers in `engine/kernels` check them, this file does not. Out: results, in place. The GIL is released throughout.
"""

from libc.stdint cimport int32_t, uint8_t, uintptr_t
from libc.string cimport memset

from _fast.cpu_calls cimport (
    C_E2M1, C_E4M3, C_HEAD_MAX, C_INT4, C_INT8, C_KEY_MAX, C_LAYER_NORM, C_NF4, C_NORM_MAX, C_PLAIN, C_PORTION,
    C_RMS_NORM, C_TAPS_MAX, C_FEW_STATES, attention_call, code_scales, convolution_call, delta_call, kernels,
    kernels_limit, linear_call, memory_huge, norm_call, op_attention, op_convolution, op_delta, op_linear, op_norm,
    op_point, op_qkv, op_selective, op_ssd, place_call, point_call, pool_cores, pool_set_threads, pool_threads,
    qkv_call, selective_call, ssd_call, steps_call,
)

INT4 = C_INT4
E2M1 = C_E2M1
NF4 = C_NF4
INT8 = C_INT8
E4M3 = C_E4M3
RMS_NORM = C_RMS_NORM
LAYER_NORM = C_LAYER_NORM
PLAIN = C_PLAIN
HEAD_MAX = C_HEAD_MAX
NORM_MAX = C_NORM_MAX
KEY_MAX, TAPS_MAX, FEW_STATES, PORTION = C_KEY_MAX, C_TAPS_MAX, C_FEW_STATES, C_PORTION


def set_num_threads(int count):
    """Compute with `count` threads, including the caller's; 0 means one per core that this process may use."""
    with nogil:
        pool_set_threads(count)


def num_threads():
    """Return the number of threads in use, or that the first call will use."""
    return pool_threads()


def num_cores():
    """Return the number of cores that this process may use."""
    return pool_cores()


def advise_huge(uintptr_t start, size_t count):
    """Request huge pages for `count` bytes that are not yet written, to save page walks. A hint."""
    with nogil:
        memory_huge(<void *> start, count)


def isa():
    """Return the instruction set in use: "avx512", "avx2" or "plain"."""
    return kernels().name.decode()


def limit_isa(int level):
    """For tests: use at most plain (0), AVX2 (1) or AVX-512 (2); return the level now in use."""
    return kernels_limit(level)


def linear(
    uintptr_t out, uintptr_t x, uintptr_t panels, uintptr_t bias, uintptr_t residual,
    long rows, long depth, long columns, long x_stride, long out_stride, long residual_stride,
    bint bf16, bint weight_bf16, bint gated, int activation,
):
    """out = x W^T + bias + residual, or activate(gate, up) per panel when gated. See kernels.h for shapes."""
    cdef linear_call call
    cdef int failed
    memset(&call, 0, sizeof(call))
    call.out = <void *> out
    call.panels = <const void *> panels
    call.bias = <const float *> bias
    call.residual = <const void *> residual
    call.rows = rows
    call.depth = depth
    call.columns = columns
    call.out_stride = out_stride
    call.residual_stride = residual_stride
    call.out_bf16 = bf16
    call.weight_bf16 = weight_bf16
    call.gated = gated
    call.activation = activation
    with nogil:
        failed = op_linear(&call, <const void *> x, x_stride, bf16)
    if failed:
        raise MemoryError(f"linear: no memory to widen {rows} x {depth} bfloat16 values")


def coded_linear(
    uintptr_t out, uintptr_t x, uintptr_t panels, uintptr_t bias, uintptr_t residual,
    uintptr_t scales, uintptr_t row_scales, uintptr_t zeros, uintptr_t x_scales,
    long rows, long depth, long columns, long group, long x_stride, long out_stride, long residual_stride,
    int form, bint scales_bf16, bint zeros_f32, bint x_bf16, bint out_bf16, bint gated, int activation,
):
    """Like `linear`, with a matrix of codes, not FLOATS. With x_scales, x are integers and sums are exact."""
    cdef linear_call call
    cdef int failed
    memset(&call, 0, sizeof(call))
    call.out = <void *> out
    call.panels = <const void *> panels
    call.bias = <const float *> bias
    call.residual = <const void *> residual
    call.rows = rows
    call.depth = depth
    call.columns = columns
    call.out_stride = out_stride
    call.residual_stride = residual_stride
    call.out_bf16 = out_bf16
    call.gated = gated
    call.activation = activation
    call.form = form
    call.scales = <const void *> scales
    call.row_scales = <const float *> row_scales
    call.zeros = <const void *> zeros
    call.group = group
    call.scales_bf16 = scales_bf16
    call.zeros_f32 = zeros_f32
    call.x_scales = <const float *> x_scales
    with nogil:
        failed = op_linear(&call, <const void *> x, x_stride, x_bf16)
    if failed:
        raise MemoryError(f"coded_linear: no memory to widen {rows} x {depth} values")


def norm(
    int op, uintptr_t out, uintptr_t x, uintptr_t weight, uintptr_t bias,
    long rows, long width, long x_stride, float eps, float offset, bint bf16, bint weight_bf16,
):
    """Apply RMS_NORM or LAYER_NORM to each row."""
    cdef norm_call call
    call.op = op
    call.out = <void *> out
    call.x = <const void *> x
    call.weight = <const void *> weight
    call.bias = <const void *> bias
    call.rows = rows
    call.width = width
    call.x_stride = x_stride
    call.eps = eps
    call.offset = offset
    call.bf16 = bf16
    call.weight_bf16 = weight_bf16
    with nogil:
        op_norm(&call)


def point(int op, uintptr_t out, uintptr_t x, long rows, long width, long x_stride, bint bf16, uintptr_t up=0):
    """Apply activation `op` to gate and up [rows, 2 * width]; op = PLAIN + activation: to x [rows, width].

    up: [rows, width], if up does not follow gate in memory; `out` may be the same memory.
    """
    cdef point_call call
    call.op = op
    call.out = <void *> out
    call.x = <const void *> x
    call.up = <const void *> up
    call.rows = rows
    call.width = width
    call.x_stride = x_stride
    call.bf16 = bf16
    with nogil:
        op_point(&call)


def qkv_rope_store(
    uintptr_t q, uintptr_t k_cache, uintptr_t v_cache, uintptr_t qkv, uintptr_t cos, uintptr_t sin,
    uintptr_t q_norm, uintptr_t k_norm, uintptr_t slots,
    long tokens, long qkv_stride, long heads, long kv_heads, long dim, long half, long block_size,
    long block_stride, float eps,
    bint bf16, bint norm_bf16, int cache_type, bint slots_wide,
    uintptr_t k_scale=0, uintptr_t v_scale=0, long scale_stride=0,
):
    """Normalise and rotate q and k, store k and v; k_cache = 0: rotate the heads only.

    cache_type: 0 float32, 1 bfloat16, 2 e4m3, 3 e5m2; scales as in kernels.h.
    """
    cdef qkv_call call
    call.q = <void *> q
    call.k_cache = <void *> k_cache
    call.v_cache = <void *> v_cache
    call.qkv = <const void *> qkv
    call.cos = <const float *> cos
    call.sin = <const float *> sin
    call.q_norm = <const void *> q_norm
    call.k_norm = <const void *> k_norm
    call.slots = <const void *> slots
    call.tokens = tokens
    call.qkv_stride = qkv_stride
    call.heads = heads
    call.kv_heads = kv_heads
    call.dim = dim
    call.half = half
    call.block_size = block_size
    call.block_stride = block_stride
    call.eps = eps
    call.bf16 = bf16
    call.norm_bf16 = norm_bf16
    call.cache_type = cache_type
    call.scales = code_scales(<float *> k_scale, <float *> v_scale, scale_stride)
    call.slots_wide = slots_wide
    with nogil:
        op_qkv(&call)


def paged_attention(
    uintptr_t out, uintptr_t q, uintptr_t k_cache, uintptr_t v_cache,
    uintptr_t tables, uintptr_t starts, uintptr_t lengths, uintptr_t sinks, uintptr_t last_keys,
    long rows, long heads, long kv_heads, long dim, long max_blocks, long block_size, long block_stride,
    long window, float scale, float softcap, bint bf16, int kv_type,
    uintptr_t k_scale=0, uintptr_t v_scale=0, long scale_stride=0, long first_key=0,
):
    """Causal attention of contiguous q [tokens, heads, dim] over block tables; sinks, last_keys = 0: none.

    Strides in elements; the cache's type and scales as in qkv_rope_store. Keys before first_key are hidden.
    """
    cdef attention_call call
    cdef int failed
    memset(&call, 0, sizeof(call))
    call.out = <void *> out
    call.q = <const void *> q
    call.k = <const void *> k_cache
    call.v = <const void *> v_cache
    call.tables = <const int32_t *> tables
    call.starts = <const int32_t *> starts
    call.lengths = <const int32_t *> lengths
    call.sinks = <const float *> sinks
    call.last_keys = <const int32_t *> last_keys
    call.rows = rows
    call.heads = heads
    call.kv_heads = kv_heads
    call.dim = dim
    call.max_blocks = max_blocks
    call.block_size = block_size
    call.block_stride = block_stride
    call.q_stride = heads * dim
    call.q_head_stride = dim
    call.window, call.first_key = window, first_key
    call.causal = 1
    call.bf16 = bf16
    call.kv_type = kv_type
    call.scales = code_scales(<float *> k_scale, <float *> v_scale, scale_stride)
    call.scale = scale
    call.softcap = softcap
    with nogil:
        failed = op_attention(&call)
    if failed:
        raise MemoryError(f"paged_attention: no memory for the partial sums of {rows} rows")


def dense_attention(
    uintptr_t out, uintptr_t q, uintptr_t k, uintptr_t v, uintptr_t starts,
    long segments, long heads, long kv_heads, long dim,
    long q_stride, long q_head_stride, long k_stride, long k_head_stride, long v_stride, long v_head_stride,
    float scale, bint causal, long window, bint bf16, uintptr_t bias=0, long reach=0,
):
    """Attention within each segment of rows; strides in elements; window: visible rows on each side, 0: all.

    bias: float32 [heads, 2 reach + 1], added to scores by the distance key - query; 0: none.
    """
    cdef attention_call call
    cdef int failed
    memset(&call, 0, sizeof(call))
    call.out = <void *> out
    call.q = <const void *> q
    call.k = <const void *> k
    call.v = <const void *> v
    call.starts = <const int32_t *> starts
    call.rows = segments
    call.heads = heads
    call.kv_heads = kv_heads
    call.dim = dim
    call.q_stride = q_stride
    call.q_head_stride = q_head_stride
    call.k_stride = k_stride
    call.k_head_stride = k_head_stride
    call.v_stride = v_stride
    call.v_head_stride = v_head_stride
    call.window = window
    call.bias = <const float *> bias
    call.reach = reach
    call.causal = causal
    call.bf16 = bf16
    call.kv_type = bf16
    call.scale = scale
    with nogil:
        failed = op_attention(&call)
    if failed:
        raise MemoryError(f"dense_attention: no memory for the partial sums of {segments} segments")


cdef place_call place_of(tuple given):
    """first, per_page, rows, width, bf16."""
    return place_call(given[0], given[1], given[2], given[3], given[4])


cdef steps_call steps_of(tuple pages, tuple rows):
    """pages: address, bytes from page to page, ring; rows: addresses as StateMeta has them, stride of runs, rows."""
    cdef const int32_t *at[10]
    cdef int i
    for i in range(10):
        at[i] = <const int32_t *> <uintptr_t> rows[i]
    return steps_call(
        <uint8_t *> <uintptr_t> pages[0], at[0], at[1], at[2], at[3], at[4], at[5], at[6], at[7], at[8], at[9],
        pages[1], rows[10], rows[11], pages[2],
    )


def delta_rule(
    uintptr_t out, uintptr_t x, tuple pages, tuple rows, tuple places, uintptr_t taps, uintptr_t a_log,
    uintptr_t dt_bias, uintptr_t norm, long tokens, long x_stride, long key_heads, long value_heads, long key_dim,
    long value_dim, long count, float eps, bint per_channel, bint sigmoid, bint bf16, bint norm_bf16,
):
    """engine/kernels/state/delta.py; places: state, inputs before it, keys, deltas, gates, inputs."""
    cdef delta_call call
    cdef int failed
    memset(&call, 0, sizeof(call))
    call.steps = steps_of(pages, rows)
    call.out, call.x = <void *> out, <const void *> x
    call.taps, call.a_log = <const float *> taps, <const float *> a_log
    call.dt_bias, call.norm = <const float *> dt_bias, <const void *> norm
    call.state, call.before, call.keys = place_of(places[0]), place_of(places[1]), place_of(places[2])
    call.deltas, call.gates, call.inputs = place_of(places[3]), place_of(places[4]), place_of(places[5])
    call.tokens, call.x_stride, call.count, call.eps = tokens, x_stride, count, eps
    call.key_heads, call.value_heads, call.key_dim, call.value_dim = key_heads, value_heads, key_dim, value_dim
    call.per_channel, call.sigmoid, call.bf16, call.norm_bf16 = per_channel, sigmoid, bf16, norm_bf16
    with nogil:
        failed = op_delta(&call)
    if failed:
        raise MemoryError(f"delta_rule: no memory for the work buffers of {value_heads} heads")


def ssd(
    uintptr_t out, uintptr_t x, tuple pages, tuple rows, tuple places, uintptr_t taps, uintptr_t bias, uintptr_t a_log,
    uintptr_t dt_bias, uintptr_t d, uintptr_t norm, long tokens, long x_stride, long heads, long head_dim, long groups,
    long state_size, long count, float eps, int order, bint bf16, bint norm_bf16,
):
    """engine/kernels/state/ssd.py; places: state, inputs before it, x | B, steps, inputs; order: as state.h has it."""
    cdef ssd_call call
    cdef int failed
    memset(&call, 0, sizeof(call))
    call.steps = steps_of(pages, rows)
    call.out, call.x = <void *> out, <const void *> x
    call.taps, call.bias, call.a_log = <const float *> taps, <const float *> bias, <const float *> a_log
    call.dt_bias, call.d, call.norm = <const float *> dt_bias, <const float *> d, <const void *> norm
    call.state, call.before, call.again = place_of(places[0]), place_of(places[1]), place_of(places[2])
    call.times, call.inputs = place_of(places[3]), place_of(places[4])
    call.tokens, call.x_stride, call.count, call.eps = tokens, x_stride, count, eps
    call.heads, call.head_dim, call.groups, call.state_size = heads, head_dim, groups, state_size
    call.order, call.bf16, call.norm_bf16 = order, bf16, norm_bf16
    with nogil:
        failed = op_ssd(&call)
    if failed:
        raise MemoryError(f"ssd: no memory for the work buffers of {heads} heads")


def state_convolution(
    uintptr_t out, uintptr_t x, tuple pages, tuple rows, tuple places, uintptr_t taps, uintptr_t bias, long tokens,
    long x_stride, long width, long count, bint bf16,
):
    """silu of a short convolution over x [tokens, width]; places: inputs before a base, the ring's."""
    cdef convolution_call call
    cdef steps_call steps = steps_of(pages, rows)
    cdef int failed
    memset(&call, 0, sizeof(call))
    call.steps = &steps
    call.out, call.x = <void *> out, <const void *> x
    call.taps, call.bias = <const float *> taps, <const float *> bias
    call.before, call.inputs = place_of(places[0]), place_of(places[1])
    call.x_stride, call.width, call.count, call.bf16, call.out_bf16 = x_stride, width, count, bf16, bf16
    with nogil:
        failed = op_convolution(&call, tokens)
    if failed:
        raise MemoryError(f"state_convolution: no memory for {steps.rows} rows")


def selective(
    uintptr_t out, tuple inputs, tuple strides, tuple pages, tuple rows, tuple places, uintptr_t a_log,
    uintptr_t dt_bias, uintptr_t d, long tokens, long inner, long state_size, bint bf16,
):
    """engine/kernels/state/selective.py; inputs and strides: of x, steps, B, C, z; places: state, x, steps, B."""
    cdef selective_call call
    cdef int failed
    memset(&call, 0, sizeof(call))
    call.steps = steps_of(pages, rows)
    call.out = <void *> out
    call.x, call.dt = <const void *> <uintptr_t> inputs[0], <const void *> <uintptr_t> inputs[1]
    call.b, call.c = <const void *> <uintptr_t> inputs[2], <const void *> <uintptr_t> inputs[3]
    call.z = <const void *> <uintptr_t> inputs[4]
    call.x_stride, call.dt_stride, call.b_stride, call.c_stride, call.z_stride = strides
    call.a_log, call.dt_bias, call.d = <const float *> a_log, <const float *> dt_bias, <const float *> d
    call.state, call.values = place_of(places[0]), place_of(places[1])
    call.times, call.keys = place_of(places[2]), place_of(places[3])
    call.tokens, call.inner, call.state_size, call.bf16 = tokens, inner, state_size, bf16
    with nogil:
        failed = op_selective(&call)
    if failed:
        raise MemoryError(f"selective: no memory for the work buffers of {tokens} tokens")
