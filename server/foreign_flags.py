"""Flags of vLLM, SGLang and llama.cpp that this server does not have: what to say to whoever types them.

A flag that asks for what holds here anyway (`--tensor-parallel-size 1`) is taken with a line that says so; any other is
refused with the flag or the way that does the same here. Owner: the command line.
Source of the names: the lists of flags in the three projects' documentation.
"""

from __future__ import annotations

from typing import NamedTuple


class Foreign(NamedTuple):
    """One flag: what holds here, and which values ask for just that ("" is the flag without a value)."""

    advice: str
    holds: tuple[str, ...] = ()
    switch: bool = False  # takes no value


ONE_DEVICE = "one process drives one device; start a server for each device behind a router (examples/deploy)"
NO_ADAPTERS = "adapters are not served; merge the adapter into the checkpoint (peft: merge_and_unload) and serve that"
OWN_KERNELS = "the attention kernels are this server's own; leave the flag out"
NO_CODE = "no code of a request or a model folder runs here; leave the flag out"
NO_DRAFTS = "draft tokens are not supported; leave the flag out"
NO_TRANSFER = "cached blocks stay in this process; leave the flag out"


def renamed(name: str) -> Foreign:
    return Foreign(f"is called --{name} here")


def always(advice: str) -> Foreign:
    """A switch that asks for what holds here anyway."""
    return Foreign(advice, ("",), switch=True)


FOREIGN = {
    # vLLM
    "api-server-count": Foreign("one process speaks HTTP", ("1",)),
    "async-scheduling": always("the next step is always planned while one runs"),
    "attention-backend": Foreign(OWN_KERNELS),
    "calculate-kv-scales": always("scales of an FP8 cache come from the checkpoint or are made per token and head"),
    "code-revision": Foreign(NO_CODE),
    "collect-detailed-traces": Foreign("use --trace FILE, or POST /start_profile"),
    "compilation-config": Foreign("steps are captured in graphs; --cudagraph-capture-sizes and --enforce-eager choose"),
    "convert": Foreign("heads come from the checkpoint; use --runner pooling", ("auto", "none")),
    "cpu-offload-gb": Foreign("all weights lie on the device", ("0",)),
    "cuda-graph-sizes": renamed("cudagraph-capture-sizes"),
    "data-parallel-size": Foreign(ONE_DEVICE, ("1",)),
    "disable-cascade-attn": always("there is no cascade attention"),
    "disable-custom-all-reduce": always("one device needs no reduction"),
    "disable-fastapi-docs": Foreign("is called --disable-docs here", switch=True),
    "disable-frontend-multiprocessing": always("HTTP and the device share one process"),
    "disable-log-requests": always("requests are logged only with --enable-log-requests"),
    "disable-mm-preprocessor-cache": Foreign("use --mm-processor-cache-gb 0", switch=True),
    "disable-sliding-window": Foreign("use --max-model-len of at most the window", switch=True),
    "disable-uvicorn-access-log": Foreign("is called --disable-access-log here", switch=True),
    "distributed-executor-backend": Foreign(f"{ONE_DEVICE}; Ray: examples/deploy/ray", ("mp", "uni")),
    "enable-chunked-prefill": always("prompts are always cut to fit a step; --max-prefill-chunk bounds a row's part"),
    "enable-expert-parallel": always("one device holds all experts"),
    "enable-lora": Foreign(NO_ADAPTERS, switch=True),
    "enable-prompt-tokens-details": always("usage always has prompt_tokens_details"),
    "enable-reasoning": always("thinking is always kept apart where the template has it"),
    "enable-request-id-headers": always("every answer has X-Request-Id"),
    "enable-server-load-tracking": Foreign("read running and waiting requests from /metrics", switch=True),
    "enable-sleep-mode": Foreign("a server that must give its memory back is stopped; leave the flag out", switch=True),
    "enable-tokenizer-info-endpoint": Foreign("leave the flag out; /tokenize and /detokenize are there", switch=True),
    "guided-decoding-backend": renamed("structured-outputs-backend"),
    "h11-max-header-count": renamed("max-headers"),
    "h11-max-incomplete-event-size": renamed("max-header-bytes"),
    "kv-cache-memory": renamed("kv-cache-memory-bytes"),
    "kv-transfer-config": Foreign(NO_TRANSFER),
    "log-config-file": Foreign("use --log-level and --log-format"),
    "logits-processor-pattern": Foreign(NO_CODE),
    "logits-processors": Foreign(NO_CODE),
    "lora-modules": Foreign(NO_ADAPTERS),
    "max-lora-rank": Foreign(NO_ADAPTERS),
    "max-loras": Foreign(NO_ADAPTERS),
    "max-num-partial-prefills": Foreign("all prompts of a step share its tokens; use --max-prefill-chunk"),
    "max-parallel-loading-workers": Foreign("the number follows from the cores; leave the flag out"),
    "max-seq-len-to-capture": Foreign("graphs hold any context; --cudagraph-capture-sizes lists their rows"),
    "middleware": Foreign("host the app in your own server and wrap it there (server/hosted.py)"),
    "mm-encoder-tp-mode": Foreign("one device runs the towers", ("data", "weights")),
    "model-loader-extra-config": Foreign("the loader has no settings of that kind", ("{}",)),
    "num-scheduler-steps": Foreign("the next step is always planned while one runs", ("1",)),
    "pipeline-parallel-size": Foreign(ONE_DEVICE, ("1",)),
    "preemption-mode": Foreign("a preempted request is computed again", ("recompute",)),
    "rope-scaling": Foreign("""use --hf-overrides '{"rope_scaling": {...}}'"""),
    "rope-theta": Foreign("""use --hf-overrides '{"rope_theta": ...}'"""),
    "safetensors-load-strategy": Foreign("shards stream to the device as they are read", ("lazy", "auto")),
    "show-hidden-metrics-for-version": Foreign("no metric is hidden; leave the flag out"),
    "skip-mm-profiling": always("memory of towers is planned, not tried"),
    "speculative-config": Foreign(NO_DRAFTS),
    "speculative-model": Foreign(NO_DRAFTS),
    "structured-outputs-config": Foreign("use --structured-outputs-backend; whitespace follows the grammar"),
    "swap-space": Foreign("nothing is swapped: a preempted request is computed again", ("0", "4")),
    "task": Foreign("use --runner generate or --runner pooling", ("auto", "generate")),
    "tensor-parallel-size": Foreign(ONE_DEVICE, ("1",)),
    "tokenizer-revision": Foreign("use --revision, or --tokenizer with a folder"),
    "uvicorn-log-level": renamed("log-level"),
    # SGLang
    "chunked-prefill-size": renamed("max-num-batched-tokens"),
    "context-length": renamed("max-model-len"),
    "disable-cuda-graph": Foreign("is called --enforce-eager here", switch=True),
    "disable-radix-cache": Foreign("is called --no-enable-prefix-caching here", switch=True),
    "dp-size": Foreign(ONE_DEVICE, ("1",)),
    "enable-metrics": always("/metrics is always there"),
    "grammar-backend": renamed("structured-outputs-backend"),
    "max-running-requests": renamed("max-num-seqs"),
    "mem-fraction-static": renamed("gpu-memory-utilization"),
    "model-path": renamed("model"),
    "tokenizer-path": renamed("tokenizer"),
    "tp-size": Foreign(ONE_DEVICE, ("1",)),
    # llama.cpp
    "alias": renamed("served-model-name"),
    "ctx-size": renamed("max-model-len"),
    "flash-attn": Foreign(OWN_KERNELS),
    "hf-repo": renamed("model"),
    "jinja": always("the checkpoint's template is always used"),
    "n-gpu-layers": Foreign("all layers run on one device; --device cpu or cuda chooses"),
    "no-webui": Foreign("is called --disable-playground here", switch=True),
    "parallel": renamed("max-num-seqs"),
    "threads": renamed("num-threads"),
}
SHORT = {
    "asc": "api-server-count",
    "c": "ctx-size",
    "dp": "data-parallel-size",
    "hf": "hf-repo",
    "m": "model-path",
    "ngl": "n-gpu-layers",
    "np": "parallel",
    "pp": "pipeline-parallel-size",
    "q": "quantization",
    "t": "threads",
    "tp": "tensor-parallel-size",
}


def foreign(name: str) -> Foreign | None:
    """The flag's entry; the opposite of a switch has one too, which no value fits."""
    found = FOREIGN.get(name)
    if found is None and name.startswith("no-") and (found := FOREIGN.get(name[3:])) is not None:
        return Foreign(found.advice, switch=True) if found.switch else None
    return found
