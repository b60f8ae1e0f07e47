"""Config: the operator's settings, typed and frozen, in small groups; only this file reads flags and environment.

Each field carries its flag's help text; cli.py builds the command line from them. Values of 0 or "auto" mean "derive".
A limit is a ceiling: a request may lower it, never raise it. Made once before the loop starts, read everywhere.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from engine.base.config import CacheWord, EngineConfig, FailureLimits, LogprobsMode, LoraConfig, StateConfig
from engine.base.faults import Faults
from engine.base.request import Modality
from mm.limits import MediaLimits
from server.flags.batch_flags import BatchFlags
from server.flags.flag import MIB, flag
from server.flags.health_flags import HealthFlags
from server.flags.limits_flags import MAX_QUEUE_WAIT_S, LimitsConfig
from server.flags.lora_flags import LoraFlags, module_of
from server.flags.pooling_flags import PoolingFlags
from server.flags.rank_flags import RankFlags
from server.flags.rows_flags import RowsFlags

EMBEDDED = Path(__file__).parents[1] / "embedded"
SAMPLERS = (
    "dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers", "top_n_sigma",
    "xtc_probability", "xtc_threshold",
)  # fmt: skip
FILE_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens", *SAMPLERS)
SAMPLING_DEFAULTS = (*FILE_DEFAULTS, "presence_penalty", "frequency_penalty")  # --override-generation-config
MODALITIES: tuple[Modality, ...] = ("image", "audio", "video")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Address, keys, shutdown and log of the server."""

    host: str = flag("0.0.0.0", "address to listen on")
    port: int = flag(8000, "port to listen on; 0 picks a free port", low=0, high=65535)
    uds: str = flag("", "Unix socket to listen on, instead of host and port")
    root_path: str = flag("", "path prefix of a proxy; answered with and without it")
    api_key: tuple[str, ...] = flag((), "key of clients; repeatable (or SERVER_API_KEY)", hidden_value=True)
    api_key_file: str = flag(
        "", "file of keys, a line each: KEY or NAME:KEY, weight=N behind it; SIGHUP reads it again"
    )
    auth_max_failures: int = flag(60, "wrong keys per minute and address before the answer is 429", low=1)
    trusted_proxies: tuple[str, ...] = flag((), "addresses, CIDRs or `unix` whose X-Forwarded-For is trusted")
    served_model_name: tuple[str, ...] = flag((), "names that clients may use; answers report the first", several=True)
    any_model_name: bool = flag(False, "answer requests for any model name; the name tgi is always accepted")
    ssl_keyfile: str = flag("", "file with the TLS private key")
    ssl_certfile: str = flag("", "file with the TLS certificate chain")
    allowed_hosts: tuple[str, ...] = flag(
        (), "accepted Host values; none: any, or loopback names if the server listens on loopback"
    )
    allowed_origins: tuple[str, ...] = flag((), "browser origins with CORS access; '*' for any")
    allowed_methods: tuple[str, ...] = flag(("GET", "POST", "OPTIONS"), "methods that CORS allows")
    allowed_headers: tuple[str, ...] = flag(
        (
            *("authorization", "content-type", "x-api-key", "x-request-id", "user-agent", "idempotency-key"),
            *("openai-*", "anthropic-*", "x-stainless-*"),  # headers that these clients send from a web page
        ),
        "headers that CORS allows; name-* is a family, * any",
    )
    allow_credentials: bool = flag(False, "CORS with credentials; not with origin '*'")
    shutdown_delay: float = flag(
        0.0, "seconds after SIGTERM in which requests are accepted while /health/ready says 503", low=0
    )
    shutdown_timeout: float = flag(30.0, "seconds that running requests get after SIGTERM", low=0)
    startup_timeout: float = flag(1800.0, "seconds that loading may take", low=1)
    sse_keep_alive_interval: float = flag(0.0, "seconds between keep-alive comments in a silent stream; 0: none", low=0)
    log_level: Literal["debug", "info", "warning", "error"] = flag(
        "info", "least severe log lines; debug adds times of the start"
    )
    log_format: Literal["text", "json"] = flag("text", "format of log lines")
    disable_access_log: bool = flag(False, "write no log line per request")
    disable_log_stats: bool = flag(False, "write no status line every ten seconds")
    enable_log_requests: bool = flag(False, "log parameters and prompts: these hold the words of clients")
    enable_log_outputs: bool = flag(False, "log answers: these hold the words of clients")
    max_log_len: int = flag(256, "characters of a prompt or an answer in the log", low=0)
    log_rate: int = flag(100, "log lines per second of one kind; further lines are counted", low=1)
    metrics_require_key: bool = flag(False, "require the API key for /metrics")
    disable_docs: bool = flag(False, "no /docs and no /openapi.json")
    disable_playground: bool = flag(False, "no chat page at /")
    enable_dev_endpoints: bool = flag(False, "routes that pause the server, clear caches and show settings")
    admin_api_key: str = flag(
        "",
        "key for the development routes; checked if set, required unless the server listens on loopback",
        hidden_value=True,
    )


@dataclass(frozen=True, slots=True)
class ModelFlags:
    """The checkpoint and how it is read."""

    model: str = flag(
        "", "folder, GGUF file, or on the hub ORG/NAME, of GGUF files ORG/NAME:QUANT; none: the model in the package"
    )
    revision: str = flag("", "branch, tag or commit of ORG/NAME; none: main")
    download_dir: str = flag("", "folder for downloads from the hub; none: the cache of huggingface_hub")
    hf_token: str = flag("", "token for private repositories (or HF_TOKEN, which ps does not show)", hidden_value=True)
    tokenizer: str = flag("", "folder, file or ORG/NAME of the tokenizer; none: the model's")
    skip_tokenizer_init: bool = flag(False, "load no tokenizer: token ids in, token ids out")
    tokenizer_mode: Literal["auto", "hf", "mistral"] = flag("auto", "hf: tokenizer.json; mistral: mistral-common")
    device: Literal["auto", "cpu", "cuda"] = flag("auto", "device of the model (cuda: also ROCm)")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = flag(
        "auto", "type of weights; float16: encoders on an accelerator"
    )
    load_format: Literal["auto", "safetensors", "dummy"] = flag("auto", "dummy: random weights")
    quantization: str = flag("", "fp8: quantise floats; others must match the checkpoint")
    seed: int = flag(0, "seed of random weights")
    max_model_len: int = flag(0, "context in tokens, such as 32k; 0: the checkpoint's", tokens=True, low=0)
    model_impl: Literal["auto", "native", "transformers"] = flag(
        "auto", "transformers: through the transformers library; auto: only models that are not native"
    )
    hf_overrides: dict[str, Any] = flag({}, 'values over config.json, such as {"rope_theta": 1e6}; null removes a key')  # noqa: RUF009
    language_model_only: bool = flag(False, "text only: encoders are not built and not read")
    generation_config: str = flag("auto", "auto: sampling defaults of the checkpoint; vllm: ignore them")
    override_generation_config: dict[str, Any] = flag({}, "sampling defaults over the checkpoint's")  # noqa: RUF009
    logprobs_mode: LogprobsMode = flag("raw_logprobs", "logprobs or logits, raw or after sampling rules")  # noqa: RUF009
    structured_outputs_backend: Literal["auto", "none"] = flag("auto", "none: no structured answers")
    structured_outputs_jump_forward: Literal["auto", "on", "off"] = flag(
        "auto", "compute text that a grammar determines in one step; auto: on a CPU"
    )
    num_threads: int = flag(0, "compute threads on a CPU; 0: all cores", low=0)
    trust_remote_code: bool = flag(False, "accepted without effect: code in a checkpoint never runs")


@dataclass(frozen=True, slots=True)
class ChatConfig:
    """How messages become a prompt."""

    chat_template: str = flag("", "template text or file, instead of the checkpoint's")
    chat_template_content_format: Literal["auto", "string", "openai"] = flag(
        "auto", "whether the template takes text or parts"
    )
    default_chat_template_kwargs: dict[str, Any] = flag({}, "variables for every chat template")  # noqa: RUF009
    mm_processor_kwargs: dict[str, Any] = flag({}, "media options such as use_audio_in_video, max_pixels, fps")  # noqa: RUF009
    media_io_kwargs: dict[str, Any] = flag({}, 'how media are read, such as {"video": {"num_frames": 32}}')  # noqa: RUF009
    image_background: str = flag("white", "colour behind transparent images: #rrggbb, white, black or grey")
    trust_request_mm_kwargs: bool = flag(False, "let requests set mm_processor_kwargs and media_io_kwargs")
    trust_request_chat_template: bool = flag(False, "let requests set their own chat template")
    escape_special_tokens: bool = flag(False, "treat special tokens in the text of clients as plain text")
    response_role: str = flag("assistant", "role of answers")
    exclude_tools_when_tool_choice_none: bool = flag(False, "leave tools out of the prompt if tool_choice is none")
    tool_call_parser: str = flag("auto", "format of tool calls, such as hermes; auto: the checkpoint's; none: text")
    reasoning_parser: str = flag("auto", "format of reasoning, such as qwen3; auto: the checkpoint's; none: text")
    tool_parser_plugin: str = flag("", "Python file with a table TOOLS of further formats")
    reasoning_parser_plugin: str = flag("", "Python file with a table REASONING of further formats")
    reasoning_field: Literal["both", "reasoning", "reasoning_content"] = flag(
        "both", "field of the reasoning in chat completions"
    )
    enable_auto_tool_choice: bool = flag(False, "accepted without effect: tool_choice auto always works")
    return_tokens_as_token_ids: bool = flag(False, "write tokens in log-probabilities as token_id:N")
    enable_force_include_usage: bool = flag(False, "send usage in every stream")
    pool_threads: int = flag(0, "threads for text and media; 0: derived from the cores", low=0)


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The cache of keys and values (KV blocks)."""

    block_size: int = flag(16, "tokens of a block of the cache", low=1)
    gpu_memory_utilization: float = flag(0.92, "share of the card's memory that the server uses", low=0.01, high=1)
    device_reserve_bytes: int = flag(1024 * MIB, "free part of that share, for unplanned memory", low=0)
    kv_cache_memory_bytes: int = flag(0, "size of the cache; 0: derived", low=0)
    num_gpu_blocks_override: int = flag(0, "number of blocks of the cache; 0: derived", low=0)
    kv_cache_dtype: CacheWord = flag("auto", "type of keys and values; auto: the checkpoint's")  # noqa: RUF009
    kv_cache_dtype_skip_layers: tuple[str, ...] = flag((), "layers without fp8: numbers, sliding_window", several=True)
    enable_prefix_caching: bool = flag(True, "reuse the cache for equal beginnings of prompts")
    mamba_cache_mode: Literal["none", "align", "all"] = flag(
        "align", "states of recurrent layers that prefixes are found by; all: one every mamba_block_size tokens"
    )
    mamba_block_size: int = flag(1024, "tokens between states with --mamba-cache-mode all", tokens=True, low=1)
    state_cache_share: float = flag(0.25, "share of the cache for states that no request uses", low=0, high=1)
    mamba_ssm_cache_dtype: Literal["auto", "float32", "bfloat16"] = flag(
        "auto", "type of states; auto: the checkpoint's, else float32"
    )
    encoder_cache_tokens: int = flag(0, "rows of encoded media, and of one item; 0: derived", tokens=True, low=0)
    enable_return_routed_experts: bool = flag(False, "store the experts of each token for requests that ask for them")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The number of requests and tokens in a step, and the order of waiting requests."""

    max_num_seqs: int = flag(0, "requests in a step; 0: derived", low=0)
    max_num_batched_tokens: int = flag(
        0, "tokens in a step; 0: derived; above 2048 waiting prompts may fill a step", tokens=True, low=0
    )
    max_prefill_chunk: int = flag(
        0, "prompt tokens of one request in a step; 0: as many as the step has", tokens=True, low=0
    )
    max_num_queued_reqs: int = flag(1024, "waiting requests; above this the answer is 429", low=1)
    scheduling_policy: Literal["fcfs", "priority"] = flag("fcfs", "order of waiting requests")
    speculative_config: dict[str, Any] = flag(  # noqa: RUF009
        {}, 'drafts, such as {"method": "ngram", "num_speculative_tokens": 4}, or {"model": DRAFTER}'
    )
    per_request_spec_decode_metrics: Literal["none", "summary", "detailed"] = flag(
        "none", "report the drafts of each answer in its metrics; detailed: of each step, too"
    )
    stream_interval: int = flag(1, "tokens per chunk of a stream, at least", low=1)
    step_timeout: float = flag(60.0, "seconds that a step may take before the engine counts as stalled", low=1)
    stall_exit: float = flag(30.0, "seconds after which a stalled engine ends the process", low=0.1)
    max_failed_steps: int = flag(3, "failed steps in a row that end the process", low=1)
    max_oom: int = flag(3, "steps per minute without memory on the device that end the process", low=1)
    enforce_eager: bool = flag(False, "run without graphs: an earlier start, slower steps")
    cudagraph_capture_sizes: tuple[int, ...] = flag(
        (), "requests of decode steps with a graph; none: 1 to the largest step", several=True, low=1
    )
    deterministic: bool = flag(
        False, "answers independent of the batch, to the last bit; about a third slower on an accelerator"
    )


@dataclass(frozen=True, slots=True)
class SpeechConfig:
    """The transcription routes. Prompts are for models that take audio in chat; {language} is the request's
    language.
    """

    transcription_prompt: str = flag(
        "Transcribe the recording.", "prompt with each window of audio, for models that transcribe through chat"
    )
    translation_prompt: str = flag(
        "Translate the recording into {language}.", "prompt with each window of audio, if a translation is requested"
    )
    transcription_window: float = flag(30.0, "seconds of audio in a prompt, at most", low=1, high=600)
    transcription_pause: float = flag(1.0, "seconds of quiet that end a window; 0: only full windows end", low=0)
    transcription_windows_at_once: int = flag(8, "windows of one request that run in parallel", low=1)


@dataclass(frozen=True, slots=True)
class TracesConfig:
    """Traces of single steps and requests."""

    trace: str = flag("", "file for a timeline of loop, pool and device, written at the end")
    otlp_traces_endpoint: str = flag("", "OTLP/HTTP URL for a span per request (needs opentelemetry-sdk)")


@dataclass(frozen=True, slots=True)
class Config:
    """All settings; groups are named as in `--help`."""

    server: ServerConfig = field(default_factory=ServerConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    model: ModelFlags = field(default_factory=ModelFlags)
    chat: ChatConfig = field(default_factory=ChatConfig)
    media: MediaLimits = field(default_factory=MediaLimits)
    speech: SpeechConfig = field(default_factory=SpeechConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    traces: TracesConfig = field(default_factory=TracesConfig)
    pooling: PoolingFlags = field(default_factory=PoolingFlags)
    rows: RowsFlags = field(default_factory=RowsFlags)
    lora: LoraFlags = field(default_factory=LoraFlags)
    health: HealthFlags = field(default_factory=HealthFlags)
    batches: BatchFlags = field(default_factory=BatchFlags)
    ranks: RankFlags = field(default_factory=RankFlags)

    @property
    def folder(self) -> str:
        """The model: the named folder or ORG/NAME on the hub, or the embedded model."""
        return self.model.model or str(EMBEDDED)

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names by which clients may call the model; the first is reported."""
        return self.server.served_model_name or ((self.model.model.rstrip("/") or "omniloop"),)

    @property
    def max_queue_wait(self) -> float:
        """Seconds; 0: no limit. Trusted clients wait without a limit, unless the operator sets a number."""
        wait = self.limits.max_queue_wait
        return 0.0 if self.limits.trust_clients and wait == MAX_QUEUE_WAIT_S else wait

    @property
    def pool_threads(self) -> int:
        return self.chat.pool_threads or min(16, max(4, (os.cpu_count() or 1)))

    @property
    def is_loopback(self) -> bool:
        return bool(self.server.uds) or self.server.host in ("127.0.0.1", "::1", "localhost")

    @property
    def without_media(self) -> tuple[Modality, ...]:
        """The modalities that no prompt may contain, so that their encoders are not built."""
        if self.model.language_model_only:
            return MODALITIES
        return tuple(name for name in MODALITIES if self.media.limit_mm_per_prompt.get(name) == 0)

    @property
    def states(self) -> StateConfig:
        """Of recurrent layers."""
        cache = self.cache
        return StateConfig(
            cache.mamba_cache_mode, cache.mamba_block_size, cache.state_cache_share, cache.mamba_ssm_cache_dtype
        )

    @property
    def loras(self) -> LoraConfig | None:
        """Of adapters that requests choose by name; None: there are none."""
        flags = self.lora
        if not flags.enable_lora:
            return None
        capacity = flags.max_cpu_loras or max(flags.max_loras, len(flags.lora_modules))
        others = flags.lora_dir or flags.enable_runtime_lora
        named = () if others else tuple((module.name, module.path) for module in map(module_of, flags.lora_modules))
        return LoraConfig(
            flags.max_loras, flags.max_lora_rank, flags.lora_max_bytes, capacity, flags.lora_target_modules, named
        )

    @property
    def drafter(self) -> str:
        """The drafter of --speculative-config: a folder, or ORG/NAME on the hub; "": none."""
        named = self.scheduler.speculative_config.get("model")
        return named if isinstance(named, str) else ""

    def engine(self, folder: str = "", drafter: str = "") -> EngineConfig:
        """The engine's part of the settings. `folder`, `drafter`: where they are, if they were downloaded."""
        model, cache, rows = self.model, self.cache, self.scheduler
        drafts = {**rows.speculative_config, "model": drafter} if drafter else rows.speculative_config
        return EngineConfig(
            model=folder or self.folder,
            device=model.device,
            dtype=model.dtype,
            load_format=model.load_format,
            quantization=model.quantization,
            model_impl=model.model_impl,
            hf_overrides=model.hf_overrides,
            without_media=self.without_media,
            enable_prompt_embeds=self.rows.enable_prompt_embeds,
            runner=self.pooling.runner,
            pooler=self.pooling.pooler_config,
            seed=model.seed,
            max_model_len=model.max_model_len,
            block_size=cache.block_size,
            gpu_memory_utilization=cache.gpu_memory_utilization,
            device_reserve_bytes=cache.device_reserve_bytes,
            kv_cache_memory_bytes=cache.kv_cache_memory_bytes,
            num_gpu_blocks_override=cache.num_gpu_blocks_override,
            kv_cache_dtype=cache.kv_cache_dtype,
            kv_cache_skip_layers=cache.kv_cache_dtype_skip_layers,
            enable_prefix_caching=cache.enable_prefix_caching,
            states=self.states,
            encoder_cache_tokens=cache.encoder_cache_tokens,
            jump_forward={"on": True, "off": False}.get(model.structured_outputs_jump_forward),
            return_routed_experts=cache.enable_return_routed_experts,
            speculative=drafts,
            report_drafts=rows.per_request_spec_decode_metrics != "none",
            max_num_seqs=rows.max_num_seqs,
            max_num_batched_tokens=rows.max_num_batched_tokens,
            max_prefill_chunk=rows.max_prefill_chunk,
            max_num_queued_reqs=rows.max_num_queued_reqs,
            scheduling_policy=rows.scheduling_policy,
            batch_slowdown=self.batches.batch_slowdown,
            max_logprobs=self.limits.max_logprobs,
            logprobs_mode=model.logprobs_mode,
            num_threads=model.num_threads,
            tensor_parallel=self.ranks.tensor_parallel_size,
            ranks=self.ranks.engine(os.environ),
            step_timeout=rows.step_timeout,
            failures=FailureLimits(rows.max_failed_steps, rows.max_oom, rows.stall_exit),
            enforce_eager=rows.enforce_eager,
            cudagraph_capture_sizes=tuple(sorted(set(rows.cudagraph_capture_sizes))),
            deterministic=rows.deterministic,
            lora=self.loras,
            faults=Faults() if self.health.debug_faults else None,
            debug_poison=self.health.debug_poison,
        )


def unread_key() -> str:
    """The name of vLLM's key variable if it is set: a server that ignored it would be open to everyone."""
    return "VLLM_API_KEY" if os.environ.get("VLLM_API_KEY") else ""


def environment_keys() -> tuple[str, ...]:
    """Keys from SERVER_API_KEY, comma-separated; the only variable whose value is read. Raises ValueError.

    Whitespace around a key, such as the final newline of a secret's file, is removed: no header can contain it.
    """
    text = os.environ.get("SERVER_API_KEY")
    keys = tuple(key for key in map(str.strip, (text or "").split(",")) if key)
    if text is not None and not keys:
        raise ValueError("SERVER_API_KEY: is set and holds no key; give one, or unset the variable")
    return keys
