"""Calls about adapters that other threads send to the device thread (Engine.on_device).

Thread: device. In: a Runtime whose engine was started with adapters. Out: the Rules for loads, and counts; places that
are filled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from engine.base.stats import AdapterCounts
from engine.lora.adapter import Adapter
from engine.lora.load import Rules
from engine.lora.targets import targets_of
from engine.run.runtime import Runtime
from engine.step.parts.adapters import Adapters


class Served(NamedTuple):
    """What the loop knows of the places."""

    rules: Rules  # what adapters of the served model must fit
    counts: Callable[[], AdapterCounts]  # any thread may call it
    parked: Callable[[], int]  # choices that wait for a place of their adapter; any thread may call it


def served(runtime: Runtime) -> Served:
    """The served model's places."""
    settings, model, part = runtime.config.lora, runtime.model, part_of(runtime)
    assert settings is not None, "the caller has checked --enable-lora"
    sizes = model.dtype, runtime.config.model, model.config.text.vocab_size
    rules = Rules(targets_of(model), part.paths, settings, *sizes)
    return Served(rules, lambda: part.counts, lambda: runtime.admission.num_parked)


def fill(runtime: Runtime, adapter: Adapter) -> None:
    """Moves an adapter into a place, if one has no adapter yet."""
    places = part_of(runtime).places
    if places.num_used < places.count:
        places.fill(adapter)


def part_of(runtime: Runtime) -> Adapters:
    """The part with the places."""
    part = runtime.executor.part(Adapters)
    assert part is not None, "an engine with --enable-lora has the part"
    return part
