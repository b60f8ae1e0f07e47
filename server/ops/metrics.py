"""The content of /metrics: the names, labels and buckets that dashboards made for vLLM expect.

Owner: loop. In: one call per step (StepStats), per end of a stream, per HTTP exchange. Out: Prometheus text at any
time, without waiting for the engine. Histograms are plain arrays (_fast/histogram), because the client library takes a
lock per observation. Labels come from closed sets, so the routes determine the number of series (SECURITY S8).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from _fast.histogram import Histogram
from engine.base.limits import RankMemory
from engine.base.stats import DraftCounts, EncoderCounts, SettledBy, StateCounts
from server.ops.adapter_metrics import AdapterMetrics
from server.ops.draft_metrics import draft_families
from server.ops.logs import lines_dropped
from server.ops.rank_metrics import rank_families

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from engine.base.stats import EngineStats, StepStats
    from engine.step.parts.expert_load import LayerLoad
    from mm.isolation.helpers import HelperCounts
    from mm.report import MediaReport

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})
FINISHED = ("stop", "length", "abort", "error", "repetition")
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
REJECTIONS = ("queue_full", "key_busy", "media_busy")

FIRST_TOKEN = [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80]
FIRST_TOKEN += [160, 640, 2560]
PER_TOKEN = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80]
LATENCY = [0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680]
ITERATION = [2**k for k in range(15)]
CHOICES = [1, 2, 5, 10, 20]
PART = [5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1]
PARTS = ("schedule", "launch", "wait", "commit", "device")  # parts of a step, named as in StepStats
GAP = [5e-6, 1e-5, 2e-5, 3e-5, 5e-5, 1e-4, 2e-4, 5e-4, 0.001, 0.01, 0.1]
RECOVERY = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60]  # failed step to a good one
MEDIA = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60]
MEDIA_PARTS = ("fetch", "decode", "prepare")  # parts of loading a request's media, named as in MediaReport
HTTP = [0.005, 0.025, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60]
HISTOGRAMS = {  # help texts
    "time_to_first_token_seconds": "Seconds from the request to the first token.",
    "inter_token_latency_seconds": "Seconds per token between two steps of a stream.",
    "request_time_per_output_token_seconds": "Mean seconds per output token of a choice, after the first.",
    "e2e_request_latency_seconds": "Seconds from the request to its end.",
    "request_queue_time_seconds": "Seconds that a request waited for room.",
    "request_inference_time_seconds": "Seconds from the request to the last token of a choice.",
    "request_prefill_time_seconds": "Seconds from the request to the first token of a choice.",
    "request_decode_time_seconds": "Seconds from the first to the last token of a choice.",
    "request_prompt_tokens": "Prompt tokens of a request.",
    "request_generation_tokens": "Generated tokens of a choice.",
    "request_params_max_tokens": "max_tokens of a request.",
    "request_max_num_generation_tokens": "Generated tokens of a choice.",
    "request_params_n": "n of a request.",
    "iteration_tokens_total": "Tokens of a step.",
    "step_gap_seconds": "Idle seconds of the device between two steps; one step in 64, on accelerators.",
    "step_schedule_seconds": "Seconds to plan a step.",
    "step_launch_seconds": "Seconds to launch a step.",
    "step_wait_seconds": "Seconds that the host waited for a step.",
    "step_commit_seconds": "Seconds to record the tokens of a step.",
    "step_device_seconds": "Seconds of a step on the device.",
    "recovery_seconds": "Seconds from a failed step to the next one that produced a token.",
    "mm_fetch_seconds": "Seconds to fetch the media of a request.",
    "mm_decode_seconds": "Seconds to decode the media of a request.",
    "mm_prepare_seconds": "Seconds to prepare the media of a request for the encoder.",
    "mm_encode_seconds": "Seconds in the encoder for media that no request sent before.",
}


def one_two_five(limit: int) -> list[float]:
    """The buckets 1, 2, 5, 10 ... up to `limit`."""
    found: list[float] = []
    scale = 1
    while scale <= limit:
        found += [scale * step for step in (1, 2, 5) if scale * step <= limit]
        scale *= 10
    return found


class Metrics:
    """All series of one server. Owner: loop."""

    def __init__(self, max_series: int = 5000) -> None:
        self.model_name = ""
        self.engine: Callable[[], EngineStats | None] = lambda: None
        self.cache_info: dict[str, str] = {}
        self.max_series = max_series
        self.finished = dict.fromkeys(FINISHED, 0)
        self.rejections = dict.fromkeys(REJECTIONS, 0)
        self.relaxed: dict[str, int] = {}  # keyword -> number of tool schemas in which it is not enforced
        self.http_count: dict[tuple[str, str, str], int] = {}
        self.http_seconds: dict[tuple[str, str], Histogram] = {}  # key: (method, handler)
        self.mm_cache: Callable[[], tuple[int, int]] = lambda: (0, 0)  # queries, hits
        self.helpers: Callable[[], HelperCounts] | None = None  # set if separate processes decode media
        self.experts: Callable[[], list[LayerLoad]] = list  # loads of sampled steps, by layer
        self.failed_at = 0.0  # time of a failed step without a good step after it
        self.others: list[Callable[[], Iterator[Metric]]] = []  # more families: of memory and batches
        self.adapters: AdapterMetrics | None = None  # with --enable-lora
        self.resize(1 << 17)

    def relax(self, keywords: Sequence[str]) -> None:
        """Count keywords of tools' schemas that a grammar does not enforce; they come from a fixed table."""
        for keyword in keywords:
            self.relaxed[keyword] = self.relaxed.get(keyword, 0) + 1

    def resize(self, max_model_len: int) -> None:
        """Make the histograms, once the model is known: buckets of tokens reach its context length."""
        tokens = one_two_five(max_model_len)
        self.histograms = {
            "time_to_first_token_seconds": Histogram(FIRST_TOKEN),
            "inter_token_latency_seconds": Histogram(PER_TOKEN),
            "request_time_per_output_token_seconds": Histogram(PER_TOKEN),
            "e2e_request_latency_seconds": Histogram(LATENCY),
            "request_queue_time_seconds": Histogram(LATENCY),
            "request_inference_time_seconds": Histogram(LATENCY),
            "request_prefill_time_seconds": Histogram(LATENCY),
            "request_decode_time_seconds": Histogram(LATENCY),
            "request_prompt_tokens": Histogram(tokens),
            "request_generation_tokens": Histogram(tokens),
            "request_params_max_tokens": Histogram(tokens),
            "request_max_num_generation_tokens": Histogram(tokens),
            "request_params_n": Histogram(CHOICES),
            "iteration_tokens_total": Histogram(ITERATION),
            "step_gap_seconds": Histogram(GAP),
            "recovery_seconds": Histogram(RECOVERY),
            **{f"step_{part}_seconds": Histogram(PART) for part in PARTS},
            **{f"mm_{part}_seconds": Histogram(MEDIA) for part in (*MEDIA_PARTS, "encode")},
        }
        self.observe_parts = [self.histograms[f"step_{part}_seconds"].observe for part in PARTS]
        self.gaps = self.histograms["inter_token_latency_seconds"]

    def step(self, stats: StepStats) -> None:
        """Count a step. On an accelerator, the idle time before it is measured for one step in 64."""
        self.histograms["iteration_tokens_total"].observe(stats.num_tokens)
        parts = (stats.schedule_s, stats.launch_s, stats.wait_s, stats.commit_s, stats.device_s)
        for observe, seconds in zip(self.observe_parts, parts):
            observe(seconds)
        if self.failed_at or stats.settled == SettledBy.FAILED:
            self._recovery(stats)
        if stats.gap_s:
            self.histograms["step_gap_seconds"].observe(stats.gap_s)

    def _recovery(self, stats: StepStats) -> None:
        """Measure the time from a failed step until a step produces a token again."""
        if stats.failed:
            self.failed_at = self.failed_at or time.monotonic()
        elif stats.num_sampled:
            self.histograms["recovery_seconds"].observe(time.monotonic() - self.failed_at)
            self.failed_at = 0.0

    def media(self, report: MediaReport) -> None:
        """Count a prompt's media. A time of 0 is not counted: the item was cached, or came with the request."""
        for part in MEDIA_PARTS:
            seconds = getattr(report, f"{part}_s")
            if seconds:
                self.histograms[f"mm_{part}_seconds"].observe(seconds)

    def http(self, method: str, status: int, route: str, seconds: float) -> None:
        """Count an exchange; `route` is a template, never a path. Dashboards expect status classes: 2xx, 5xx."""
        key = (method if method in METHODS else "other", f"{status // 100}xx", route)
        if key not in self.http_count and len(self.http_count) >= self.max_series:
            key = ("other", "other", "other")
        self.http_count[key] = self.http_count.get(key, 0) + 1
        place = (key[0], key[2])
        if place not in self.http_seconds:
            self.http_seconds[place] = Histogram(HTTP)
        self.http_seconds[place].observe(seconds)

    def observe(self, name: str, value: float) -> None:
        self.histograms[name].observe(value)

    def collect(self) -> Iterator[Metric]:
        """The collector interface of prometheus_client."""
        from prometheus_client.core import CounterMetricFamily

        yield from self._engine_families()
        yield from self._expert_families()
        yield from self._request_families()
        yield from self._http_families()
        if self.helpers is not None:
            yield from helper_families(self.helpers())
        if self.adapters is not None:
            yield from self.adapters.families()
        for families in self.others:
            yield from families()
        dropped = CounterMetricFamily("log_lines_dropped", "Lines of the log that nothing read in time.")
        dropped.add_metric([], lines_dropped())
        yield dropped

    def _engine_families(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        stats = self.engine()
        names, values = ["model_name", "engine"], [self.model_name, "0"]
        gauges = {
            "num_requests_running": ("Requests that run.", stats.running if stats else 0),
            "num_requests_waiting": ("Requests that wait for room.", stats.waiting if stats else 0),
            "kv_cache_usage_perc": (
                "Share of the cache of keys and values in use, 0 to 1.",
                stats.kv_usage if stats else 0.0,
            ),
        }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=names)
            gauge.add_metric(values, value)
            yield gauge
        reasons = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason", "Waiting requests by reason.", labels=[*names, "reason"]
        )
        reasons.add_metric([*values, "capacity"], stats.waiting if stats else 0)
        reasons.add_metric([*values, "deferred"], 0)  # here requests wait only for capacity
        yield reasons
        sleep = GaugeMetricFamily(
            "vllm:engine_sleep_state", "1 for the current sleep state.", labels=[*names, "sleep_state"]
        )
        for state in SLEEP_STATES:
            sleep.add_metric([*values, state], float(state == "awake"))  # this engine has no sleep state
        yield sleep
        queries, hits = self.mm_cache()
        encoder = stats.encoder if stats else EncoderCounts()
        counters = {
            "prompt_tokens": ("Prompt tokens of started requests.", stats.prompt_tokens if stats else 0),
            "prompt_tokens_cached": ("Prompt tokens found in the prefix cache.", stats.cached_tokens if stats else 0),
            "generation_tokens": ("Tokens generated.", stats.generation_tokens if stats else 0),
            "steps": ("Steps of the engine.", stats.steps if stats else 0),
            "steps_failed": ("Steps that failed.", stats.failed_steps if stats else 0),
            "steps_in_python": ("Steps that ran Python code.", stats.python_steps if stats else 0),
            "num_preemptions": ("Requests whose blocks were freed to make room.", stats.preemptions if stats else 0),
            "prefix_cache_queries": ("Tokens looked up in the prefix cache.", stats.prefix_queries if stats else 0),
            "prefix_cache_hits": ("Tokens found in the prefix cache.", stats.prefix_hits if stats else 0),
            "mm_cache_queries": ("Media items looked up in the processor cache.", queries),
            "mm_cache_hits": ("Media items found in the processor cache.", hits),
            "mm_encoder_calls": ("Runs of encoders of images, audio and video.", encoder.calls),
            "mm_encoder_seconds": ("Seconds in encoders, by the clock of the device.", encoder.seconds),
            "mm_encoder_cache_queries": ("Media items looked up in the encoder cache.", encoder.queries),
            "mm_encoder_cache_hits": ("Media items found in the encoder cache.", encoder.hits),
        }
        for name, (text, value) in counters.items():
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=names)
            counter.add_metric(values, value)
            yield counter
        yield from self._state_families(stats.states if stats else StateCounts())
        yield from draft_families(stats.drafts if stats else DraftCounts(), self.model_name)
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "Settings of the cache, as labels.", labels=[*names, *self.cache_info]
        )
        info.add_metric([*values, *self.cache_info.values()], 1)
        yield info

    def _state_families(self, states: StateCounts) -> Iterator[Metric]:
        """Zeros where no layer has a state."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        names, values = ["model_name", "engine"], [self.model_name, "0"]
        gauges = {
            "state_checkpoints": ("States of recurrent layers that prefixes are found by.", states.named),
            "state_runs_in_use": ("Runs of blocks that requests hold: states and newest inputs.", states.runs_used),
        }
        counters = {
            "state_checkpoints_stored": ("States stored in the prefix cache.", states.stored),
            "state_checkpoints_hit": ("States found in the prefix cache.", states.hit),
            "state_checkpoints_dropped": ("States evicted, or that found no room.", states.dropped),
            "prefix_cache_attention_hits": (
                "Tokens that keys and values alone would have found in the prefix cache.",
                states.attention_hit_tokens,
            ),
        }
        for kind, families in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, (text, value) in families.items():
                family = kind(f"vllm:{name}", text, labels=names)
                family.add_metric(values, value)
                yield family

    def _expert_families(self) -> Iterator[Metric]:
        from prometheus_client.core import GaugeMetricFamily

        names, values = ["model_name", "engine"], [self.model_name, "0"]
        touched = GaugeMetricFamily(
            "vllm:moe_experts_touched",
            "Different experts that the tokens of a sampled step used.",
            labels=[*names, "layer"],
        )
        largest = GaugeMetricFamily(
            "vllm:moe_largest_share",
            "Share of the tokens of a sampled step that used the busiest expert.",
            labels=[*names, "layer"],
        )
        for layer in self.experts():
            touched.add_metric([*values, str(layer.layer)], layer.touched)
            largest.add_metric([*values, str(layer.layer)], layer.largest)
        yield from (touched, largest)

    def _request_families(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

        names, values = ["model_name", "engine"], [self.model_name, "0"]
        success = CounterMetricFamily(
            "vllm:request_success", "Finished choices by reason.", labels=[*names, "finished_reason"]
        )
        for reason, count in self.finished.items():
            success.add_metric([*values, reason], count)
        yield success
        rejected = CounterMetricFamily(
            "vllm:admission_rejections", "Refused requests by reason.", labels=[*names, "reason"]
        )
        for reason, count in self.rejections.items():
            rejected.add_metric([*values, reason], count)
        yield rejected
        relaxed = CounterMetricFamily(
            "structured_relaxed", "Keywords in the schemas of tools that are not enforced.", labels=["keyword"]
        )
        for keyword, count in self.relaxed.items():
            relaxed.add_metric([keyword], count)
        yield relaxed
        for name, histogram in self.histograms.items():
            family = HistogramMetricFamily(f"vllm:{name}", HISTOGRAMS[name], labels=names)
            family.add_metric(values, histogram.buckets(), histogram.total)
            yield family

    def of_ranks(self, ranks: Sequence[RankMemory]) -> Iterator[Metric]:
        """Series of the memory of an engine's ranks."""
        return rank_families(ranks, self.model_name)

    def _http_families(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

        requests = CounterMetricFamily(
            "http_requests", "HTTP requests by method, status class and route.", labels=["method", "status", "handler"]
        )
        for key, count in self.http_count.items():
            requests.add_metric(list(key), count)
        yield requests
        seconds = HistogramMetricFamily(
            "http_request_duration_seconds", "Seconds of an HTTP request.", labels=["method", "handler"]
        )
        for place, histogram in self.http_seconds.items():
            seconds.add_metric(list(place), histogram.buckets(), histogram.total)
        yield seconds


def helper_families(counts: HelperCounts) -> Iterator[Metric]:
    """Series of the processes that decode media."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    processes = GaugeMetricFamily("media_helpers", "Processes that decode media, by state.", labels=["state"])
    processes.add_metric(["busy"], counts.busy)
    processes.add_metric(["idle"], counts.idle)
    yield processes
    for name, text, count in (
        ("media_helpers_started", "Started processes that decode media.", counts.started),
        ("media_helpers_ended", "Decoding processes that were killed at a limit or crashed.", counts.ended),
    ):
        counter = CounterMetricFamily(name, text)
        counter.add_metric([], count)
        yield counter


class MemoryNumbers(NamedTuple):
    """Bytes that the process may use and uses, and how often load was shed."""

    limit: int
    held: int
    shed: int


def memory_families(numbers: MemoryNumbers) -> Iterator[Metric]:
    """Series of the host memory."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    gauge = GaugeMetricFamily("host_memory_bytes", "Memory that the process may have, and has.", labels=["kind"])
    gauge.add_metric(["limit"], numbers.limit)
    gauge.add_metric(["held"], numbers.held)
    yield gauge
    counter = CounterMetricFamily("host_memory_shed", "Times that load was shed for want of memory.")
    counter.add_metric([], numbers.shed)
    yield counter


def exposition(metrics: Metrics) -> bytes:
    """The response to a scrape: our series, then the process's."""
    from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(metrics)
    ProcessCollector(registry=registry)
    return generate_latest(registry)
