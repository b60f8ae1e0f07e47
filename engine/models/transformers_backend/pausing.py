"""Lets the run of a transformers tower pause between layers.

Thread: device. transformers' modules cannot pause, so a run that may pause has a separate stack (a greenlet). After
each layer a hook switches to the stack that runs the step, and the next piece switches back. In other runs the hooks
do nothing.

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
    """A hook that pauses the current run, if it may pause."""
    run = getcurrent()
    if isinstance(run, Run):
        run.parent.switch()


def stacks_of(base: nn.Module, decoder: nn.Module) -> list[nn.ModuleList]:
    """The outermost stacks of layers, without the decoder's."""
    found: list[nn.ModuleList] = []
    inside = {id(each) for each in decoder.modules()}
    for module in base.modules():
        if isinstance(module, nn.ModuleList) and len(module) > 1 and id(module) not in inside:
            found.append(module)
            inside |= {id(each) for each in module.modules()}
    return found


def let_pause(stacks: list[nn.ModuleList]) -> int:
    """Adds the hook to each layer; returns the number of layers that a run passes, approximately."""
    for stack in stacks:
        for layer in stack:
            layer.register_forward_hook(pause)
    return max((len(stack) for stack in stacks), default=1)


def in_pieces(work: Callable[[], T], weight: float, count: int) -> Generator[float, None, T]:
    """Runs `work`, pauses after each layer, and yields the share of `weight` done; returns the result of `work`."""
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
            run.throw()  # the run is dropped and releases its tensors
    result: T = made
    return result
