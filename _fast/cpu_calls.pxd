# Declarations of `c/cpu/` for cpu.pyx: call structures and operations. Structures list only fields that Python sets.

from libc.stdint cimport int32_t, uint8_t

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
        const void *up
        long rows, width, x_stride
        int op, bf16

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
        long window, first_key, reach
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

cdef extern from "spans.h" nogil:
    int C_PORTION "PORTION"

cdef extern from "state.h" nogil:
    int C_KEY_MAX "KEY_MAX"
    int C_TAPS_MAX "TAPS_MAX"
    int C_FEW_STATES "FEW_STATES"

    struct place_call "place":
        long first, per_page, rows, width
        int bf16

    struct steps_call "steps":
        uint8_t *pages
        const int32_t *runs
        const int32_t *base_run
        const int32_t *write_run
        const int32_t *tail_run
        const int32_t *base
        const int32_t *new_base
        const int32_t *query_start
        const int32_t *start
        const int32_t *checkpoint_run
        const int32_t *checkpoint_at
        long page_stride, runs_stride, rows, ring

    struct convolution_call "convolution":
        const steps_call *steps
        void *out
        const void *x
        const float *taps
        const float *bias
        place_call before, inputs
        long x_stride, width, count
        int bf16, out_bf16

    struct delta_call "delta":
        steps_call steps
        void *out
        const void *x
        const float *taps
        const float *a_log
        const float *dt_bias
        const void *norm
        place_call state, before, keys, deltas, gates, inputs
        long tokens, x_stride, key_heads, value_heads, key_dim, value_dim, count
        float eps
        int per_channel, sigmoid, bf16, norm_bf16

    struct ssd_call "ssd":
        steps_call steps
        void *out
        const void *x
        const float *taps
        const float *bias
        const float *a_log
        const float *dt_bias
        const float *d
        const void *norm
        place_call state, before, again, times, inputs
        long tokens, x_stride, heads, head_dim, groups, state_size, count
        float eps
        int order, bf16, norm_bf16

    struct selective_call "selective":
        steps_call steps
        void *out
        const void *x
        const void *dt
        const void *b
        const void *c
        const void *z
        const float *a_log
        const float *dt_bias
        const float *d
        place_call state, values, times, keys
        long tokens, inner, state_size, x_stride, dt_stride, b_stride, c_stride, z_stride
        int bf16

    int op_delta(const delta_call *call)
    int op_ssd(const ssd_call *call)
    int op_selective(const selective_call *call)
    int op_convolution(const convolution_call *call, long tokens)
