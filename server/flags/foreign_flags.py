"""Flags of vLLM, SGLang and llama.cpp that this server does not have, and the advice to users who set them.

A flag whose value describes this server anyway (`--tensor-parallel-size 1`) is accepted with a line on stderr. Any
other is refused, and the error names the flag or the way that does the same here. Values that only the other servers
have for our own flags (`--dtype half`) are handled in the same way. Owner: the command line. Source of the names: the
lists of flags in the three projects' documentation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple


class Foreign(NamedTuple):
    """One flag: the advice, and the values that change nothing here ("" is the flag without a value)."""

    advice: str
    holds: tuple[str, ...] = ()
    switch: bool = False  # takes no value
    anything: bool = False  # every value is passed over
    same: str = ""  # our flag that the value is given to


class Meant(NamedTuple):
    """A value of our own flag that only another server has. `value`: the equivalent here; "": the value is refused."""

    advice: str
    value: str = ""


ONE_DEVICE = "one process uses one device; start a server for each device behind a router (see /docs/deployment)"
OWN_KERNELS = "the server has its own attention kernels; leave the flag out"
NO_CODE = "code from a request or a checkpoint never runs; leave the flag out"
NO_DRAFTS = "draft tokens are not supported; leave the flag out"
SHARED_POOL = "states and tokens share one pool of blocks; --state-cache-share bounds the states of idle prefixes"
NO_TRANSFER = "the cache is not shared with other processes; leave the flag out"
NO_BALANCE = "one device holds all experts; leave the flag out"
NO_OFFLOAD = "keys and values stay on the device; leave the flag out"
NO_CLIENT_CERTIFICATES = "clients authenticate by keys (--api-key); a proxy in front can check certificates"


def renamed(name: str) -> Foreign:
    return Foreign(f"use --{name}")


def always(advice: str) -> Foreign:
    """A switch that changes nothing here, because this server always behaves so."""
    return Foreign(advice, ("",), switch=True)


def passed_over(advice: str) -> Foreign:
    """A flag whose values ask for what is decided here already."""
    return Foreign(advice, anything=True)


FOREIGN = {
    # vLLM
    "additional-config": Foreign("no platform has settings of its own; leave the flag out", ("{}",)),
    "aggregate-engine-logging": always("one process writes one log"),
    "all2all-backend": Foreign(ONE_DEVICE),
    "api-server-count": Foreign("one process serves HTTP; leave the flag out", ("1",)),
    "async-scheduling": always("the next step is always planned while one runs"),
    "attention-backend": Foreign(OWN_KERNELS),
    "attention-config": Foreign(OWN_KERNELS),
    "calculate-kv-scales": always(
        "scales of an FP8 cache come from the checkpoint, or are computed per token and head"
    ),
    "code-revision": Foreign(NO_CODE),
    "collect-detailed-traces": Foreign("use --trace FILE, or POST /start_profile"),
    "compilation-config": Foreign(
        "graphs are always recorded; --cudagraph-capture-sizes and --enforce-eager change that"
    ),
    "config-format": Foreign("the format is read from the files", ("auto", "hf", "mistral")),
    "convert": Foreign("heads are those of the checkpoint; use --runner pooling", ("auto", "none")),
    "cp-kv-cache-interleave-size": Foreign(ONE_DEVICE, ("1",)),
    "cpu-offload-gb": Foreign("all weights are on the device; leave the flag out", ("0",)),
    "cpu-offload-params": Foreign("all weights are on the device; leave the flag out"),
    "cuda-graph-sizes": renamed("cudagraph-capture-sizes"),
    "cudagraph-metrics": Foreign("read the step's histograms at /metrics; leave the flag out", switch=True),
    "data-parallel-address": Foreign(ONE_DEVICE),
    "data-parallel-backend": Foreign(ONE_DEVICE),
    "data-parallel-external-lb": Foreign(ONE_DEVICE, switch=True),
    "data-parallel-hybrid-lb": Foreign(ONE_DEVICE, switch=True),
    "data-parallel-rank": Foreign(ONE_DEVICE, ("0",)),
    "data-parallel-rpc-port": Foreign(ONE_DEVICE),
    "data-parallel-size": Foreign(ONE_DEVICE, ("1",)),
    "data-parallel-size-local": Foreign(ONE_DEVICE, ("1",)),
    "data-parallel-start-rank": Foreign(ONE_DEVICE, ("0",)),
    "dbo-decode-token-threshold": Foreign(ONE_DEVICE),
    "dbo-prefill-token-threshold": Foreign(ONE_DEVICE),
    "dcp-kv-cache-interleave-size": Foreign(ONE_DEVICE, ("1",)),
    "decode-context-parallel-size": Foreign(ONE_DEVICE, ("1",)),
    "default-mm-loras": Foreign("a request names its adapter as model; leave the flag out"),
    "disable-access-log-for-endpoints": Foreign("use --disable-access-log, which applies to all paths"),
    "disable-async-output-proc": Foreign(
        "text is always made while the next step runs; leave the flag out", switch=True
    ),
    "disable-cascade-attn": always("there is no cascade attention"),
    "disable-chunked-mm-input": Foreign(
        "images with attention in both directions are never cut; leave the flag out", switch=True
    ),
    "disable-custom-all-reduce": always("one device has nothing to reduce"),
    "disable-fastapi-docs": Foreign("use --disable-docs", switch=True),
    "disable-frontend-multiprocessing": always("HTTP and the device share one process"),
    "disable-hybrid-kv-cache-manager": Foreign(
        "layers with a window cache only their window; leave the flag out", switch=True
    ),
    "disable-log-requests": always("requests are logged only with --enable-log-requests"),
    "disable-mm-preprocessor-cache": Foreign("use --mm-processor-cache-gb 0", switch=True),
    "disable-nccl-for-dp-synchronization": Foreign(ONE_DEVICE, switch=True),
    "disable-sliding-window": Foreign("use --max-model-len of at most the window", switch=True),
    "disable-uvicorn-access-log": Foreign("use --disable-access-log", switch=True),
    "distributed-executor-backend": Foreign(f"{ONE_DEVICE}; Ray: examples/deploy/ray", ("mp", "uni")),
    "ec-transfer-config": Foreign("outputs of encoders are not shared with other processes; leave the flag out"),
    "enable-chunked-prefill": always(
        "prompts are always split to fit a step; --max-prefill-chunk limits the part of a request"
    ),
    "enable-dbo": Foreign(ONE_DEVICE, switch=True),
    "enable-elastic-ep": Foreign(NO_BALANCE, switch=True),
    "enable-eplb": Foreign(NO_BALANCE, switch=True),
    "enable-expert-parallel": always("one device holds all experts"),
    "enable-layerwise-nvtx-tracing": Foreign(
        "use --enable-dev-endpoints and POST /start_profile?kernels=true", switch=True
    ),
    "enable-log-deltas": Foreign("use --enable-log-outputs: answers are logged when they end", switch=True),
    "enable-logging-iteration-details": Foreign("use --trace FILE: a timeline with every step", switch=True),
    "enable-mamba-fine-grained-prefix-cache": always("prefixes are found at every block that has a state"),
    "enable-mfu-metrics": Foreign("read the step's histograms at /metrics; leave the flag out", switch=True),
    "enable-mm-processor-stats": Foreign("use --trace FILE, or bench media", switch=True),
    "enable-offline-docs": always("/docs contacts no other server"),
    "enable-prompt-adapter": Foreign("only LoRA adapters are served (--enable-lora)", switch=True),
    "enable-prompt-tokens-details": always("usage always has prompt_tokens_details"),
    "enable-reasoning": always("reasoning is always separated from the answer, if the template has it"),
    "enable-request-id-headers": always("every answer has X-Request-Id"),
    "enable-server-load-tracking": always("/load is always there"),
    "enable-sleep-mode": Foreign(
        "sleep is not supported: stop the server to free its memory; leave the flag out", switch=True
    ),
    "enable-ssl-refresh": Foreign("a new certificate needs a restart, or use a proxy in front", switch=True),
    "enable-tokenizer-info-endpoint": always("/tokenizer_info is always there"),
    "eplb-config": Foreign(NO_BALANCE),
    "expert-placement-strategy": Foreign(NO_BALANCE, ("linear",)),
    "fail-on-environ-validation": always("the server reads no variables of vLLM"),
    "fully-sharded-loras": always("one device holds every adapter"),
    "grpc": Foreign("the server has HTTP only; leave the flag out", switch=True),
    "guided-decoding-backend": renamed("structured-outputs-backend"),
    "guided-decoding-disable-any-whitespace": Foreign(
        "whitespace follows the grammar; leave the flag out", switch=True
    ),
    "h11-max-header-count": renamed("max-headers"),
    "h11-max-incomplete-event-size": renamed("max-header-bytes"),
    "headless": Foreign(ONE_DEVICE, switch=True),
    "hf-config-path": Foreign("the model's config.json is read; --hf-overrides changes it"),
    "ignore-patterns": Foreign("only configurations, tokenizer and safetensors are fetched; leave the flag out"),
    "interleave-mm-strings": always("media are always placed where the message has them"),
    "io-processor-plugin": Foreign(NO_CODE),
    "kernel-config": Foreign("kernels are chosen at start; leave the flag out"),
    "kv-cache-memory": renamed("kv-cache-memory-bytes"),
    "kv-cache-metrics": always("/metrics has the numbers of the cache"),
    "kv-cache-metrics-sample": Foreign("/metrics counts all blocks; leave the flag out"),
    "kv-events-config": Foreign(NO_TRANSFER),
    "kv-offloading-backend": Foreign(NO_OFFLOAD),
    "kv-offloading-size": Foreign(NO_OFFLOAD),
    "kv-sharing-fast-prefill": Foreign("prompts always compute every layer; leave the flag out", switch=True),
    "kv-transfer-config": Foreign(NO_TRANSFER),
    "log-config-file": Foreign("use --log-level and --log-format"),
    "log-error-stack": always("the log always has the stack of a fault"),
    "logits-processor-pattern": Foreign(NO_CODE),
    "logits-processors": Foreign(NO_CODE),
    "long-prefill-token-threshold": renamed("max-prefill-chunk"),
    "lora-dtype": Foreign("adapters have the model's dtype", ("auto",)),
    "lora-extra-vocab-size": Foreign("adapters use the base's tokens; leave the flag out", ("0", "256")),
    **dict.fromkeys(("linear-attn-backend", "mamba-backend"), Foreign(OWN_KERNELS)),
    "mamba-cache-dtype": passed_over("inputs of convolutions are cached in the model's type"),
    "master-addr": Foreign(ONE_DEVICE),
    "master-port": Foreign(ONE_DEVICE),
    "max-cudagraph-capture-size": Foreign("use --cudagraph-capture-sizes with the sizes themselves"),
    "max-long-partial-prefills": Foreign("all prompts of a step share its tokens; use --max-prefill-chunk"),
    "max-num-partial-prefills": Foreign("all prompts of a step share its tokens; use --max-prefill-chunk"),
    "max-parallel-loading-workers": Foreign("the number follows from the cores; leave the flag out"),
    "max-seq-len-to-capture": Foreign("graphs work for any context; --cudagraph-capture-sizes lists their sizes"),
    "middleware": Foreign("host the app in your own server and wrap it there (server/hosted.py)"),
    "mm-encoder-attn-backend": Foreign(OWN_KERNELS),
    "mm-encoder-only": Foreign("encoders run together with their decoder; leave the flag out", switch=True),
    "mm-encoder-tp-mode": Foreign("one device runs the encoders", ("data", "weights")),
    "mm-processor-cache-type": Foreign(
        "processed media are cached in this process; --mm-processor-cache-gb limits the cache", ("lru",)
    ),
    "mm-shm-cache-max-object-size-mb": Foreign(
        "processed media are cached in this process; --mm-processor-cache-gb limits the cache"
    ),
    "model-loader-extra-config": Foreign("the loader has no settings of that kind", ("{}",)),
    "moe-backend": Foreign("the server has its own kernels for experts; leave the flag out", ("auto",)),
    "nnodes": Foreign(ONE_DEVICE, ("1",)),
    "node-rank": Foreign(ONE_DEVICE, ("0",)),
    "num-lookahead-slots": Foreign(NO_DRAFTS, ("0",)),
    "num-redundant-experts": Foreign(NO_BALANCE, ("0",)),
    "num-scheduler-steps": Foreign("the next step is always planned while one runs; leave the flag out", ("1",)),
    "numa-bind": Foreign("start the command with numactl", switch=True),
    "offload-backend": Foreign("all weights are on the device; leave the flag out", ("auto",)),
    "optimization-level": Foreign("steps are captured in graphs; --enforce-eager leaves graphs out", ("1", "2", "3")),
    "override-attention-dtype": Foreign("use --dtype"),
    "override-pooler-config": renamed("pooler-config"),
    "performance-mode": Foreign(
        "use --max-num-batched-tokens: more tokens per second, or a sooner first token", ("balanced",)
    ),
    "pipeline-parallel-size": Foreign(ONE_DEVICE, ("1",)),
    "preemption-mode": Foreign("a preempted request is always computed again; leave the flag out", ("recompute",)),
    "prefill-context-parallel-size": Foreign(ONE_DEVICE, ("1",)),
    "prefix-caching-hash-algo": Foreign("prefixes are always found by a keyed hash; leave the flag out"),
    "prefix-match-unit": passed_over("prefixes match in blocks of --block-size tokens"),
    "profiler-config": Foreign("use --enable-dev-endpoints and POST /start_profile, or --trace FILE"),
    "pt-load-map-location": Foreign("pickles are never read; serve safetensors"),
    "qlora-adapter-name-or-path": renamed("lora-modules"),
    "quantization-config": Foreign("it is read from config.json; --hf-overrides changes it"),
    "ray-workers-use-nsight": Foreign(ONE_DEVICE, switch=True),
    "reasoning-config": Foreign("use --reasoning-parser; thinking_token_budget in a request limits the reasoning"),
    "renderer-num-workers": renamed("pool-threads"),
    "replayssm-buffer-len": passed_over("a state is written once in 16 tokens"),
    "rope-scaling": Foreign("""use --hf-overrides '{"rope_scaling": {...}}'"""),
    "rope-theta": Foreign("""use --hf-overrides '{"rope_theta": ...}'"""),
    "safetensors-load-strategy": Foreign("shards stream to the device; leave the flag out", ("lazy", "auto")),
    "scheduler-cls": Foreign("use --scheduling-policy fcfs or priority"),
    "scheduler-delay-factor": Foreign("prompts always start at once; leave the flag out", ("0", "0.0")),
    "show-hidden-metrics-for-version": Foreign("no metric is hidden; leave the flag out"),
    "skip-mm-profiling": always("the memory of encoders is always computed, not measured"),
    "speculative-config": Foreign(NO_DRAFTS),
    "speculative-model": Foreign(NO_DRAFTS),
    "ssl-ca-certs": Foreign(NO_CLIENT_CERTIFICATES),
    "ssl-cert-reqs": Foreign(NO_CLIENT_CERTIFICATES, ("0",)),
    "ssl-ciphers": Foreign("the TLS library chooses the ciphers; a proxy in front can choose others"),
    "structured-outputs-config": Foreign("use --structured-outputs-backend; whitespace follows the grammar"),
    "swap-space": Foreign("a preempted request is computed again instead of swapped; leave the flag out", ("0", "4")),
    "task": Foreign("use --runner generate or --runner pooling", ("auto", "generate")),
    "tensor-parallel-size": Foreign(ONE_DEVICE, ("1",)),
    "tokenizer-revision": Foreign("use --revision, or --tokenizer with a folder"),
    "tokens-only": Foreign("use --skip-tokenizer-init", switch=True),
    "tool-server": Foreign("tools always run at the client; leave the flag out"),
    "use-replayssm": always("a state is written once in 16 tokens"),
    "use-tqdm-on-load": Foreign("use --log-level debug for the progress of the start; leave the flag out", switch=True),
    "use-v2-block-manager": always("there is one block pool"),
    "uvicorn-log-level": renamed("log-level"),
    "video-pruning-rate": Foreign("""use --media-io-kwargs '{"video": {"num_frames": 8}}'""", ("0", "0.0")),
    "weight-transfer-config": Foreign("weights are read at start only; leave the flag out"),
    "worker-cls": Foreign(NO_CODE, ("auto",)),
    "worker-extension-cls": Foreign(NO_CODE),
    # SGLang
    "mamba-scheduler-strategy": Foreign("use --mamba-cache-mode", ("auto",)),
    "mamba-ssm-dtype": Foreign("taken as --mamba-ssm-cache-dtype", same="mamba-ssm-cache-dtype"),
    "mamba-track-interval": passed_over("an answer leaves a state in the prefix cache every 256 tokens"),
    **dict.fromkeys(("mamba-full-memory-ratio", "max-mamba-cache-size"), Foreign(SHARED_POOL)),
    "chunked-prefill-size": renamed("max-num-batched-tokens"),
    "context-length": renamed("max-model-len"),
    "cuda-graph-bs": renamed("cudagraph-capture-sizes"),
    "cuda-graph-max-bs": Foreign("use --cudagraph-capture-sizes with the sizes themselves"),
    "disable-cuda-graph": Foreign("use --enforce-eager", switch=True),
    "disable-overlap-schedule": Foreign(
        "the next step is always planned while one runs; leave the flag out", switch=True
    ),
    "disable-radix-cache": Foreign("use --no-enable-prefix-caching", switch=True),
    "dp": Foreign(ONE_DEVICE, ("1",)),
    "dp-size": Foreign(ONE_DEVICE, ("1",)),
    "enable-metrics": always("/metrics is always there"),
    "enable-mixed-chunk": always("prompts and decoding requests always share steps"),
    "enable-multimodal": always("encoders of the checkpoint are always built; --language-model-only leaves them out"),
    "enable-torch-compile": Foreign("steps are captured in graphs; leave the flag out", switch=True),
    "grammar-backend": renamed("structured-outputs-backend"),
    "is-embedding": Foreign("use --runner pooling", switch=True),
    "json-model-override-args": renamed("hf-overrides"),
    "log-requests": Foreign("use --enable-log-requests", switch=True),
    "max-prefill-tokens": renamed("max-num-batched-tokens"),
    "max-running-requests": renamed("max-num-seqs"),
    "mem-fraction-static": renamed("gpu-memory-utilization"),
    "mm-attention-backend": Foreign(OWN_KERNELS),
    "model-path": renamed("model"),
    "page-size": renamed("block-size"),
    "random-seed": renamed("seed"),
    "sampling-backend": Foreign("the server has its own sampling kernels; leave the flag out"),
    "schedule-policy": Foreign("use --scheduling-policy fcfs or priority", ("fcfs",)),
    "skip-server-warmup": Foreign("the start always measures the largest step; leave the flag out", switch=True),
    "speculative-algorithm": Foreign(NO_DRAFTS),
    "tokenizer-path": renamed("tokenizer"),
    "tp": Foreign(ONE_DEVICE, ("1",)),
    "tp-size": Foreign(ONE_DEVICE, ("1",)),
    "watchdog-timeout": renamed("step-timeout"),
    "lora-paths": renamed("lora-modules"),
    "max-loaded-loras": renamed("max-cpu-loras"),
    "max-loras-per-batch": renamed("max-loras"),
    # llama.cpp
    "alias": renamed("served-model-name"),
    "batch-size": renamed("max-num-batched-tokens"),
    "cache-type-k": renamed("kv-cache-dtype"),
    "cache-type-v": renamed("kv-cache-dtype"),
    "chat-template-file": renamed("chat-template"),
    "cont-batching": always("batching is always continuous"),
    "ctx-size": renamed("max-model-len"),
    "embedding": Foreign("use --runner pooling", switch=True),
    "embeddings": Foreign("use --runner pooling", switch=True),
    "flash-attn": Foreign(OWN_KERNELS),
    "hf-file": Foreign("download the file and use --model FILE.gguf"),
    "hf-repo": renamed("model"),
    "jinja": always("the template of the checkpoint is always used"),
    "metrics": always("/metrics is always there"),
    "mlock": Foreign("the server locks no memory; leave the flag out", switch=True),
    "mmproj": Foreign("encoders are read from the model's folder; leave the flag out"),
    "n-gpu-layers": Foreign("all layers run on one device; --device cpu or cuda chooses"),
    "n-predict": Foreign(
        "use max_tokens in a request, or --override-generation-config '{\"max_new_tokens\": N}'", ("-1",)
    ),
    "no-mmap": Foreign("shards stream to the device; leave the flag out", switch=True),
    "no-webui": Foreign("use --disable-playground", switch=True),
    "parallel": renamed("max-num-seqs"),
    "reranking": Foreign("use --runner pooling", switch=True),
    "temp": Foreign("""use --override-generation-config '{"temperature": ...}'"""),
    "threads": renamed("num-threads"),
    "threads-batch": renamed("num-threads"),
    "ubatch-size": renamed("max-num-batched-tokens"),
    "verbose": Foreign("use --log-level debug", switch=True),
}
# Values of our own flags that only other servers have, by flag and value.
PICKLES = Meant("pickles are never read; serve safetensors")
READ_ANYWAY = Meant("the format is read from the files", "auto")
ONE_LIBRARY = Meant("one library compiles all grammars", "auto")
VALUES = {
    "dtype": {"half": Meant("use float16", "float16"), "float": Meant("use float32", "float32")},
    "endpoint": {
        "/v1/chat/completions": Meant("use chat", "chat"),
        "/v1/completions": Meant("use completions", "completions"),
    },
    "kv-cache-dtype": {
        "bf16": Meant("use bfloat16", "bfloat16"),
        "float16": Meant("16-bit values are bfloat16; use auto or bfloat16"),
        "fp8_inc": Meant("use fp8"),
    },
    "load-format": {
        **dict.fromkeys(("bitsandbytes", "gguf", "mistral", "fastsafetensors", "hf", "runai_streamer"), READ_ANYWAY),
        **dict.fromkeys(("pt", "npcache"), PICKLES),
    },
    "max-model-len": {"-1": Meant("use auto", "auto")},
    "model-impl": {"vllm": Meant("use native", "native")},
    "request-rate": {"inf": Meant("use 0 for all requests at once", "0")},
    "structured-outputs-backend": dict.fromkeys(
        ("guidance", "lm-format-enforcer", "outlines", "xgrammar"), ONE_LIBRARY
    ),
    "tokenizer-mode": {"slow": Meant("use hf, which reads tokenizer.json with its own library")},
}
SHORT = {
    "O": "optimization-level",
    "ac": "attention-config",
    "asc": "api-server-count",
    "b": "batch-size",
    "c": "ctx-size",
    "cb": "cont-batching",
    "cc": "compilation-config",
    "ctk": "cache-type-k",
    "ctv": "cache-type-v",
    "dcp": "decode-context-parallel-size",
    "dp": "data-parallel-size",
    "fa": "flash-attn",
    "hf": "hf-repo",
    "m": "model-path",
    "n": "n-predict",
    "ngl": "n-gpu-layers",
    "np": "parallel",
    "pcp": "prefill-context-parallel-size",
    "pp": "pipeline-parallel-size",
    "q": "quantization",
    "sc": "speculative-config",
    "t": "threads",
    "tp": "tensor-parallel-size",
    "ub": "ubatch-size",
}


def long_name(word: str) -> str:
    """The long form of a word that began with one dash: `tp=2` is `tensor-parallel-size=2`."""
    if word[0] == "O" and word[1:].isdigit():
        return f"optimization-level={word[1:]}"
    name = re.split(r"[.=]", word, maxsplit=1)[0]
    return SHORT.get(name, name) + word[len(name) :]


def meant(name: str, text: str) -> Meant | None:
    """The meaning of a value of our own flag, if only other servers have this value."""
    return VALUES.get(name, {}).get(text)


def foreign(name: str, others: Mapping[str, Foreign] = FOREIGN) -> Foreign | None:
    """The flag's entry. The opposite of a switch has an entry too, with the opposite effect."""
    found = others.get(name)
    if found is None and name.startswith("no-") and (found := others.get(name[3:])) is not None:
        return Foreign(found.advice, () if found.holds else ("",), switch=True) if found.switch else None
    return found
