/* The product of rows with one panel, over vec.h.
 *
 * tile_R adds R rows of x times a panel to R rows of 64 sums. Each sum is one chain of fused multiply-adds over k in
 * ascending order. Between blocks of k the sums are stored and reloaded exactly, so R, the block length and the number
 * of rows in a call change no bit. Rows of x are X_STRIDE apart, a constant, so one register addresses them all. */

#if defined(VEC_AVX512)
enum { TILE = 14 };
#define SLICE(rows) ((rows) <= 6 ? 4 : 2) /* vectors of a panel's width that are held in registers at once */
#elif defined(__aarch64__)
enum { TILE = 6 };
#define SLICE(rows) ((rows) <= 2 ? 8 : 4)
#else
enum { TILE = 6 };
#define SLICE(rows) ((rows) == 1 ? 8 : (rows) <= 3 ? 4 : 2)
#endif

enum { PREFETCH = 4096 }; /* bytes from a read to its prefetch in a panel; the processor's own prefetch ends at pages */

/* Rows of the panel are `stride` apart; `fetched` is the address to prefetch, which also advances by `stride`.
 * `columns` (at most 64) limits the work: sums past it, up to a whole slice, may or may not be updated. */
INLINE void tile_sums(const float *x, const void *panel, long stride, int columns, int weight_bf16, long depth,
                      float *sums, const char *fetched, int rows, int slice) {
    const int width = weight_bf16 ? 2 : 4;
    for (int column = 0; column < columns; column += slice * W) {
        vf sum[TILE][16];
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 16
            for (int v = 0; v < slice; v++) sum[r][v] = v_load(sums + r * PANEL + column + v * W);
        const char *coming = fetched + column * width;
        for (long k = 0; k < depth; k++, coming += stride * width) {
            vf w[16];
            for (int line = 0; line < slice * W * width; line += 64) __builtin_prefetch(coming + line);
#pragma GCC unroll 16
            for (int v = 0; v < slice; v++) w[v] = t_load(panel, k * stride + column + v * W, W, weight_bf16);
#pragma GCC unroll 16
            for (int r = 0; r < rows; r++) {
                vf a = v_set(x[r * X_STRIDE + k]);
#pragma GCC unroll 16
                for (int v = 0; v < slice; v++) sum[r][v] = v_fma(a, w[v], sum[r][v]);
            }
        }
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 16
            for (int v = 0; v < slice; v++) v_store(sums + r * PANEL + column + v * W, sum[r][v]);
    }
}

typedef void (*tile_fn)(const float *x, const void *panel, long stride, int columns, long depth, float *sums,
                        const char *fetched);

#define TILE_FUNCTION(name, weight_bf16, rows)                                                                        \
    static void name##rows(const float *x, const void *panel, long stride, int columns, long depth, float *sums,     \
                           const char *fetched) {                                                                       \
        tile_sums(x, panel, stride, columns, weight_bf16, depth, sums, fetched, rows, SLICE(rows));                     \
    }
#define TILE_FUNCTIONS(rows) TILE_FUNCTION(tile_f_, 0, rows) TILE_FUNCTION(tile_h_, 1, rows)
TILE_FUNCTIONS(1)
TILE_FUNCTIONS(2)
TILE_FUNCTIONS(3)
TILE_FUNCTIONS(4)
TILE_FUNCTIONS(5)
TILE_FUNCTIONS(6)
#if defined(VEC_AVX512)
TILE_FUNCTIONS(7)
TILE_FUNCTIONS(8)
TILE_FUNCTIONS(9)
TILE_FUNCTIONS(10)
TILE_FUNCTIONS(11)
TILE_FUNCTIONS(12)
TILE_FUNCTIONS(13)
TILE_FUNCTIONS(14)
static const tile_fn TILES[2][TILE] = {
    {tile_f_1, tile_f_2, tile_f_3, tile_f_4, tile_f_5, tile_f_6, tile_f_7, tile_f_8, tile_f_9, tile_f_10, tile_f_11,
     tile_f_12, tile_f_13, tile_f_14},
    {tile_h_1, tile_h_2, tile_h_3, tile_h_4, tile_h_5, tile_h_6, tile_h_7, tile_h_8, tile_h_9, tile_h_10, tile_h_11,
     tile_h_12, tile_h_13, tile_h_14},
};
#else
static const tile_fn TILES[2][TILE] = {
    {tile_f_1, tile_f_2, tile_f_3, tile_f_4, tile_f_5, tile_f_6},
    {tile_h_1, tile_h_2, tile_h_3, tile_h_4, tile_h_5, tile_h_6},
};
#endif

/* Returns the height of the next tile if `rows` remain: equal heights instead of a small last tile. */
INLINE long tile_height(long rows) {
    long tiles = (rows + TILE - 1) / TILE;
    return (rows + tiles - 1) / tiles;
}

/* Writes the sums of one row to out, after bias, gate, residual and rounding. */
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
            v_store(full + i, v_activate(gate, v_load(full + PANEL / 2 + i), call->activation));
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

/* x has blocks of K_BLOCK columns, each [rows, X_STRIDE]. While the first tile reads a block of the panel, it
 * prefetches a short distance. The second tile finds the block in the cache and prefetches the next block, which
 * follows in memory and belongs to this panel or the next. */
static void linear_floats(const struct linear *call, long panel, long row_begin, long row_end) {
    _Alignas(64) float sums[ROW_BLOCK * PANEL];
    const long width = call->weight_bf16 ? 2 : 4;
    const char *weights = (const char *)call->panels + panel * call->depth * PANEL * width;
    const tile_fn *tiles = TILES[call->weight_bf16];
    for (long k = 0; k == 0 || k < call->depth; k += K_BLOCK, weights += K_BLOCK * PANEL * width) {
        const long depth = call->depth - k < K_BLOCK ? call->depth - k : K_BLOCK;
        const int last = k + depth >= call->depth;
        const float *x = call->x + k / K_BLOCK * call->rows * X_STRIDE;
        const char *fetched = weights + PREFETCH;
        for (long row = row_begin, height; row < row_end; row += height) {
            height = tile_height(row_end - row);
            float *own = sums + (row - row_begin) * PANEL;
            if (k == 0) memset(own, 0, (size_t)(height * PANEL) * sizeof(float));
            tiles[height - 1](x + row * X_STRIDE, weights, PANEL, PANEL, depth, own, fetched);
            fetched = row == row_begin ? weights + depth * PANEL * width : weights;
            if (last)
                for (long r = 0; r < height; r++) finish_row(call, panel, row + r, own + r * PANEL);
        }
    }
}

/* Copies rows of x to blocks of K_BLOCK columns, as float32, X_STRIDE apart. */
static void spread_row(const struct spreading *call, long row) {
    for (long k = 0; k < call->depth; k += K_BLOCK) {
        float *to = call->out + (k / K_BLOCK * call->rows + row) * X_STRIDE;
        const long end = call->depth - k < K_BLOCK ? call->depth - k : K_BLOCK;
        const long from = row * call->x_stride + k;
        if (call->bf16)
            for (long i = 0; i < end; i += W) t_store(to, i, t_load(call->x, from + i, end - i, 1), end - i, 0);
        else
            memcpy(to, (const float *)call->x + from, (size_t)end * sizeof(float));
    }
}

static void spread_rows(const struct spreading *call, long begin, long end) {
    for (long row = begin; row < end; row++) spread_row(call, row);
}
