"""The table of metrics, from the collector of /metrics."""

from __future__ import annotations

from types import SimpleNamespace

from engine.base.stats import AdapterCounts
from engine.lora.home import Home
from mm.isolation.helpers import HelperCounts
from server.ops.adapter_metrics import AdapterMetrics
from server.ops.batch_metrics import BatchCounts, batch_families
from server.ops.metrics import Metrics


def metric_table() -> str:
    """Markdown: a row for each metric with its name, kind, labels and meaning."""
    metrics = Metrics()
    metrics.helpers = lambda: HelperCounts(0, 0, 0, 0)
    metrics.others.append(lambda: metrics.of_ranks(()))
    metrics.others.append(lambda: batch_families(BatchCounts()))
    served = SimpleNamespace(counts=AdapterCounts, parked=lambda: 0)
    metrics.adapters = AdapterMetrics(Home(None, None, None, 1), 1, served, list)
    rows = [
        f"| `{found.name}{'_total' if found.type == 'counter' else ''}` | {found.type} | {found.documentation} |"
        for found in sorted(metrics.collect(), key=lambda found: found.name)
    ]
    return "\n".join(["| metric | kind | meaning |", "|---|---|---|", *rows]) + "\n"
