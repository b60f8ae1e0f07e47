"""SGLang's flags that this server does not have. The entries' forms are those of server/flags/foreign."""

from __future__ import annotations

from server.flags.foreign import (
    NO_DRAFTS,
    NO_OFFLOAD,
    NO_TRANSFER,
    ONE_DEVICE,
    SHARED_POOL,
    Foreign,
    always,
    hint,
    passed_over,
    switch,
    taken,
)

SGLANG = {
    "mamba-scheduler-strategy": Foreign("use --mamba-cache-mode", ("auto",)),
    "mamba-ssm-dtype": taken("mamba-ssm-cache-dtype"),
    "mamba-track-interval": passed_over("an answer leaves a state in the prefix cache every 256 tokens"),
    **dict.fromkeys(("mamba-full-memory-ratio", "max-mamba-cache-size"), Foreign(SHARED_POOL)),
    "dp": Foreign(ONE_DEVICE, ("1",)),
    "dp-size": Foreign(ONE_DEVICE, ("1",)),
    "enable-metrics": always("/metrics is always there"),
    "enable-mixed-chunk": always("prompts and decoding requests always share steps"),
    "enable-multimodal": always("encoders of the checkpoint are always built; --language-model-only leaves them out"),
    "tp": taken("tensor-parallel-size"),
    "tp-size": taken("tensor-parallel-size"),
    "attn-cp-size": Foreign(ONE_DEVICE, ("1",)),
    "dist-init-addr": Foreign(ONE_DEVICE),
    "ep": Foreign(ONE_DEVICE, ("1",)),
    "ep-size": Foreign(ONE_DEVICE, ("1",)),
    "moe-a2a-backend": Foreign(ONE_DEVICE, ("none",)),
    "moe-dp-size": Foreign(ONE_DEVICE, ("1",)),
    "pp-size": Foreign(ONE_DEVICE, ("1",)),
    "base-gpu-id": Foreign("set CUDA_VISIBLE_DEVICES; leave the flag out", ("0",)),
    "enable-dp-attention": hint("one device has nothing to divide"),
    "enable-flashinfer-allreduce-fusion": hint("one device has nothing to reduce"),
    "enable-p2p-check": hint("one device has no peers"),
    # Taken as ours.
    "chunked-prefill-size": taken("max-num-batched-tokens"),
    "context-length": taken("max-model-len"),
    "cuda-graph-bs": taken("cudagraph-capture-sizes"),
    "disable-cuda-graph": switch("enforce-eager"),
    "disable-radix-cache": switch("no-enable-prefix-caching"),
    "grammar-backend": taken("structured-outputs-backend"),
    "is-embedding": switch("runner=pooling"),
    "json-model-override-args": taken("hf-overrides"),
    "log-requests": switch("enable-log-requests"),
    "max-running-requests": taken("max-num-seqs"),
    "mem-fraction-static": taken("gpu-memory-utilization"),
    "model-path": taken("model"),
    "page-size": taken("block-size"),
    "preferred-sampling-params": taken("override-generation-config"),
    "random-seed": taken("seed"),
    "tokenizer-path": taken("tokenizer"),
    "watchdog-timeout": taken("step-timeout"),
    # Hints about speed.
    **dict.fromkeys(
        (
            "decode-attention-backend",
            "fp4-gemm-backend",
            "fp8-gemm-backend",
            "mm-attention-backend",
            "moe-runner-backend",
            "prefill-attention-backend",
            "sampling-backend",
        ),
        passed_over("kernels are the server's own, chosen at start"),
    ),
    "cuda-graph-max-bs": passed_over("--cudagraph-capture-sizes lists the sizes of graphs"),
    "disable-cuda-graph-padding": hint("a step runs the graph of the next size"),
    "disable-overlap-schedule": hint("the next step is always planned while one runs"),
    "enable-cache-report": always("usage always has the tokens that the cache held"),
    "enable-torch-compile": hint("steps are captured in graphs"),
    "keep-mm-feature-on-device": hint("rows of media stay on the device"),
    "max-prefill-tokens": passed_over("prompts share the tokens of a step: --max-num-batched-tokens"),
    "numa-node": passed_over("numactl before the command binds it"),
    "schedule-conservativeness": passed_over("a request starts when its prompt fits, and may be preempted"),
    "schedule-policy": passed_over("prefixes are found in any order; --scheduling-policy fcfs or priority"),
    "skip-server-warmup": hint("the start always measures the largest step"),
    "torch-compile-max-bs": passed_over("steps are captured in graphs"),
    # Features that are absent.
    **dict.fromkeys(
        (
            "speculative-algorithm",
            "speculative-draft-model-path",
            "speculative-eagle-topk",
            "speculative-num-draft-tokens",
            "speculative-num-steps",
            "speculative-token-map",
        ),
        Foreign(NO_DRAFTS),
    ),
    "lora-paths": Foreign("use --lora-modules NAME=FOLDER, with --enable-lora"),
    "max-loaded-loras": taken("max-cpu-loras"),
    "max-loras-per-batch": taken("max-loras"),
    **dict.fromkeys(
        ("hicache-ratio", "hicache-size", "hicache-storage-backend", "hicache-write-policy"), Foreign(NO_OFFLOAD)
    ),
    "allow-auto-truncate": Foreign("send truncate_prompt_tokens in a request; leave the flag out", switch=True),
    "disaggregation-mode": Foreign(NO_TRANSFER, ("null",)),
    "enable-hierarchical-cache": Foreign(NO_OFFLOAD, switch=True),
    "enable-memory-saver": Foreign(
        "sleep is not supported: stop the server to free its memory; leave the flag out", switch=True
    ),
    "max-total-tokens": Foreign(
        "use --kv-cache-memory-bytes, or --num-gpu-blocks-override with the blocks of the cache"
    ),
}
