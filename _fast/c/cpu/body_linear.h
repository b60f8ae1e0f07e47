/* The product of rows with one panel, over vec.h.
 *
 * tile_R adds R rows of x times a panel to R rows of 64 sums. Each sum is one chain of fused multiply-adds over k in
 * ascending order; the chain survives a trip through memory between blocks of k, so R, the block length and the number
 * of rows in a call change no bit. TILE is the most rows whose sums, with a slice of the panel, fit the registers. */

#if defined(VEC_AVX512)
enum { TILE = 6 };
#define SLICE(rows) 4 /* vectors of a panel's width that are in registers at once */
#elif defined(__aarch64__)
enum { TILE = 6 };
#define SLICE(rows) ((rows) == 1 ? 16 : (rows) <= 3 ? 8 : 4)
#else
enum { TILE = 6 };
#define SLICE(rows) ((rows) == 1 ? 8 : (rows) <= 3 ? 4 : 2)
#endif

enum { PREFETCH = 1024 }; /* bytes ahead in the panel: the hardware's own prefetch stops at each page */

INLINE void tile_sums(const float *x, long x_stride, const void *panel, int weight_bf16, long depth, float *sums,
                      int rows, int slice) {
    for (int column = 0; column < PANEL; column += slice * W) {
        vf sum[TILE][16];
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 16
            for (int v = 0; v < slice; v++) sum[r][v] = v_load(sums + r * PANEL + column + v * W);
        for (long k = 0; k < depth; k++) {
            vf w[16];
#pragma GCC unroll 16
            for (int v = 0; v < slice; v++) w[v] = t_load(panel, k * PANEL + column + v * W, W, weight_bf16);
            if (rows == 1) {
                const char *ahead = (const char *)panel + (k * PANEL + column) * (weight_bf16 ? 2 : 4) + PREFETCH;
                for (int line = 0; line < slice * W * (weight_bf16 ? 2 : 4); line += 64)
                    __builtin_prefetch(ahead + line);
            }
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                vf a = v_set(x[r * x_stride + k]);
#pragma GCC unroll 16
                for (int v = 0; v < slice; v++) sum[r][v] = v_fma(a, w[v], sum[r][v]);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 16
            for (int v = 0; v < slice; v++) v_store(sums + r * PANEL + column + v * W, sum[r][v]);
    }
}

typedef void (*tile_fn)(const float *x, long x_stride, const void *panel, long depth, float *sums);

#define TILE_FUNCTIONS(rows)                                                                                     \
    static void tile_f_##rows(const float *x, long x_stride, const void *panel, long depth, float *sums) {       \
        tile_sums(x, x_stride, panel, 0, depth, sums, rows, SLICE(rows));                                        \
    }                                                                                                            \
    static void tile_h_##rows(const float *x, long x_stride, const void *panel, long depth, float *sums) {       \
        tile_sums(x, x_stride, panel, 1, depth, sums, rows, SLICE(rows));                                        \
    }
TILE_FUNCTIONS(1)
TILE_FUNCTIONS(2)
TILE_FUNCTIONS(3)
TILE_FUNCTIONS(4)
TILE_FUNCTIONS(5)
TILE_FUNCTIONS(6)

static const tile_fn TILES[2][TILE] = {
    {tile_f_1, tile_f_2, tile_f_3, tile_f_4, tile_f_5, tile_f_6},
    {tile_h_1, tile_h_2, tile_h_3, tile_h_4, tile_h_5, tile_h_6},
};

/* The height of the next tile when `rows` remain: even heights rather than a small last one. */
INLINE long tile_height(long rows) {
    long tiles = (rows + TILE - 1) / TILE;
    return (rows + tiles - 1) / tiles;
}

/* Sums of one row to their place in out: bias, gate, residual, rounding. */
static void finish_row(const struct linear *call, long panel, long row, const float *sums) {
    float full[PANEL];
    long columns = PANEL, first = panel * PANEL, total = call->columns;
    if (call->bias != NULL)
        for (int i = 0; i < PANEL; i += W) v_store(full + i, v_load(sums + i) + v_load(call->bias + first + i));
    else
        memcpy(full, sums, sizeof full);
    if (call->gated) {
        columns = PANEL / 2, first = panel * columns, total = call->columns / 2;
        for (int i = 0; i < PANEL / 2; i += W) {
            vf gate = v_load(full + i);
            v_store(full + i, gate * v_sigmoid(gate) * v_load(full + PANEL / 2 + i));
        }
    }
    if (columns > total - first) columns = total - first;
    for (long i = 0; i < columns; i += W) {
        vf y = v_load(full + i);
        if (call->residual != NULL)
            y += t_load(call->residual, row * call->residual_stride + first + i, columns - i, call->out_bf16);
        t_store(call->out, row * call->out_stride + first + i, y, columns - i, call->out_bf16);
    }
}

static void linear_block(const struct linear *call, long panel, long row_begin, long row_end) {
    _Alignas(64) float sums[ROW_BLOCK * PANEL];
    const long width = call->weight_bf16 ? 2 : 4;
    const char *weights = (const char *)call->panels + panel * call->depth * PANEL * width;
    const tile_fn *tiles = TILES[call->weight_bf16];
    for (long k = 0; k == 0 || k < call->depth; k += K_BLOCK) {
        const long depth = call->depth - k < K_BLOCK ? call->depth - k : K_BLOCK;
        const int last = k + depth >= call->depth;
        for (long row = row_begin, height; row < row_end; row += height) {
            height = tile_height(row_end - row);
            float *own = sums + (row - row_begin) * PANEL;
            if (k == 0) memset(own, 0, (size_t)(height * PANEL) * sizeof(float));
            tiles[height - 1](call->x + row * call->x_stride + k, call->x_stride, weights + k * PANEL * width, depth, own);
            if (last)
                for (long r = 0; r < height; r++) finish_row(call, panel, row + r, own + r * PANEL);
        }
    }
}

static void widen(float *out, const uint16_t *x, long count) {
    for (long i = 0; i < count; i += W) t_store(out, i, t_load(x, i, count - i, 1), count - i, 0);
}
