#!/usr/bin/env bash
# Drives a running server with the client of a peer: vLLM's `vllm bench serve` or SGLang's `sglang.bench_serving`, whichever
# is installed here. The server is ours or any other that speaks the OpenAI API; a comparison runs this script against both.
#
#   tests/bench/peer_client.sh URL MODEL TOKENIZER [STREAMS ...]      e.g. http://127.0.0.1:8000 qwen3-8b /models/qwen3-8b 1 16 64
#
# 512 random tokens in and 128 out, greedy, end tokens ignored, STREAMS requests open at a time, at least 1,000 answers and
# no fewer than four rounds of STREAMS; the first 2 x STREAMS requests warm the server up. INPUT, OUTPUT and OUT (a folder for
# JSON) are read from the environment. IMAGE=1024x1024 sends a random picture beside 128 words and asks for 64 tokens (vLLM only).
set -euo pipefail
[ $# -ge 3 ] || { sed -n '2,9p' "$0" >&2; exit 2; }
url=$1 model=$2 tokenizer=$3
shift 3
[ $# -gt 0 ] || set -- 1 16 64 256
input=${INPUT:-512} output=${OUTPUT:-128} out=${OUT:-.} image=${IMAGE:-}
mkdir -p "$out"

vllm_client() {  # streams, requests
    local about=(--dataset-name random --random-input-len "$input" --random-output-len "$output" --backend openai
                 --endpoint /v1/completions)
    if [ -n "$image" ]; then
        about=(--dataset-name random-mm --random-input-len 128 --random-output-len 64 --backend openai-chat
               --endpoint /v1/chat/completions --random-mm-base-items-per-request 1
               --random-mm-limit-mm-per-prompt '{"image": 1, "video": 0}'
               --random-mm-bucket-config "{(${image%x*}, ${image#*x}, 1): 1.0}")
    fi
    vllm bench serve --base-url "$url" --model "$model" --tokenizer "$tokenizer" "${about[@]}" --ignore-eos --temperature 0 \
        --max-concurrency "$1" --num-prompts "$2" --num-warmups $((2 * $1)) --percentile-metrics ttft,tpot,itl,e2el \
        --metric-percentiles 50,99 --save-result --result-dir "$out" --result-filename "vllm_client_$1.json"
}

sglang_client() {
    [ -z "$image" ] || { echo "IMAGE=$image: SGLang's client is driven with text only here; install vLLM for pictures" >&2; exit 2; }
    python3 -m sglang.bench_serving --backend vllm --base-url "$url" --model "$model" --tokenizer "$tokenizer" \
        --dataset-name random --random-input-len "$input" --random-output-len "$output" --random-range-ratio 1.0 \
        --max-concurrency "$1" --num-prompts "$2" --warmup-requests $((2 * $1)) \
        --extra-request-body '{"temperature": 0, "ignore_eos": true}' --output-file "$out/sglang_client_$1.jsonl"
}

if command -v vllm >/dev/null; then
    client=vllm_client
elif python3 -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("sglang") is None)'; then
    client=sglang_client
else
    echo "neither vllm nor sglang is installed here: pip install one of them, or run where it is" >&2
    exit 1
fi
for streams in "$@"; do
    requests=$((4 * streams > 1000 ? 4 * streams : 1000))
    "$client" "$streams" "$requests"
done
