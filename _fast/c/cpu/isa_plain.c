/* The kernels for any machine: vectors of four floats (SSE2, NEON) with the compiler's vector extensions. */
#define ISA_NAME plain
#include "body.h"
