"""Planned: a model, the parts of its steps, the memory that these parts claim, and the layout of the KV cache.

Thread: any. Nothing is allocated, so `check` (run/estimate) plans in the same way as the start. In: a model without
weights. Out: the parts, their claims, and the cache layout, all before any memory is sized.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.base.config import EngineConfig
from engine.cache.layout import CacheLayout
from engine.layers.batch import LayerHook
from engine.layers.states import set_states
from engine.models.base.model import Model
from engine.parallel.model import SplitModel, whole_of
from engine.quant.kv import stored_specs
from engine.step.parts.order import Setting, claims_of, parts_of
from engine.step.parts.part import Claim, StepPart
from engine.step.sizes import Sizes
from engine.step.step import Endings
from engine.weights.files import Shard


@dataclass(frozen=True, slots=True)
class Planned:
    """A model, the parts of its steps, their claims and the cache layout, before any memory is sized."""

    model: Model
    sizes: Sizes
    parts: Sequence[StepPart]
    claim: Claim
    layout: CacheLayout

    @property
    def endings(self) -> Endings:
        """Functions that run after each choice of tokens."""
        parts = [part for part in self.parts if type(part).after_choice is not StepPart.after_choice]
        resting = [part.after_rest if part.rests else part.after_choice for part in parts]
        return Endings([part.after_choice for part in parts], resting)

    @property
    def lines(self) -> list[str]:
        """One line for each part that has a line."""
        return [line for part in self.parts if (line := part.line())]

    @property
    def hooks(self) -> list[LayerHook]:
        """Hooks that run inside each forward."""
        return [hook for part in self.parts if (hook := part.layer_hook()) is not None]


def planned(
    config: EngineConfig, model: Model, sizes: Sizes, shards: list[Shard] | None, on_host: bool, read: bool = True
) -> Planned:
    """Plans parts, claims and cache layout of a model; `shards`, `read`: see stored_specs. Raises ConfigError."""
    set_states(model, config.states, on_host, sizes.num_drafts, config.deterministic)
    specs = stored_specs(whole_of(model), config.kv_cache_dtype, config.kv_cache_skip_layers, shards, read)
    if isinstance(model, SplitModel):
        specs = model.dealt_specs(specs)
    parts = parts_of(Setting(config, model, sizes, specs, on_host))
    claim = claims_of(parts)
    layout = CacheLayout([*specs, *claim.specs], sizes.block_size, claim.token_bytes)
    return Planned(model, sizes, parts, claim, layout)
