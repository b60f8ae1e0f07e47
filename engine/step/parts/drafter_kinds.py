"""The kinds of drafters: how each one guesses inside the target's steps.

Thread: device, at start.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.models.drafters.base import DraftModel
from engine.step.parts.drafter_blocks import BlockSteps
from engine.step.parts.drafter_chain import ChainSteps
from engine.step.parts.drafter_parallel import ParallelSteps
from engine.step.parts.drafter_steps import DrafterSteps, Runs
from engine.step.parts.drafter_walk import WalkSteps

STEPS: dict[str, Callable[[Any, Runs], DrafterSteps]] = {
    "chain": ChainSteps,
    "block": BlockSteps,
    "parallel": ParallelSteps,
    "walk": WalkSteps,
}


def steps_of(drafter: DraftModel, runs: Runs) -> DrafterSteps:
    """The launches of a drafter."""
    return STEPS[drafter.kind](drafter, runs)


def passes_of(drafter: DraftModel, num_drafts: int) -> int:
    """The most passes of a step with so many drafts in a row."""
    return num_drafts if drafter.kind == "chain" else 1


def has_features(drafter: DraftModel) -> bool:
    """Whether entries read the feature of the token before."""
    return drafter.kind not in ("block", "walk")
