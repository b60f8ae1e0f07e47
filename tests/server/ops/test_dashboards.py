"""/metrics serves dashboards made for vLLM: every selector of their queries finds a series."""

from __future__ import annotations

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

pytestmark = pytest.mark.asyncio(loop_scope="session")

OF_MODEL = '{model_name="omniloop"}'
# Metrics in queries of vLLM's dashboards (overview, performance, queries), without ranges and functions.
NAMES = """
e2e_request_latency_seconds_sum e2e_request_latency_seconds_count e2e_request_latency_seconds_bucket
prompt_tokens_total generation_tokens_total request_success_total
time_to_first_token_seconds_bucket time_to_first_token_seconds_sum time_to_first_token_seconds_count
inter_token_latency_seconds_bucket inter_token_latency_seconds_sum inter_token_latency_seconds_count
request_time_per_output_token_seconds_bucket
num_requests_running num_requests_waiting kv_cache_usage_perc num_preemptions_total
prefix_cache_queries_total prefix_cache_hits_total mm_cache_queries_total mm_cache_hits_total
request_prompt_tokens_bucket request_generation_tokens_bucket request_max_num_generation_tokens_sum
request_queue_time_seconds_sum request_queue_time_seconds_bucket
request_prefill_time_seconds_sum request_prefill_time_seconds_bucket
request_decode_time_seconds_sum request_decode_time_seconds_bucket request_inference_time_seconds_sum
request_params_n_bucket request_params_max_tokens_bucket iteration_tokens_total_bucket
cache_config_info prompt_tokens_cached_total
"""
SELECTORS = [f"vllm:{name}{OF_MODEL}" for name in NAMES.split()]
OWN = "steps_total steps_failed_total steps_in_python_total step_gap_seconds_count"
OWN += " mm_encoder_calls_total mm_encoder_seconds_total mm_encoder_cache_queries_total mm_encoder_cache_hits_total"
OWN += "".join(f" mm_{part}_seconds_bucket" for part in ("fetch", "decode", "prepare", "encode"))
OWN += "".join(f" step_{part}_seconds_bucket" for part in ("schedule", "launch", "wait", "commit", "device"))
SELECTORS += [f"vllm:{name}{OF_MODEL}" for name in OWN.split()]
SELECTORS += [
    'vllm:request_success_total{finished_reason="stop"}',
    'vllm:request_success_total{finished_reason="length",engine="0"}',
    'vllm:request_success_total{finished_reason="abort"}',
    'vllm:time_to_first_token_seconds_bucket{le="0.001"}',
    'vllm:time_to_first_token_seconds_bucket{le="2560.0"}',
    'vllm:inter_token_latency_seconds_bucket{le="80.0"}',
    'vllm:e2e_request_latency_seconds_bucket{le="+Inf"}',
    'vllm:iteration_tokens_total_bucket{le="16384.0"}',
    'vllm:request_params_n_bucket{le="20.0"}',
    'vllm:cache_config_info{block_size="16"}',
    'vllm:kv_cache_usage_perc{engine="0"}',
    'vllm:engine_sleep_state{engine="0",sleep_state="awake"}',
    'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"}',
    'vllm:num_requests_waiting_by_reason{engine="0",reason="deferred"}',
    'http_requests_total{status="2xx",handler="/v1/chat/completions",method="POST"}',
    'http_requests_total{status="5xx"}',
    'http_request_duration_seconds_bucket{handler="/v1/chat/completions",method="POST",le="0.5"}',
    'http_request_duration_seconds_count{handler="/v1/chat/completions"}',
    "process_resident_memory_bytes{}",
    "process_cpu_seconds_total{}",
    "process_start_time_seconds{}",
]


async def scraped(client) -> dict[str, list[tuple[dict[str, str], float]]]:
    text = (await client.get("/metrics")).content.decode()
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


async def test_every_selector_finds_a_series(serve, state):
    client = serve()
    client.state.metrics.model_name = "omniloop"
    client.state.metrics.engine = lambda: state.engine.stats
    client.state.metrics.cache_info = state.metrics.cache_info
    await client.chat(temperature=0)
    await client.chat(stream=True)
    await client.chat(thinking_token_budget=5)  # 501
    found = await scraped(client)
    for selector in SELECTORS:
        name, wanted = selector.split("{", 1)
        labels = dict(re.findall(r'(\w+)="([^"]*)"', wanted))
        assert any(labels.items() <= got.items() for got, _ in found.get(name, [])), selector


async def test_counts_and_sums_match_the_requests(serve):
    client = serve()
    await client.chat(max_tokens=5, n=2)
    await client.complete(["a", "b"], max_tokens=3)
    found = await scraped(client)

    def value(name: str, **labels: str) -> float:
        return sum(number for got, number in found[f"vllm:{name}"] if labels.items() <= got.items())

    assert value("request_success_total", finished_reason="length") == 4
    assert value("request_generation_tokens_sum") == 2 * 5 + 2 * 3
    assert value("request_params_max_tokens_bucket", le="2.0") == 0
    assert value("request_params_max_tokens_bucket", le="5.0") == 4
    assert value("request_params_n_bucket", le="1.0") == 2
    assert value("time_to_first_token_seconds_count") == 2  # once per HTTP request
    assert value("e2e_request_latency_seconds_count") == 4
    assert value("inter_token_latency_seconds_count") == 2 * 4 + 2 * 2
    assert value("request_queue_time_seconds_count") == 4
