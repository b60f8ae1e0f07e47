"""Flags of vLLM's and SGLang's serving benchmarks that `bench serve` does not have, and the advice to users who set
them.

Owner: the command line. The forms are those of server/flags/foreign.
"""

from __future__ import annotations

from server.flags.foreign import Foreign, always, renamed

USAGE = "tokens are counted by usage; leave the flag out"
IN_BODY = "use --extra-body with the field, such as '{\"top_p\": 0.9}'"
RATES = "use --request-rate for the first and --ramp-to for the last rate"
RESULTS = "use --json FILE"

FOREIGN = {
    "backend": Foreign("the API is OpenAI's; --endpoint selects chat or completions", ("openai-chat", "vllm-chat")),
    "base-url": renamed("url"),
    "dataset-name": renamed("dataset"),
    "disable-tqdm": always("there is no progress bar"),
    "header": Foreign("use --api-key; other headers are not supported"),
    "host": Foreign("use --url http://HOST:PORT"),
    "logprobs": Foreign(IN_BODY),
    "lora-modules": Foreign("name one adapter with --model"),
    "metric-percentiles": renamed("percentiles"),
    "output-file": renamed("json"),
    "percentile-metrics": Foreign("the report has the percentiles of all times; leave the flag out"),
    "port": Foreign("use --url http://HOST:PORT"),
    "profile": Foreign("use the server's --enable-dev-endpoints and POST /start_profile", switch=True),
    "ramp-up-end-rps": Foreign(RATES),
    "ramp-up-start-rps": Foreign(RATES),
    "ramp-up-strategy": Foreign(RATES),
    "random-input-len": renamed("input-len"),
    "random-output-len": renamed("output-len"),
    "random-prefix-len": renamed("prefix-len"),
    "random-range-ratio": renamed("range-ratio"),
    "ready-check-timeout-sec": renamed("ready-timeout"),
    "result-dir": Foreign(RESULTS),
    "result-filename": renamed("json"),
    "save-detailed": Foreign("--json FILE holds every request", switch=True),
    "save-result": Foreign(RESULTS, switch=True),
    "served-model-name": renamed("model"),
    "sharegpt-output-len": renamed("output-len"),
    "tokenizer": Foreign(USAGE),
    "tokenizer-mode": Foreign(USAGE),
    "top-k": Foreign(IN_BODY),
    "top-p": Foreign(IN_BODY),
    "trust-remote-code": always("code in a checkpoint never runs"),
}
