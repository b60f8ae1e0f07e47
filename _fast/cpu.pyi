INT4: int
E2M1: int
NF4: int
INT8: int
E4M3: int
RMS_NORM: int
LAYER_NORM: int
PLAIN: int
HEAD_MAX: int
NORM_MAX: int

def set_num_threads(count: int) -> None: ...
def num_threads() -> int: ...
def num_cores() -> int: ...
def advise_huge(start: int, count: int) -> None: ...
def isa() -> str: ...
def limit_isa(level: int) -> int: ...
def linear(
    out: int,
    x: int,
    panels: int,
    bias: int,
    residual: int,
    rows: int,
    depth: int,
    columns: int,
    x_stride: int,
    out_stride: int,
    residual_stride: int,
    bf16: bool,
    weight_bf16: bool,
    gated: bool,
    activation: int,
) -> None: ...
def coded_linear(
    out: int,
    x: int,
    panels: int,
    bias: int,
    residual: int,
    scales: int,
    row_scales: int,
    zeros: int,
    x_scales: int,
    rows: int,
    depth: int,
    columns: int,
    group: int,
    x_stride: int,
    out_stride: int,
    residual_stride: int,
    form: int,
    scales_bf16: bool,
    zeros_f32: bool,
    x_bf16: bool,
    out_bf16: bool,
    gated: bool,
    activation: int,
) -> None: ...
def norm(
    op: int,
    out: int,
    x: int,
    weight: int,
    bias: int,
    rows: int,
    width: int,
    x_stride: int,
    eps: float,
    offset: float,
    bf16: bool,
    weight_bf16: bool,
) -> None: ...
def point(op: int, out: int, x: int, rows: int, width: int, bf16: bool) -> None: ...
def qkv_rope_store(
    q: int,
    k_cache: int,
    v_cache: int,
    qkv: int,
    cos: int,
    sin: int,
    q_norm: int,
    k_norm: int,
    slots: int,
    tokens: int,
    qkv_stride: int,
    heads: int,
    kv_heads: int,
    dim: int,
    half: int,
    block_size: int,
    block_stride: int,
    eps: float,
    bf16: bool,
    norm_bf16: bool,
    cache_type: int,
    slots_wide: bool,
    k_scale: int = 0,
    v_scale: int = 0,
    scale_stride: int = 0,
) -> None: ...
def paged_attention(
    out: int,
    q: int,
    k_cache: int,
    v_cache: int,
    tables: int,
    starts: int,
    lengths: int,
    sinks: int,
    last_keys: int,
    rows: int,
    heads: int,
    kv_heads: int,
    dim: int,
    max_blocks: int,
    block_size: int,
    block_stride: int,
    window: int,
    scale: float,
    softcap: float,
    bf16: bool,
    kv_type: int,
    k_scale: int = 0,
    v_scale: int = 0,
    scale_stride: int = 0,
) -> None: ...
def dense_attention(
    out: int,
    q: int,
    k: int,
    v: int,
    starts: int,
    segments: int,
    heads: int,
    kv_heads: int,
    dim: int,
    q_stride: int,
    q_head_stride: int,
    k_stride: int,
    k_head_stride: int,
    v_stride: int,
    v_head_stride: int,
    scale: float,
    causal: bool,
    window: int,
    bf16: bool,
    bias: int = 0,
    reach: int = 0,
) -> None: ...
