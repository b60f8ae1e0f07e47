"""The metrics of speculative decoding, with vLLM's names: how many drafts were verified, and how many were right.

Thread: the loop, when /metrics is read. In: the engine's counts. Out: metric families; zeros without drafts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from engine.base.stats import DraftCounts

if TYPE_CHECKING:
    from prometheus_client.core import Metric


def draft_families(drafts: DraftCounts, model_name: str) -> Iterator[Metric]:
    """Counters since start."""
    from prometheus_client.core import CounterMetricFamily

    names, values = ["model_name", "engine"], [model_name, "0"]
    counters = {
        "vllm:spec_decode_num_drafts": ("Requests of steps that verified drafts.", drafts.drafts),
        "vllm:spec_decode_num_draft_tokens": ("Drafts that were verified.", drafts.draft_tokens),
        "vllm:spec_decode_num_accepted_tokens": ("Drafts that were right.", drafts.accepted_tokens),
        "spec_decode_invalid_draft_tokens": ("Drafts dropped: invalid logits of the drafter.", drafts.invalid_tokens),
    }
    for name, (text, value) in counters.items():
        counter = CounterMetricFamily(name, text, labels=names)
        counter.add_metric(values, value)
        yield counter
    places = CounterMetricFamily(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Drafts that were right, by their place behind the newest token, from 0.",
        labels=[*names, "position"],
    )
    for place, value in enumerate(drafts.accepted_per_place or (0,)):
        places.add_metric([*values, str(place)], value)
    yield places
