"""The CPU's kernels: linear layers, norms, activations, rotation and attention, in C (`c/cpu/`), on a thread pool.

Thread: the device thread, or any thread that computes. The only state is the pool, which serves one caller at a time;
a second caller computes on its own thread. In: addresses of tensors (`data_ptr()`), sizes and strides in elements; the
launchers in `engine/kernels` check them, this file does not. Out: results, in place. The GIL is released throughout.
"""

from libc.stdint cimport int32_t, uintptr_t
from libc.string cimport memset

cdef extern from "pool.h" nogil:
    void pool_set_threads(int count)
    int pool_threads()
    int pool_cores()
    void memory_huge(void *start, size_t bytes)

cdef extern from "kernels.h" nogil:
    int C_INT4 "INT4"
    int C_E2M1 "E2M1"
    int C_NF4 "NF4"
    int C_INT8 "INT8"
    int C_E4M3 "E4M3"

    struct linear_call "linear":
        void *out
        const void *panels
        const float *bias
        const void *residual
        long rows
        long depth
        long columns
        long out_stride
        long residual_stride
        int out_bf16
        int weight_bf16
        int gated
        int activation
        int form
        const void *scales
        const float *row_scales
        const void *zeros
        long group
        int scales_bf16
        int zeros_f32
        const float *x_scales

    struct norm_call "norm":
        void *out
        const void *x
        const void *weight
        const void *bias
        long rows
        long width
        long x_stride
        float eps
        float offset
        int op
        int bf16
        int weight_bf16

    struct point_call "point":
        void *out
        const void *x
        long rows
        long width
        int op
        int bf16

    struct code_scales "scales":
        float *k
        float *v
        long stride

    struct qkv_call "qkv":
        void *q
        void *k_cache
        void *v_cache
        code_scales scales
        const void *qkv
        const float *cos
        const float *sin
        const void *q_norm
        const void *k_norm
        const void *slots
        long tokens, qkv_stride, heads, kv_heads, dim, half, block_size, block_stride
        float eps
        int bf16, norm_bf16, cache_type, slots_wide

    struct attention_call "attention":
        void *out
        float *states
        const void *q
        const void *k
        const void *v
        const int32_t *tables
        const int32_t *starts
        const int32_t *lengths
        const float *sinks
        const float *bias
        const int32_t *last_keys
        code_scales scales
        long rows, heads, kv_heads, dim, max_blocks, block_size, block_stride
        long q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride
        long window, reach
        int causal, bf16, kv_type
        float scale, softcap

    struct kernel_table "kernels":
        const char *name

    const kernel_table *kernels()
    int kernels_limit(int level)

    int C_RMS_NORM "RMS_NORM"
    int C_LAYER_NORM "LAYER_NORM"
    int C_PLAIN "PLAIN"
    int C_HEAD_MAX "HEAD_MAX"
    int C_NORM_MAX "NORM_MAX"

cdef extern from "ops.h" nogil:
    int op_linear(const linear_call *call, const void *x, long x_stride, int x_bf16)
    void op_norm(const norm_call *call)
    void op_point(const point_call *call)
    void op_qkv(const qkv_call *call)
    int op_attention(const attention_call *call)

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


def point(int op, uintptr_t out, uintptr_t x, long rows, long width, bint bf16):
    """Apply activation `op` to gate and up [rows, 2 * width]; op = PLAIN + activation: to x [rows, width]."""
    cdef point_call call
    call.op = op
    call.out = <void *> out
    call.x = <const void *> x
    call.rows = rows
    call.width = width
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
    uintptr_t k_scale=0, uintptr_t v_scale=0, long scale_stride=0,
):
    """Causal attention of contiguous q [tokens, heads, dim] over block tables; sinks, last_keys = 0: none.

    Strides in elements; the cache's type and scales as in qkv_rope_store.
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
    call.window = window
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
