"""EngineConfig: what the operator chose, already typed. ModelConfig (what the checkpoint says) is in model_config.py.

Made by server/flags/config.py or by a test; read everywhere in the engine; never changed. Nothing here reads flags or
the environment. Values of 0 or "auto" mean "derive": the engine fills them in at start and reports what it chose.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from engine.base.faults import Faults

# Numbers that answers report. "raw": from the model's logits. "processed": from the logits after all rules, temperature
# and cuts, from which the token is drawn. The numbers are log-probabilities or logits.
LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
# Dtype of cached keys and values. fp8 uses the checkpoint's scales; "per_token_head": one scale per token and head.
CacheWord = Literal["auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_per_token_head"]


@dataclass(frozen=True, slots=True)
class FailureLimits:
    """How much may fail before the device counts as lost."""

    steps: int = 3  # consecutive failed steps
    oom: int = 3  # out-of-memory steps within a minute
    stall_exit: float = 30.0  # seconds after step_timeout until the engine gives up


@dataclass(frozen=True, slots=True)
class StateConfig:
    """Settings of recurrent layers, which hold one state per sequence."""

    mode: Literal["none", "align", "all"] = "align"  # states in the prefix cache; all: one every `every` tokens
    every: int = 1024  # tokens
    share: float = 0.25  # the largest share of the blocks for states that no request uses
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # dtype of states; auto: the checkpoint's, else float32


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Settings of adapters that requests choose by name."""

    max_loras: int = 1  # places on the device: adapters that the rows of one step may have
    max_rank: int = 16  # of one adapter
    max_bytes: int = 1 << 31  # of one adapter in memory
    max_cpu_loras: int = 1  # adapters in host memory
    targets: tuple[str, ...] = ()  # last components of the modules with room for adapters; (): all that adapters change
    named: tuple[tuple[str, str], ...] = ()  # (name, folder) of all adapters, if there can be no others; (): any


@dataclass(frozen=True, slots=True)
class RanksConfig:
    """Settings of an engine with several ranks."""

    whole_experts: bool = False  # each rank has whole experts; else a part of every expert's width
    require_peer_access: bool = False  # refuse devices that cannot address each other's memory
    driver_variables: Mapping[str, str] = field(default_factory=dict)  # of the environment, for the driver and torch


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything the engine needs to load a model and run steps."""

    model: str  # folder in Hugging Face format
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    load_format: Literal["auto", "safetensors", "dummy"] = "auto"
    model_impl: Literal["auto", "native", "transformers"] = "auto"  # auto: native where we have a file
    quantization: str = ""  # "": as in the checkpoint; fp8: quantise a floating-point checkpoint at load
    hf_overrides: Mapping[str, Any] = field(default_factory=dict)  # values over those of config.json
    runner: Literal["auto", "generate", "pooling"] = "auto"  # generate tokens, or a vector or scores for each input
    pooler: Mapping[str, Any] = field(default_factory=dict)  # overrides the checkpoint's pooling settings
    enable_prompt_embeds: bool = False  # requests may send embedding rows in place of text
    without_media: tuple[str, ...] = ()  # modalities that no prompt holds; towers that serve only these are not built
    seed: int = 0  # for dummy weights and for requests without a seed
    max_model_len: int = 0  # tokens; 0 = what the checkpoint holds
    block_size: int = 16  # tokens in a KV block
    gpu_memory_utilization: float = 0.92  # share of the accelerator's memory
    device_reserve_bytes: int = 1 << 30  # part of that share left free for memory that no plan counts
    kv_cache_memory_bytes: int = 0  # 0 = derived from the free memory
    num_gpu_blocks_override: int = 0
    kv_cache_dtype: CacheWord = "auto"  # auto: the checkpoint's scheme, else the activations' dtype
    kv_cache_skip_layers: tuple[str, ...] = ()  # layer numbers or "sliding_window": cached in the activations' dtype
    enable_prefix_caching: bool = True
    states: StateConfig = field(default_factory=StateConfig)
    return_routed_experts: bool = False  # capture every token's experts in the cache, for requests that want them
    jump_forward: bool | None = None  # append tokens that a grammar forces without sampling; None: on a CPU only
    speculative: Mapping[str, Any] = field(default_factory=dict)  # see engine/base/drafts; empty: no drafts
    report_drafts: bool = False  # steps report the drafts of each choice (TokenStream.drafted)
    max_num_seqs: int = 0  # rows in a step; 0 = 256 on an accelerator, 64 on a CPU
    max_num_batched_tokens: int = 0  # tokens in a step; 0 = 2,048 on an accelerator, 512 on a CPU
    max_prefill_chunk: int = 0  # prompt tokens of one row in a step; 0 = no limit but the budget
    max_num_queued_reqs: int = 1024
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    batch_slowdown: float = 1.5  # most times that a step takes longer with idle rows than without them
    max_logprobs: int = 20
    logprobs_mode: LogprobsMode = "raw_logprobs"
    encoder_budget: int = 0  # patches, or rows of an audio encoder, that towers compute in a step; 0 = derived
    encoder_cache_tokens: int = 0  # tower rows cached; 0 = derived
    num_threads: int = 0  # CPU compute threads; 0 = all cores
    tensor_parallel: int = 1  # ranks over which every layer is dealt out
    ranks: RanksConfig = field(default_factory=RanksConfig)
    step_timeout: float = 60.0  # seconds without an iteration of the device thread until the engine counts as stalled
    failures: FailureLimits = field(default_factory=FailureLimits)
    enforce_eager: bool = False  # launch forwards and sampling kernel by kernel; only the input preparation is a graph
    cudagraph_capture_sizes: tuple[int, ...] = ()  # rows of the decode steps to capture, ascending; () = derived
    deterministic: bool = False  # tokens and log-probabilities have the same bits in every batch
    lora: LoraConfig | None = None  # None: no adapters by name
    faults: Faults | None = None  # failures that tests plant
    debug_poison: bool = False  # freed blocks and slots hold NaN and out-of-range ids
