"""PARTS: the parts of a step, in the order in which their hooks are called.

A part is a file in this folder and an entry of PARTS. An entry makes the part for a model and its settings, or returns
None if they do not need the part. Adapters give a row its identity. Media come next, because media rows replace
embeddings before the forward reads them. Prompt log-probabilities and routed experts read the forward. Rules write mask
lines before grammars, which have the last word on the allowed tokens of a row. Drafts follow the choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.base.config import EngineConfig
from engine.cache.spec import CacheSpec
from engine.lora.sites import give_device_sites, give_host_sites
from engine.models.base.model import Model
from engine.step.parts.adapters import DeviceAdapters, HostAdapters
from engine.step.parts.drafting import drafting_part
from engine.step.parts.expert_load import ExpertLoad
from engine.step.parts.grammar import Grammar
from engine.step.parts.media import Media
from engine.step.parts.part import Claim, StepPart
from engine.step.parts.pooling import Pooling
from engine.step.parts.progress import PromptProgress
from engine.step.parts.prompt_logprobs import PromptLogprobs
from engine.step.parts.routed import RoutedExperts, routed_shape
from engine.step.parts.rules import Rules
from engine.step.sizes import Sizes


@dataclass(frozen=True, slots=True)
class Setting:
    """The settings that decide which parts exist."""

    config: EngineConfig
    model: Model
    sizes: Sizes
    specs: Sequence[CacheSpec]  # caches of the model's layers
    on_host: bool

    @property
    def chooses(self) -> bool:
        """True if the model generates tokens, False if it pools."""
        return self.model.pooler is None


def adapters(setting: Setting) -> StepPart | None:
    """Gives the model's layers their places, so it runs before the weights are read."""
    if setting.config.lora is None:
        return None
    if setting.on_host:
        given = give_host_sites(setting.model, setting.config.lora)
        return HostAdapters(setting.config, setting.model, given, setting.sizes)
    sites = give_device_sites(setting.model, setting.config.lora, setting.config.deterministic)
    return DeviceAdapters(setting.config, setting.model, sites, setting.sizes)


def media(setting: Setting) -> StepPart | None:
    return Media(setting.config, setting.model)


def prompt_logprobs(setting: Setting) -> StepPart | None:
    return PromptLogprobs(setting.config, setting.model, setting.sizes) if setting.chooses else None


def progress(setting: Setting) -> StepPart | None:
    return PromptProgress() if setting.chooses else None


def routed(setting: Setting) -> StepPart | None:
    wanted = setting.config.return_routed_experts and setting.chooses
    if not wanted or not routed_shape(setting.model.config.text)[0]:
        return None
    return RoutedExperts(setting.model, setting.specs)


def expert_load(setting: Setting) -> StepPart | None:
    return ExpertLoad(setting.model, setting.sizes) if setting.model.sparse and setting.chooses else None


def rules(setting: Setting) -> StepPart | None:
    return Rules(setting.model, setting.sizes) if setting.chooses and not setting.on_host else None


def grammar(setting: Setting) -> StepPart | None:
    return Grammar(setting.config, setting.sizes, setting.on_host) if setting.chooses else None


def drafting(setting: Setting) -> StepPart | None:
    return drafting_part(setting.config, setting.model, setting.specs, setting.sizes) if setting.chooses else None


def pooling(setting: Setting) -> StepPart | None:
    return None if setting.chooses else Pooling(setting.sizes)


PARTS: list[Callable[[Setting], StepPart | None]] = [
    adapters,
    media,
    prompt_logprobs,
    progress,
    routed,
    expert_load,
    rules,
    grammar,
    drafting,
    pooling,
]


def parts_of(setting: Setting) -> list[StepPart]:
    """All parts for a model and its settings, in order."""
    made = (make(setting) for make in PARTS)
    return [part for part in made if part is not None]


def claims_of(parts: Sequence[StepPart]) -> Claim:
    """The sum of the parts' claims, computed before the KV cache is sized. Raises ConfigError."""
    return sum((part.claim() for part in parts), Claim())
