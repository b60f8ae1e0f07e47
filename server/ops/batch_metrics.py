"""Series of batches: those that have not ended, and their lines.

Owner: loop. In: counts. Out: families for /metrics; no ids and no keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from prometheus_client.core import Metric


class BatchCounts(NamedTuple):
    """Numbers of batches, lines and bytes."""

    open: int = 0  # batches that have not ended
    running: int = 0  # lines
    completed: int = 0  # lines since start
    failed: int = 0
    stored_bytes: int = 0  # of all files


def batch_families(counts: BatchCounts) -> Iterator[Metric]:
    """All series."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    for name, text, value in (
        ("batches_open", "Batches that have not ended.", counts.open),
        ("batch_lines_running", "Lines of batches that are being answered.", counts.running),
        ("stored_file_bytes", "Bytes of uploaded files and of the answers of batches.", counts.stored_bytes),
    ):
        gauge = GaugeMetricFamily(name, text)
        gauge.add_metric([], value)
        yield gauge
    lines = CounterMetricFamily("batch_lines", "Ended lines of batches by result.", labels=["result"])
    lines.add_metric(["completed"], counts.completed)
    lines.add_metric(["failed"], counts.failed)
    yield lines
