"""The part of expert load: how the tokens of one step in many chose among the experts of each layer, for the metrics.

Owner: device thread. `look` launches a count behind the newest step, outside of any graph, and returns what the look
before it counted; neither waits. Between two looks nothing runs: the kernels of moe/route write their choices into a
lasting place instead of a passing one, and on a CPU a layer keeps the choices of its newest step.

    look 1 | launches count 1          look 2 | reads count 1, launches count 2          look 3 | ...
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.device.accelerator import Accelerator
from engine.kernels.moe.expert_load import COLUMNS, count_expert_load, expert_load_of
from engine.models.base.model import Model
from engine.step.backend.base import Backend
from engine.step.parts.part import StepPart, Steps
from engine.step.sizes import Sizes

ALIGN = 4  # int32: each layer's place begins where a kernel may copy 16 bytes at a time


class LayerLoad(NamedTuple):
    """One layer of one step."""

    layer: int  # of the decoder, from 0
    touched: int  # experts that a token chose
    largest: float  # the share of the tokens that chose the busiest expert, 0 to 1


class ExpertLoad(StepPart):
    """Of a model with experts that chooses tokens."""

    name = "expert_load"

    def __init__(self, model: Model, sizes: Sizes) -> None:
        self._model, self._sizes = model, sizes
        self._backend: Backend
        self._counter: DeviceCounter | None = None
        self._counted: list[LayerLoad] = []  # on a CPU; written on the stream

    def start(self, steps: Steps) -> None:
        self._backend = steps.backend
        accelerator, counts = steps.backend.rank.accelerator, steps.backend.live_counts
        if accelerator is not None and counts is not None:
            self._counter = DeviceCounter(self._model, self._sizes.max_tokens, counts, accelerator)

    def warm_up(self, walk: bool) -> None:
        if self._counter is not None:
            self._counter.count()

    def look(self) -> list[LayerLoad]:
        """What the look before this one counted; empty where there was none, or where its count has not ended."""
        if self._counter is not None:
            return self._counter.look()
        found, self._counted = self._counted, []
        self._backend.run(self._count)
        return found

    def _count(self) -> None:
        layers = self._model.sparse
        lines = [
            [0, 0, 0] if mlp.newest is None else expert_load_of(mlp.newest, mlp.routing.num_experts).tolist()
            for mlp in layers.values()
        ]
        self._counted = loads(layers, [mlp.routing.top_k for mlp in layers.values()], lines)


class DeviceCounter:
    """On an accelerator: graphs write the choices, and a kernel counts those of the newest step into pinned memory."""

    def __init__(self, model: Model, max_tokens: int, counts: tuple[Tensor, Tensor], accelerator: Accelerator) -> None:
        """`counts`: of the newest step's tokens, and of its sampled rows, int32 [1] each."""
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
        # The last layer computes the sampled rows alone, but not where it is a module of transformers.
        last = max(layers) == len(text.layers) - 1 and not text.module_routings
        self._rows = counts[0], counts[1] if last else counts[0]
        self._home = accelerator.pinned(len(layers) * COLUMNS).view(len(layers), COLUMNS)
        self._done = accelerator.event()
        self._asked = False

    def look(self) -> list[LayerLoad]:
        """As ExpertLoad.look."""
        if self._asked and not self._done.query():
            return []
        found = loads(self._layers, self._tops, self._home.tolist()) if self._asked else []
        self.count()
        self._done.record()
        self._asked = True
        return found

    def count(self) -> None:
        """Launches the count; at start, so that its kernel is compiled."""
        count_expert_load(self._home, self._choices, self._top_k, *self._rows, self._experts)


def loads(layers: Iterable[int], tops: Sequence[int], lines: Sequence[Sequence[int]]) -> list[LayerLoad]:
    """Layers that computed a row."""
    return [
        LayerLoad(layer, touched, largest * top_k / pairs)
        for layer, top_k, (touched, largest, pairs) in zip(layers, tops, lines)
        if pairs
    ]
