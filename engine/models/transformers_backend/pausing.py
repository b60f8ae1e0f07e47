"""Pauses: the run of a class's tower, cut between its layers.

Thread: device. transformers' modules know of no pauses, so a run that may pause has a stack of its own (a greenlet):
behind each layer a hook leaves that stack for the one that runs the step, and the next piece goes back to it. Other
runs pass the hooks by.

    step n      switch ->  embed, layer, hook ->  decode ..
    step n + 1  switch ->  layer, hook ->         decode ..        ...  the rows
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, TypeVar

from greenlet import getcurrent, greenlet
from torch import nn

T = TypeVar("T")


class Run(greenlet):
    """The stack of one run."""


def pause(*_: Any) -> None:
    """A hook: leaves a run that may pause."""
    run = getcurrent()
    if isinstance(run, Run):
        run.parent.switch()


def stacks_of(base: nn.Module, decoder: nn.Module) -> list[nn.ModuleList]:
    """The stacks of layers that lie in no other one, without the decoder's."""
    found: list[nn.ModuleList] = []
    inside = {id(each) for each in decoder.modules()}
    for module in base.modules():
        if isinstance(module, nn.ModuleList) and len(module) > 1 and id(module) not in inside:
            found.append(module)
            inside |= {id(each) for each in module.modules()}
    return found


def let_pause(stacks: list[nn.ModuleList]) -> int:
    """Gives each layer its hook; how many layers a run goes through, or about as many."""
    for stack in stacks:
        for layer in stack:
            layer.register_forward_hook(pause)
    return max((len(stack) for stack in stacks), default=1)


def in_pieces(work: Callable[[], T], weight: float, count: int) -> Generator[float, None, T]:
    """What `work` returns; pauses behind each of its layers, and says how much of the weight that was."""
    run, left = Run(work), weight
    try:
        made = run.switch()
        while not run.dead:
            share = min(weight / count, left)
            left -= share
            yield share
            made = run.switch()
    finally:
        if not run.dead:
            run.throw()  # the run is dropped, with what it holds
    result: T = made
    return result
