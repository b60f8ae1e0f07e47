"""Config: what the operator chose, typed, frozen, in a few small groups; the only reader of flags and environment.

Each field carries its flag's help text; cli.py builds the command line from them. Values of 0 or "auto" mean "derive".
A limit is a ceiling: a request may ask for less, never for more. Made once before the loop starts, read everywhere.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from engine.base.config import CacheWord, EngineConfig, LogprobsMode
from engine.base.faults import Faults
from engine.base.request import Modality
from mm.limits import MediaLimits
from server.flags.health_flags import HealthFlags
from server.flags.pooling_flags import PoolingFlags
from server.flags.rows_flags import RowsFlags

EMBEDDED = Path(__file__).parents[1] / "embedded"
MIB = 1 << 20
MAX_QUEUE_WAIT_S = 10.0
FILE_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
SAMPLING_DEFAULTS = (*FILE_DEFAULTS, "presence_penalty", "frequency_penalty")  # --override-generation-config
MODALITIES: tuple[Modality, ...] = ("image", "audio", "video")


def flag(default: Any, text: str, **hints: Any) -> Any:
    """A field with its help text; hints: `tokens` (accepts 32k), `hidden_value` (never printed), `short`."""
    metadata = {"help": text, **hints}
    if isinstance(default, dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Where it listens, who may ask, how it stops and what it writes to the log."""

    host: str = flag("0.0.0.0", "address to listen on")
    port: int = flag(8000, "port; 0 picks a free one", low=0, high=65535)
    uds: str = flag("", "listen on this Unix socket instead of host and port")
    root_path: str = flag("", "where a proxy mounts this server; it strips that, openapi.json names it")
    api_key: tuple[str, ...] = flag((), "a key clients must send; repeatable (or SERVER_API_KEY)", hidden_value=True)
    api_key_file: str = flag(
        "", "file of keys: NAME:KEY weight=N (a digest names others; shares in turns), reread on SIGHUP"
    )
    auth_max_failures: int = flag(60, "wrong keys per minute and address before 429", low=1)
    trusted_proxies: tuple[str, ...] = flag(
        (), "addresses, CIDRs or `unix` whose X-Forwarded-For tells the client's address"
    )
    served_model_name: tuple[str, ...] = flag((), "names clients may use; the first is reported", several=True)
    ssl_keyfile: str = flag("", "TLS private key")
    ssl_certfile: str = flag("", "TLS certificate chain")
    allowed_hosts: tuple[str, ...] = flag((), "Host values to answer; none: any, or loopback names on a loopback bind")
    allowed_origins: tuple[str, ...] = flag((), "browser origins to allow; '*' for any")
    allowed_methods: tuple[str, ...] = flag(("GET", "POST", "OPTIONS"), "methods told to browsers")
    allowed_headers: tuple[str, ...] = flag(
        (
            *("authorization", "content-type", "x-api-key", "x-request-id", "user-agent", "idempotency-key"),
            *("openai-*", "anthropic-*", "x-stainless-*"),  # what the clients of these names send from a page
        ),
        "headers browsers may send; name-* is a family, * all",
    )
    allow_credentials: bool = flag(False, "let browsers send credentials; not with origin '*'")
    shutdown_delay: float = flag(0.0, "seconds to go on accepting after SIGTERM, while ready says 503", low=0)
    shutdown_timeout: float = flag(30.0, "seconds that running requests get after SIGTERM", low=0)
    startup_timeout: float = flag(1800.0, "seconds loading may take", low=1)
    sse_keep_alive_interval: float = flag(0.0, "seconds between keep-alive comments in silent streams; 0 off", low=0)
    log_level: Literal["debug", "info", "warning", "error"] = flag(
        "info", "debug also shows start-up times, and how tokens spread over experts"
    )
    log_format: Literal["text", "json"] = flag("text", "log lines as text or as JSON")
    disable_access_log: bool = flag(False, "no line per request")
    disable_log_stats: bool = flag(False, "no line every ten seconds of work: requests, tokens per second, step, cache")
    enable_log_requests: bool = flag(False, "log parameters and the beginning of prompts: clients' own words")
    enable_log_outputs: bool = flag(False, "log the beginning of answers too")
    max_log_len: int = flag(256, "characters of a prompt or an answer in the log", low=0)
    log_rate: int = flag(100, "lines per second of one kind; the rest is counted", low=1)
    metrics_require_key: bool = flag(False, "guard /metrics with the API key too")
    disable_docs: bool = flag(False, "no /docs and no /openapi.json")
    disable_playground: bool = flag(False, "no chat page at /")
    enable_dev_endpoints: bool = flag(False, "routes that pause the server, clear caches and show its settings")
    admin_api_key: str = flag(
        "", "key for those routes; needed when the bind is not loopback, asked for if given", hidden_value=True
    )


@dataclass(frozen=True, slots=True)
class LimitsConfig:
    """Ceilings at the edge; SECURITY classes S1 to S12, S27, S28 and S42."""

    max_header_bytes: int = flag(16384, "all headers of a request", low=1024)
    max_headers: int = flag(100, "number of headers", low=8)
    max_target_bytes: int = flag(8192, "path and query", low=64)
    max_request_bytes: int = flag(64 * MIB, "body of a route that takes media", low=1024)
    max_text_request_bytes: int = flag(8 * MIB, "body of a route without media", low=1024)
    max_upload_bytes: int = flag(0, "file of a form; 0: as --audio-max-bytes", low=0)
    max_form_parts: int = flag(64, "fields of a form", low=1)
    max_form_field_bytes: int = flag(65536, "text in a field of a form; all together four times as much", low=256)
    body_budget_bytes: int = flag(1024 * MIB, "all bodies held at one time, without the first 64 KiB of each", low=1024)
    json_max_depth: int = flag(200, "nesting of a JSON body", low=4)
    json_max_nodes: int = flag(1_000_000, "values in a JSON body; 65536 besides long lists of integers", low=16)
    max_messages: int = flag(2048, "messages in a conversation", low=1)
    max_content_parts: int = flag(1024, "parts of a message", low=1)
    max_tools: int = flag(512, "tools of a request", low=1)
    max_tool_calls: int = flag(128, "calls in an answer; what is written behind them is content", low=1)
    max_tool_argument_bytes: int = flag(MIB, "arguments of a call; what is written behind them is content", low=64)
    max_name_bytes: int = flag(256, "length of a model name", low=16)
    header_timeout: float = flag(10.0, "seconds for the headers of a request", low=0.1)
    body_idle_timeout: float = flag(15.0, "seconds between two pieces of a body", low=0.1)
    body_timeout: float = flag(120.0, "seconds for a whole body", low=0.1)
    min_upload_rate: int = flag(16384, "bytes per second of a body, after the first 5 s", low=1)
    keepalive_timeout: float = flag(15.0, "seconds an idle connection stays open", low=1)
    max_connections: int = flag(4096, "open connections; 503 beyond", low=1)
    stream_buffer_bytes: int = flag(262144, "what a stream holds for a reader that has stopped", low=4096)
    stream_stall_timeout: float = flag(30.0, "seconds a stopped reader is waited for", low=0.1)
    request_timeout: float = flag(0.0, "seconds for a whole request; 0 off", low=0)
    queue_timeout: float = flag(120.0, "seconds to the first token", low=0.1)
    prepare_timeout: float = flag(90.0, "seconds for media, template and tokens", low=0.1)
    template_timeout: float = flag(5.0, "seconds a chat template may run", low=0.01)
    template_max_output_bytes: int = flag(0, "text a template may make; 0: as --max-prompt-bytes", low=0)
    template_max_kwargs: int = flag(32, "chat_template_kwargs", low=0)
    template_max_kwargs_bytes: int = flag(16384, "chat_template_kwargs as JSON", low=2)
    max_prompt_bytes: int = flag(0, "text of a prompt; 0: 16 per token of the context", low=0)
    tokenize_offload_bytes: int = flag(2048, "longer prompts are tokenized in the pool", low=0)
    max_queued_tokens: int = flag(4_194_304, "prompt tokens that run or wait; 429 beyond", low=1)
    max_inflight_per_key: int = flag(
        0, "choices of one key that run or wait, also its realtime sessions; 0: any", low=0
    )
    max_queue_wait: float = flag(
        MAX_QUEUE_WAIT_S, "seconds that a request may have to wait, by the measured rate; 429 beyond; 0: any", low=0
    )
    trust_clients: bool = flag(
        False, "of a private server: no --max-queue-wait but a given one, and no shares of clients in what all use"
    )
    max_realtime_sessions: int = flag(256, "realtime sessions open at one time; 429 beyond", low=1)
    realtime_idle_timeout: float = flag(120.0, "seconds a realtime session lives without an event or a turn", low=0.1)
    max_n: int = flag(128, "choices of a prompt", low=1)
    max_prompts: int = flag(1024, "prompts of a completion request", low=1)
    max_choices: int = flag(2048, "prompts times choices", low=1)
    max_logprobs: int = flag(20, "logprobs per token; -1: the whole vocabulary", low=-1)
    max_logprob_ids: int = flag(128, "logprob_token_ids", low=1)
    max_stop_strings: int = flag(32, "stop strings, of 256 bytes at most", low=1)
    max_stop_ids: int = flag(64, "stop_token_ids", low=1)
    max_logit_bias: int = flag(1024, "entries of logit_bias", low=1)
    max_bad_words: int = flag(64, "bad_words, of 128 bytes at most", low=1)
    response_store_max: int = flag(1024, "stored responses; 0: none are stored", low=0)
    response_store_ttl: float = flag(3600.0, "seconds a response stays stored", low=0.01)
    response_store_bytes: int = flag(64 * MIB, "all stored responses and their inputs", low=1024)
    max_allowed_ids: int = flag(4096, "allowed_token_ids", low=1)
    grammar_max_bytes: int = flag(131_072, "text of a grammar or schema", low=64)
    grammar_timeout: float = flag(5.0, "seconds a grammar may compile", low=0.01)
    grammar_memory_bytes: int = flag(1024 * MIB, "what one compiled grammar may take", low=16 * MIB)
    grammar_cache_bytes: int = flag(256 * MIB, "compiled grammars that are kept", low=1024)
    schema_max_depth: int = flag(64, "nesting of a JSON Schema", low=1)
    schema_max_nodes: int = flag(8192, "values in a JSON Schema", low=1)
    schema_max_enum: int = flag(4096, "entries of an enum or a choice, or tags and triggers of a structural tag", low=1)
    regex_max_bytes: int = flag(4096, "text of a regular expression", low=1)
    regex_max_repeat: int = flag(1000, "count in a repetition {n,m}", low=1)


@dataclass(frozen=True, slots=True)
class ModelFlags:
    """Which checkpoint, and how it is read."""

    model: str = flag("", "folder in Hugging Face format, GGUF file, or ORG/NAME on the hub; none: the embedded model")
    revision: str = flag("", "branch, tag or commit of ORG/NAME; none: main")
    download_dir: str = flag("", "folder for what comes from the hub; none: huggingface_hub's cache")
    hf_token: str = flag("", "token for private repositories (or HF_TOKEN, which ps does not show)", hidden_value=True)
    tokenizer: str = flag("", "folder, file or ORG/NAME of the tokenizer; none: the model's")
    skip_tokenizer_init: bool = flag(False, "read no tokenizer: token ids in, token ids out")
    tokenizer_mode: Literal["auto", "hf", "mistral"] = flag("auto", "hf: tokenizer.json; mistral: mistral-common")
    device: Literal["auto", "cpu", "cuda"] = flag("auto", "where it runs (cuda: also ROCm)")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = flag(
        "auto", "of weights and activations; float16: of encoders, on an accelerator"
    )
    load_format: Literal["auto", "safetensors", "dummy"] = flag("auto", "dummy: random weights")
    quantization: str = flag(
        "", "fp8: made of a checkpoint's floats; or the checkpoint's own method, as it is read anyway"
    )
    seed: int = flag(0, "of dummy weights")
    max_model_len: int = flag(0, "context in tokens, 32k accepted; 0: the checkpoint's", tokens=True, low=0)
    model_impl: Literal["auto", "native", "transformers"] = flag("auto", "transformers: its modules; auto: if not ours")
    hf_overrides: dict[str, Any] = flag({}, 'over config.json\'s, as {"rope_theta": 1e6}; null removes')  # noqa: RUF009
    language_model_only: bool = flag(False, "text only: no tower is built, and its weights are not read")
    generation_config: str = flag("auto", "auto: the checkpoint's sampling defaults; vllm: ignore them")
    override_generation_config: dict[str, Any] = flag({}, "sampling defaults over the checkpoint's")  # noqa: RUF009
    logprobs_mode: LogprobsMode = flag("raw_logprobs", "what they tell: the model's, or what was drawn")  # noqa: RUF009
    structured_outputs_backend: Literal["auto", "none"] = flag("auto", "grammars for answers; none: answers are free")
    structured_outputs_jump_forward: Literal["auto", "on", "off"] = flag(
        "auto", "tokens that a grammar forces are computed in one step; auto: on a CPU"
    )
    num_threads: int = flag(0, "compute threads on a CPU; 0: all cores", low=0)
    trust_remote_code: bool = flag(False, "accepted; no code of a model folder ever runs")


@dataclass(frozen=True, slots=True)
class ChatConfig:
    """How messages become a prompt."""

    chat_template: str = flag("", "template text or file instead of the checkpoint's")
    chat_template_content_format: Literal["auto", "string", "openai"] = flag(
        "auto", "whether the template wants text or parts"
    )
    default_chat_template_kwargs: dict[str, Any] = flag({}, "variables for every template")  # noqa: RUF009
    mm_processor_kwargs: dict[str, Any] = flag({}, "media options such as use_audio_in_video, max_pixels, fps")  # noqa: RUF009
    media_io_kwargs: dict[str, Any] = flag({}, 'what is read, as {"video": {"num_frames": 32, "key_frames": true}}')  # noqa: RUF009
    image_background: str = flag("white", "behind transparent pictures: #rrggbb, white, black or grey")
    trust_request_mm_kwargs: bool = flag(False, "let requests bring mm_processor_kwargs and media_io_kwargs")
    trust_request_chat_template: bool = flag(False, "let requests bring their own template")
    escape_special_tokens: bool = flag(False, "special tokens that clients write become plain text")
    response_role: str = flag("assistant", "role of answers")
    exclude_tools_when_tool_choice_none: bool = flag(False, "tools that may not be called stay out of the prompt")
    tool_call_parser: str = flag("auto", "format of tool calls, such as hermes; auto: the checkpoint's; none: text")
    reasoning_parser: str = flag("auto", "format of reasoning, such as qwen3; auto: the checkpoint's; none: text")
    tool_parser_plugin: str = flag("", "Python file with a table TOOLS of further formats")
    reasoning_parser_plugin: str = flag("", "Python file with a table REASONING of further formats")
    reasoning_field: Literal["both", "reasoning", "reasoning_content"] = flag("both", "where chat shows reasoning")
    enable_auto_tool_choice: bool = flag(False, "accepted; tool_choice auto needs no flag")
    return_tokens_as_token_ids: bool = flag(False, "tokens in log-probabilities as token_id:N")
    enable_force_include_usage: bool = flag(False, "usage in every stream, asked for or not")
    pool_threads: int = flag(0, "threads for text and media; 0: derived from the cores", low=0)


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """KV blocks."""

    block_size: int = flag(16, "tokens in a block", low=1)
    gpu_memory_utilization: float = flag(0.92, "share of the accelerator's memory to use", low=0.01, high=1)
    device_reserve_bytes: int = flag(1024 * MIB, "of that share, kept free for what no plan knows", low=0)
    kv_cache_memory_bytes: int = flag(0, "bytes for blocks; 0: derived", low=0)
    num_gpu_blocks_override: int = flag(0, "number of blocks; 0: derived", low=0)
    kv_cache_dtype: CacheWord = flag("auto", "numbers of keys and values; auto: the checkpoint's")  # noqa: RUF009
    kv_cache_dtype_skip_layers: tuple[str, ...] = flag((), "layers without fp8: numbers, sliding_window", several=True)
    enable_prefix_caching: bool = flag(True, "share blocks of equal prefixes")
    enable_return_routed_experts: bool = flag(False, "keep each token's experts for requests that ask for them")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What runs in a step, and who waits."""

    max_num_seqs: int = flag(0, "rows in a step; 0: derived", low=0)
    max_num_batched_tokens: int = flag(
        0, "tokens in a step; 0: derived; over 2048 a crowd of prompts fills it", tokens=True, low=0
    )
    max_prefill_chunk: int = flag(0, "prompt tokens of one row in a step; 0: the budget", tokens=True, low=0)
    max_num_queued_reqs: int = flag(1024, "waiting requests; 429 beyond", low=1)
    scheduling_policy: Literal["fcfs", "priority"] = flag("fcfs", "who goes first")
    stream_interval: int = flag(1, "tokens per chunk of a stream, at least", low=1)
    step_timeout: float = flag(60.0, "seconds a step may take before the engine counts as stalled", low=1)
    stall_exit: float = flag(30.0, "seconds that a stalled engine has before the process exits", low=0.1)
    max_failed_steps: int = flag(3, "failed steps in a row that end the process", low=1)
    max_oom: int = flag(3, "steps in a minute without room on the device that end the process", low=1)
    enforce_eager: bool = flag(False, "launch forwards and choices kernel by kernel, without graphs")
    cudagraph_capture_sizes: tuple[int, ...] = flag(
        (), "rows of decode steps to capture; none: 1 to the largest step", several=True, low=1
    )
    deterministic: bool = flag(False, "equal bits for a request, whatever else is in its batch (a third slower)")


@dataclass(frozen=True, slots=True)
class SpeechConfig:
    """The transcription routes. Prompts are for models that hear through chat; {language} in them is the request's."""

    transcription_prompt: str = flag("Transcribe the recording.", "what such a model is asked with each window")
    translation_prompt: str = flag("Translate the recording into {language}.", "and where a translation is wanted")
    transcription_window: float = flag(30.0, "seconds of sound in a prompt, at most", low=1, high=600)
    transcription_pause: float = flag(1.0, "seconds of quiet that end a window; 0: only a full window ends", low=0)
    transcription_windows_at_once: int = flag(8, "windows of one request that run together", low=1)


@dataclass(frozen=True, slots=True)
class TracesConfig:
    """What is told of single steps and requests."""

    trace: str = flag("", "file for a timeline of loop, pool and device, written when the server ends")
    otlp_traces_endpoint: str = flag("", "send a span per request to this OTLP/HTTP URL (needs omniloop[otel])")


@dataclass(frozen=True, slots=True)
class Config:
    """Everything; groups are named as in `--help`."""

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
    health: HealthFlags = field(default_factory=HealthFlags)

    @property
    def folder(self) -> str:
        """The model: what was named, a folder or ORG/NAME on the hub, or the embedded one."""
        return self.model.model or str(EMBEDDED)

    @property
    def model_names(self) -> tuple[str, ...]:
        """What clients may call the model; the first is reported."""
        return self.server.served_model_name or ((self.model.model.rstrip("/") or "omniloop"),)

    @property
    def max_queue_wait(self) -> float:
        """Seconds; 0: any. Clients that are trusted wait as long as they like, unless the operator names a number."""
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
        """What no prompt may hold, so that towers for it are not built."""
        if self.model.language_model_only:
            return MODALITIES
        return tuple(name for name in MODALITIES if self.media.limit_mm_per_prompt.get(name) == 0)

    def engine(self, folder: str = "") -> EngineConfig:
        """The engine's share of it; `folder`: where the model is, if it was fetched."""
        model, cache, rows = self.model, self.cache, self.scheduler
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
            jump_forward={"on": True, "off": False}.get(model.structured_outputs_jump_forward),
            return_routed_experts=cache.enable_return_routed_experts,
            max_num_seqs=rows.max_num_seqs,
            max_num_batched_tokens=rows.max_num_batched_tokens,
            max_prefill_chunk=rows.max_prefill_chunk,
            max_num_queued_reqs=rows.max_num_queued_reqs,
            scheduling_policy=rows.scheduling_policy,
            max_logprobs=self.limits.max_logprobs,
            logprobs_mode=model.logprobs_mode,
            num_threads=model.num_threads,
            step_timeout=rows.step_timeout,
            stall_exit=rows.stall_exit,
            max_failed_steps=rows.max_failed_steps,
            max_oom=rows.max_oom,
            enforce_eager=rows.enforce_eager,
            cudagraph_capture_sizes=tuple(sorted(set(rows.cudagraph_capture_sizes))),
            deterministic=rows.deterministic,
            faults=Faults() if self.health.debug_faults else None,
            debug_poison=self.health.debug_poison,
        )


def unread_key() -> str:
    """A variable that holds vLLM's key, where one is set: a server that passed over it would be open to everybody."""
    return "VLLM_API_KEY" if os.environ.get("VLLM_API_KEY") else ""


def environment_keys() -> tuple[str, ...]:
    """Keys from SERVER_API_KEY, comma-separated; the one variable whose value is read. Raises ValueError.

    Spaces around them, such as the line's end of a file that became a secret, are no part: no header can hold them.
    """
    text = os.environ.get("SERVER_API_KEY")
    keys = tuple(key for key in map(str.strip, (text or "").split(",")) if key)
    if text is not None and not keys:
        raise ValueError("SERVER_API_KEY: is set and holds no key; give one, or unset the variable")
    return keys
