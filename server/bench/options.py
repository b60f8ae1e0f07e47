"""Flags of the bench commands: a frozen dataclass per command; its fields carry their help (server/flags/command_line).

Owner: the bench's main thread; worker processes get the same options as JSON.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from server.flags.config import flag


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """bench serve: the server, the content and the rate of the load."""

    url: str = flag("http://127.0.0.1:8000", "server to measure, with or without /v1")
    model: str = flag("", "model name in requests; none: the first of /v1/models")
    api_key: str = flag("", "key to send as a bearer token", hidden_value=True)
    endpoint: Literal["chat", "completions"] = flag("chat", "/v1/chat/completions or /v1/completions")
    num_prompts: int = flag(100, "requests or, with --turns, conversations", low=1)
    num_warmups: int = flag(1, "requests before the measured ones", low=0)
    dataset: Literal["random", "sharegpt", "jsonl"] = flag("random", "random words from --seed, or a file")
    dataset_path: str = flag("", "ShareGPT's JSON, or lines of {prompt | messages, max_tokens}")
    input_len: int = flag(512, "words of a random prompt (token ids with --vocab-size)", low=1)
    output_len: int = flag(128, "max_tokens, if the dataset has none", low=1)
    range_ratio: float = flag(0.0, "random lengths between (1 - r) and (1 + r) times these", low=0, high=1)
    prefix_len: int = flag(0, "words before a random prompt that prompts share", low=0)
    num_prefixes: int = flag(1, "different shared beginnings", low=1)
    turns: int = flag(1, "turns of a conversation; each sends the answers before it", low=1)
    vocab_size: int = flag(0, "use random token ids below this number; 0: words", low=0)
    images: int = flag(0, "random images in a request", low=0)
    image_size: str = flag("512x512", "width and height of images")
    image_format: Literal["jpeg", "png", "noise"] = flag("jpeg", "format of images; noise: PNG of random pixels")
    sounds: int = flag(0, "random audio items in a request", low=0)
    sound_seconds: float = flag(5.0, "length of audio items", low=0.1)
    films: int = flag(0, "random videos in a request", low=0)
    film_seconds: float = flag(2.0, "length of videos, at 8 frames a second", low=0.25)
    film_size: str = flag("320x240", "width and height of videos")
    num_media: int = flag(0, "different media items that requests share; 0: each has its own", low=0)
    request_rate: float = flag(0.0, "requests per second; 0: as many as --max-concurrency allows", low=0)
    burstiness: float = flag(1.0, "shape of the gamma distribution of gaps: 1 Poisson, below 1 bursts", low=0.01)
    ramp_to: float = flag(0.0, "request rate at the end, reached linearly; 0: --request-rate", low=0)
    max_concurrency: int = flag(0, "open requests at a time; 0: any number", low=0)
    seconds: float = flag(0.0, "end after this time and ignore open requests; 0: with the last request", low=0)
    temperature: float = flag(-1.0, "sampling temperature; -1: the server's own", low=-1)
    ignore_eos: bool = flag(False, "answers of max_tokens tokens (a field that not all servers know)")
    stream: bool = flag(True, "stream answers; without it there are no times of tokens")
    extra_body: dict[str, Any] = flag({}, "more fields of every request, as JSON")  # noqa: RUF009
    percentiles: tuple[int, ...] = flag((50, 90, 99), "percentiles to print", low=1, high=99)
    goodput: dict[str, Any] = flag({}, "limits in ms, such as ttft=200,tpot=20,itl=50,e2e=5000")  # noqa: RUF009
    request_timeout: float = flag(600.0, "seconds for one request", low=0.1)
    ready_timeout: float = flag(60.0, "seconds to wait for the server", low=0)
    processes: int = flag(0, "client processes; 0: one per 64 open requests, at most one per core", low=0)
    seed: int = flag(0, "seed of lengths, words, media and arrivals")
    json: str = flag("", "file for all numbers and requests")
    plot: str = flag("", "PNG file for times and rates")


@dataclass(frozen=True, slots=True)
class ThroughputOptions:
    """bench throughput: one batch of equal requests, several times."""

    num_prompts: int = flag(256, "requests at once", low=1)
    input_len: int = flag(512, "tokens of a prompt", low=1)
    output_len: int = flag(128, "tokens of an answer", low=1)
    runs: int = flag(3, "measured runs; the report has their median", low=1)
    random_seed: int = flag(0, "seed of the prompts")
    json: str = flag("", "file for all numbers")


@dataclass(frozen=True, slots=True)
class LatencyOptions:
    """bench latency: batches of equal requests, one after the other."""

    batch_sizes: tuple[int, ...] = flag((1, 8, 32), "requests of a batch", several=True, low=1)
    input_len: int = flag(128, "tokens of a prompt", low=1)
    output_len: int = flag(64, "tokens of an answer", low=1)
    warm_runs: int = flag(2, "runs of each size before the measured ones", low=0)
    runs: int = flag(5, "measured runs of each size", low=1)
    percentiles: tuple[int, ...] = flag((50, 90, 99), "percentiles to print", low=1, high=99)
    random_seed: int = flag(0, "seed of the prompts")
    json: str = flag("", "file for all numbers")


@dataclass(frozen=True, slots=True)
class StartupOptions:
    """bench startup: starts the server's process several times."""

    runs: int = flag(2, "starts after the first; the report has their median", low=1)
    timeout: float = flag(1800.0, "seconds that a start may take", low=1)
    json: str = flag("", "file for all numbers")


@dataclass(frozen=True, slots=True)
class SweepOptions:
    """bench sweep: a command over a grid of its flags."""

    plan: str = flag("sweep.yaml", "YAML file with command, flags, grid and metrics")
    out: str = flag("sweep", "folder for a JSON file per combination, and sweep.png")


@dataclass(frozen=True, slots=True)
class MediaBenchOptions:
    """bench media: random items, one after the other."""

    image_size: str = flag("1024x1024", "width and height of images")
    image_format: Literal["jpeg", "png"] = flag("jpeg", "format of images")
    sound_seconds: float = flag(10.0, "length of audio items", low=0.1)
    film_seconds: float = flag(4.0, "length of videos, at 8 frames a second", low=0.25)
    film_size: str = flag("640x480", "width and height of videos")
    runs: int = flag(5, "measured items of each kind; the report has medians", low=1)
    random_seed: int = flag(0, "seed of the items")
    json: str = flag("", "file for all numbers")


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """bench attention: one call of the kernel, by itself."""

    batch: str = flag("8x1@4096+2x512", "requests as COUNTxQUERIES@CONTEXT, joined by +")
    heads: int = flag(32, "query heads", low=1)
    kv_heads: int = flag(8, "heads of keys and values", low=1)
    head_dim: int = flag(128, "numbers of a head", low=16)
    dtype: Literal["float32", "bfloat16"] = flag("bfloat16", "type of all tensors; accelerators take bfloat16")
    device: Literal["auto", "cpu", "cuda"] = flag("auto", "device (cuda: also ROCm)")
    json: str = flag("", "file for all numbers")


@dataclass(frozen=True, slots=True)
class SampleOptions:
    """bench sample: one sampling of tokens, by itself."""

    rows: tuple[int, ...] = flag((1, 32, 256), "requests of a step", several=True, low=1)
    vocab: int = flag(151936, "size of the vocabulary", low=64)
    device: Literal["auto", "cpu", "cuda"] = flag("auto", "device (cuda: also ROCm)")
    json: str = flag("", "file for all numbers")


@dataclass(frozen=True, slots=True)
class LinearOptions:
    """bench linear: one product, by itself."""

    rows: tuple[int, ...] = flag((1, 16, 64), "requests of a step", several=True, low=1)
    width: int = flag(4096, "outputs", low=64)
    depth: int = flag(4096, "inputs", low=64)
    device: Literal["auto", "cpu", "cuda"] = flag("auto", "device (cuda: also ROCm)")
    json: str = flag("", "file for all numbers")


@dataclass(frozen=True, slots=True)
class MoeOptions:
    """bench moe: one layer of experts, by itself."""

    rows: tuple[int, ...] = flag((1, 32, 256), "requests of a step", several=True, low=1)
    hidden: int = flag(2048, "hidden size", low=16)
    width: int = flag(768, "intermediate size of an expert", low=16)
    experts: int = flag(32, "experts of the layer", low=2)
    top_k: int = flag(8, "experts of a token", low=1)
    form: Literal[
        "floats", "int4_128", "e2m1_16", "mxfp4", "int8", "fp8", "fp8_inputs", "fp8_blocks", "fp8_blocks_inputs"
    ] = flag("floats", "format of the experts; _inputs: inputs are converted to FP8 too, if the card has FP8 units")
    device: Literal["auto", "cpu", "cuda"] = flag("auto", "device (cuda: also ROCm)")
    json: str = flag("", "file for all numbers")
