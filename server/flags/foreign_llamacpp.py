"""llama.cpp's flags that this server does not have. The entries' forms are those of server/flags/foreign."""

from __future__ import annotations

from server.flags.foreign import (
    DRAFTER,
    NUM_DRAFTS,
    ONE_DEVICE,
    Foreign,
    always,
    drafted_by,
    hint,
    passed_over,
    switch,
    taken,
)

ON_DEVICE = "all weights are on the device; leave the flag out"
CACHED_AS = {"f16": "auto", "bf16": "bfloat16"}
CACHE_TYPE = taken("kv-cache-dtype", CACHED_AS, "use --kv-cache-dtype auto, bfloat16 or fp8")
IN_REQUEST = "send structured_outputs.grammar in a request; leave the flag out"

LLAMACPP = {
    # Taken as ours.
    "alias": taken("served-model-name"),
    "api-prefix": taken("root-path"),
    "cache-type-k": CACHE_TYPE,
    "cache-type-v": CACHE_TYPE,
    "chat-template-file": taken("chat-template"),
    "chat-template-kwargs": taken("default-chat-template-kwargs"),
    "ctx-size": taken("max-model-len"),
    "embedding": switch("runner=pooling"),
    "embeddings": switch("runner=pooling"),
    "frequency-penalty": taken("override-generation-config.frequency_penalty"),
    "hf-repo": taken("model"),
    "log-disable": switch("disable-access-log"),
    "min-p": taken("override-generation-config.min_p"),
    "n-gpu-layers": Foreign(
        "all layers run on one device; --device cpu or cuda chooses",
        anything=True,
        as_="device",
        values={"0": "cpu"},
        only=True,
    ),
    "n-predict": taken("override-generation-config.max_new_tokens")._replace(holds=("-1",)),
    "no-cache-prompt": switch("no-enable-prefix-caching"),
    "no-mmproj": switch("language-model-only"),
    "no-webui": switch("disable-playground"),
    "parallel": Foreign("taken as --max-num-seqs", as_="max-num-seqs", values={"-1": "0"}),
    "pooling": taken(
        "pooler-config.pooling_type",
        {"cls": "CLS", "last": "LAST", "mean": "MEAN"},
        "use --pooler-config with the pooling_type CLS, LAST or MEAN",
    ),
    "presence-penalty": taken("override-generation-config.presence_penalty"),
    "reasoning-budget": taken(
        "default-chat-template-kwargs.enable_thinking", {"0": "false"}, "send thinking_token_budget in a request"
    )._replace(holds=("-1",)),
    "reasoning-format": taken("reasoning-parser", {"none": "none"}, "use --reasoning-parser auto or none")._replace(
        holds=("auto", "deepseek")
    ),
    "repeat-penalty": taken("override-generation-config.repetition_penalty"),
    "reranking": switch("runner=pooling"),
    **dict.fromkeys(("draft", "draft-max", "draft-n", "spec-draft-n-max"), NUM_DRAFTS),
    **dict.fromkeys(("hf-repo-draft", "model-draft", "spec-draft-hf", "spec-draft-model"), DRAFTER),
    "spec-type": drafted_by(
        {
            "draft-eagle3": "eagle3",
            "draft-mtp": "mtp",
            "draft-simple": "draft_model",
            **dict.fromkeys(("ngram-cache", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-simple"), "ngram"),
        },
        "spec-type",
    )._replace(holds=("none",)),
    "ssl-cert-file": taken("ssl-certfile"),
    "ssl-key-file": taken("ssl-keyfile"),
    "temp": taken("override-generation-config.temperature"),
    "threads": Foreign("taken as --num-threads", as_="num-threads", values={"-1": "0"}),
    "top-k": taken("override-generation-config.top_k"),
    "top-p": taken("override-generation-config.top_p"),
    "ubatch-size": taken("max-num-batched-tokens"),
    "verbose": switch("log-level=debug"),
    # Hints about speed, and what always holds.
    "batch-size": passed_over("--max-num-batched-tokens has the tokens of a step"),
    "cache-prompt": always("prefixes of prompts are always cached"),
    "cache-ram": passed_over("prompts are cached in blocks of the device: --kv-cache-memory-bytes"),
    "cache-reuse": passed_over("equal beginnings of prompts are always found"),
    "cont-batching": always("batching is always continuous"),
    "defrag-thold": passed_over("blocks of the cache need no order"),
    "fit": passed_over("sizes follow from the free memory; omniloop check prints them"),
    "flash-attn": hint("kernels are the server's own, chosen at start"),
    "jinja": always("the template of the checkpoint is always used"),
    "kv-unified": hint("requests share one pool of blocks"),
    "metrics": always("/metrics is always there"),
    "mlock": hint("weights are on the device"),
    "mmap": hint("shards stream to the device"),
    "no-context-shift": always("a context is never shifted"),
    "no-mmap": hint("shards stream to the device"),
    "no-warmup": hint("the start always measures the largest step"),
    "prio": passed_over("nice before the command sets its priority"),
    "slots": always("/load and /metrics count the requests that run"),
    "split-mode": passed_over("--tensor-parallel-size splits every layer"),
    "swa-full": hint("layers with a window cache only their window"),
    "threads-batch": passed_over("--num-threads counts for prompts and answers"),
    "threads-http": passed_over("one loop serves all connections"),
    "timeout": passed_over("each wait has a flag of its own, such as --request-timeout"),
    "warmup": hint("the start always measures the largest step"),
    "webui": always("the chat page is at /"),
    # Features that are absent.
    **dict.fromkeys(
        ("draft-min", "spec-draft-n-min"), Foreign("a request has as many drafts as there is room for", ("0",))
    ),
    **dict.fromkeys(
        ("draft-p-min", "spec-draft-p-min"), Foreign("drafts are made whatever their probability", ("0", "0.0"))
    ),
    **dict.fromkeys(
        ("lora", "lora-scaled"),
        Foreign("adapters are folders of PEFT, not GGUF files: use --enable-lora --lora-modules NAME=FOLDER"),
    ),
    **dict.fromkeys(("grammar", "grammar-file"), Foreign(IN_REQUEST)),
    "context-shift": Foreign("a context is never shifted; leave the flag out", switch=True),
    "cpu-moe": Foreign(ON_DEVICE, switch=True),
    "hf-file": Foreign("use --model ORG/NAME:QUANT, or download the file and use --model FILE.gguf"),
    "main-gpu": Foreign("set CUDA_VISIBLE_DEVICES; leave the flag out", ("0",)),
    "mmproj": Foreign("encoders are read from the model's folder; leave the flag out"),
    "models-dir": Foreign("a server has one model; start a server for each"),
    "n-cpu-moe": Foreign(ON_DEVICE, ("0",)),
    "override-tensor": Foreign(ON_DEVICE),
    "props": Foreign("settings cannot be changed over HTTP; leave the flag out", switch=True),
    "tensor-split": Foreign(ONE_DEVICE, ("1",)),
}
