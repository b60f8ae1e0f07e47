"""The series of an engine's ranks. Thread: loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from engine.base.limits import RankMemory

if TYPE_CHECKING:
    from prometheus_client.core import Metric


def rank_families(ranks: Sequence[RankMemory], model_name: str) -> Iterator[Metric]:
    """The memory that each rank holds; most engines have one rank."""
    from prometheus_client.core import GaugeMetricFamily

    gauge = GaugeMetricFamily(
        "vllm:rank_memory_bytes",
        "Memory of each rank for weights (a drafter's too), kv_cache and exchange (sums that ranks send each other).",
        labels=["model_name", "engine", "rank", "kind"],
    )
    for number, held in enumerate(ranks):
        for kind, size in held._asdict().items():
            gauge.add_metric([model_name, "0", str(number), kind], size)
    yield gauge
