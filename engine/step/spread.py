"""Spread: how the tokens of one step in many chose among the experts of each layer, for the metrics and the log.

Owner: device thread. `look` launches a count behind the newest step, outside of any graph, and returns what the look
before it counted; neither waits. Between two looks nothing runs: the kernels of moe/route write their choices into a
lasting place instead of a passing one, and on a CPU a layer keeps the choices of its newest step.

    look 1 | launches count 1          look 2 | reads count 1, launches count 2          look 3 | ...
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from engine.kernels.moe.spread import COLUMNS, count_spread, spread_of

if TYPE_CHECKING:
    from engine.device.accelerator import Accelerator
    from engine.device.host import HostStream
    from engine.kernels.step_tensors import StepInputs
    from engine.models.base.model import Model

ALIGN = 4  # int32: each layer's place begins where a kernel may copy 16 bytes at a time


class LayerSpread(NamedTuple):
    """One layer of one step."""

    layer: int  # of the decoder, from 0
    touched: int  # experts that a token chose
    largest: float  # the share of the tokens that chose the busiest expert, 0 to 1


class Spread(Protocol):
    """What an executor of a model with experts has."""

    def look(self) -> list[LayerSpread]:
        """What the look before this one counted; empty where there was none, or where its count has not ended."""


class HostSpread:
    """On a CPU: the layers' choices are counted on the stream."""

    def __init__(self, model: Model, stream: HostStream) -> None:
        self._layers, self._stream = model.sparse, stream
        self._counted: list[LayerSpread] = []  # written on the stream

    def look(self) -> list[LayerSpread]:
        found, self._counted = self._counted, []
        self._stream.launch(self._count)
        return found

    def _count(self) -> None:
        lines = [
            [0, 0, 0] if mlp.newest is None else spread_of(mlp.newest, mlp.routing.num_experts).tolist()
            for mlp in self._layers.values()
        ]
        self._counted = _told(self._layers, [mlp.routing.top_k for mlp in self._layers.values()], lines)


class DeviceSpread:
    """On an accelerator: graphs write the choices, and a kernel counts those of the newest step into pinned memory."""

    def __init__(self, model: Model, max_tokens: int, inputs: StepInputs, accelerator: Accelerator) -> None:
        layers = model.sparse
        self._layers, self._tops = layers, [mlp.routing.top_k for mlp in layers.values()]
        self._experts = max(mlp.routing.num_experts for mlp in layers.values())
        line = -(-max_tokens * max(self._tops) // ALIGN) * ALIGN
        device = accelerator.device
        self._choices = torch.zeros(len(layers), line, dtype=torch.int32, device=device)
        for mlp, choices in zip(layers.values(), self._choices):
            mlp.lasting = choices
        self._top_k = torch.tensor(self._tops, dtype=torch.int32, device=device)
        text = model.config.text
        # The last layer computes the rows alone that somebody reads, but not where it is a module of transformers.
        last = max(layers) == len(text.layers) - 1 and not text.module_routings
        self._rows = inputs.query_start[-1:], inputs.num_sampled if last else inputs.query_start[-1:]
        self._home = accelerator.pinned(len(layers) * COLUMNS).view(len(layers), COLUMNS)
        self._done = accelerator.event()
        self._asked = False

    def look(self) -> list[LayerSpread]:
        if self._asked and not self._done.query():
            return []
        found = _told(self._layers, self._tops, self._home.tolist()) if self._asked else []
        self.count()
        self._done.record()
        self._asked = True
        return found

    def count(self) -> None:
        """Launches the count; at start, so that its kernel is compiled."""
        count_spread(self._home, self._choices, self._top_k, *self._rows, self._experts)


def device_spread(model: Model, max_tokens: int, inputs: StepInputs, accelerator: Accelerator) -> DeviceSpread | None:
    """None for a model without experts."""
    return DeviceSpread(model, max_tokens, inputs, accelerator) if model.sparse else None


def _told(layers: Iterable[int], tops: Sequence[int], lines: Sequence[Sequence[int]]) -> list[LayerSpread]:
    """Layers that computed a row."""
    return [
        LayerSpread(layer, touched, largest * top_k / pairs)
        for layer, top_k, (touched, largest, pairs) in zip(layers, tops, lines)
        if pairs
    ]
