/* All kernels for one instruction set; isa_*.c defines VEC_* and ISA_NAME, then includes this file. */
#include <math.h>
#include <stddef.h>

#include "kernels.h"
#include "vec.h"

static const float COUNTING[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

#include "activate.h"
#include "body_linear.h"
#include "body_codes.h"
#include "float8.h"
#include "body_rows.h"

#include "body_keys.h"
#include "body_attention.h"

#include "body_state.h"
#include "body_delta.h"
#include "body_ssd.h"

#define PASTE_(a, b) a##b
#define PASTE(a, b) PASTE_(a, b)
#define TEXT_(a) #a
#define TEXT(a) TEXT_(a)

const struct kernels PASTE(kernels_, ISA_NAME) = {
    .name = TEXT(ISA_NAME),
    .linear_block = linear_block,
    .spread_rows = spread_rows,
    .norm_rows = norm_rows,
    .point_rows = point_rows,
    .qkv_tokens = qkv_tokens,
    .attend = attend,
    .attend_segment = attend_segment,
    .merge_segments = merge_segments,
    .convolve = convolve,
    .state_gates = state_gates,
    .delta_betas = delta_betas,
    .delta_head = delta_head,
    .ssd_head = ssd_head,
    .ssd_gate = ssd_gate,
    .selective_keys = selective_keys,
    .selective_channels = selective_channels,
};
