"""Series of adapters that requests choose by name: places, loads, and the requests and tokens of each adapter.

Owner: loop. In: the Home, the engine's counts, the open exchanges, and the ends of choices. Out: families for
/metrics. The number of names is bounded, because names of a folder come from clients.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from engine.base.request import NamedAdapter
    from engine.lora.home import Home
    from engine.run.adapters import Served

MOST = 1000  # adapters with series of their own; further adapters share the series `other`
OTHER = "other"


class AdapterMetrics:
    """The series. Owner: loop."""

    def __init__(
        self, home: Home, max_loras: int, served: Served, open_requests: Callable[[], list[tuple[str, bool]]]
    ) -> None:
        """`open_requests`: of each open request with an adapter, the adapter's name and whether a step has run."""
        self._home, self._max_loras, self._served, self._open = home, max_loras, served, open_requests
        self._counts: dict[str, list[int]] = {}  # name -> choices, prompt tokens, generated tokens

    def ended(self, adapter: NamedAdapter | None, prompt: int, generated: int) -> None:
        """Counts a choice of a request; None: of the base."""
        if adapter is None:
            return
        name = adapter.name if adapter.name in self._counts or len(self._counts) < MOST else OTHER
        counts = self._counts.setdefault(name, [0, 0, 0])
        counts[0] += 1
        counts[1] += prompt
        counts[2] += generated

    def families(self) -> Iterator[Metric]:
        """All families."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        info = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Adapters of running and of waiting requests, as labels; the value is the time of the scrape.",
            labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        )
        named = self._open()
        running, waiting = (sorted({name for name, runs in named if runs is state})[:MOST] for state in (True, False))
        info.add_metric([str(self._max_loras), ",".join(running), ",".join(waiting)], time.time())
        yield info
        counts = self._served.counts()
        gauges = {
            "lora_places_used": ("Places on the device that hold an adapter.", counts.used),
            "lora_parked": ("Choices that wait for a place of their adapter.", self._served.parked()),
            "lora_adapters": ("Adapters that requests may name.", len(self._home.names)),
        }
        counters: dict[str, tuple[str, float]] = {
            "lora_swaps": ("Adapters that were moved into a place.", counts.swaps),
            "lora_swap_seconds": ("Seconds of these moves.", counts.swap_seconds),
            "lora_load_failures": ("Loads of adapters that failed.", self._home.failures),
        }
        for name, (text, count) in gauges.items():
            gauge = GaugeMetricFamily(name, text)
            gauge.add_metric([], count)
            yield gauge
        for name, (text, value) in counters.items():
            counter = CounterMetricFamily(name, text)
            counter.add_metric([], value)
            yield counter
        texts = ("Finished choices of an adapter.", "Prompt tokens of an adapter.", "Generated tokens of an adapter.")
        for at, (name, text) in enumerate(zip(("choices", "prompt_tokens", "generation_tokens"), texts)):
            family = CounterMetricFamily(f"lora_{name}", text, labels=["lora_name"])
            for adapter, ended in self._counts.items():
                family.add_metric([adapter], ended[at])
            yield family
