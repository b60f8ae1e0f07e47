"""ExpertLoad: samples for the metrics how the tokens of a step are distributed over the experts of each layer.

Owner: device thread. `look` launches a count after the newest step, outside of any graph, and returns the result of the
previous count; it never waits. Other steps have no extra work: the kernels of moe/route write the expert ids into a
lasting buffer instead of a temporary one, and on a CPU a layer stores the expert ids of its newest step.

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

ALIGN = 4  # int32 values: each layer's line is aligned to 16 bytes for vector copies


class LayerLoad(NamedTuple):
    """The expert load of one layer in one step."""

    layer: int  # index of the decoder layer, from 0
    touched: int  # experts that at least one token chose
    largest: float  # the share of the tokens that chose the busiest expert, 0 to 1


class ExpertLoad(StepPart):
    """The part for models with experts that generate tokens."""

    name = "expert_load"

    def __init__(self, model: Model, sizes: Sizes) -> None:
        self._model, self._sizes = model, sizes
        self._backend: Backend
        self._counter: DeviceCounter | None = None
        self._counted: list[LayerLoad] = []  # only used on a CPU; the stream writes it

    def start(self, steps: Steps) -> None:
        self._backend = steps.backend
        accelerator, counts = steps.backend.rank.accelerator, steps.backend.live_counts
        if accelerator is not None and counts is not None:
            self._counter = DeviceCounter(self._model, self._sizes.max_tokens, counts, accelerator)

    def warm_up(self, walk: bool) -> None:
        if self._counter is not None:
            self._counter.count()

    def look(self) -> list[LayerLoad]:
        """The result of the previous count, and launches the next. Empty at first or while the count still runs."""
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
    """Counts on an accelerator: graphs store the expert ids, and a kernel counts them into pinned memory."""

    def __init__(self, model: Model, max_tokens: int, counts: tuple[Tensor, Tensor], accelerator: Accelerator) -> None:
        """`counts`: the numbers of tokens and of sampled rows in the newest step, int32 [1] each."""
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
        # The last layer computes only the sampled rows, unless it is a module of transformers.
        last = max(layers) == len(text.layers) - 1 and not text.module_routings
        self._rows = counts[0], counts[1] if last else counts[0]
        self._home = accelerator.pinned(len(layers) * COLUMNS).view(len(layers), COLUMNS)
        self._done = accelerator.event()
        self._asked = False

    def look(self) -> list[LayerLoad]:
        """See ExpertLoad.look."""
        if self._asked and not self._done.query():
            return []
        found = loads(self._layers, self._tops, self._home.tolist()) if self._asked else []
        self.count()
        self._done.record()
        self._asked = True
        return found

    def count(self) -> None:
        """Launches the count; the start calls this method too, to compile the kernel."""
        count_expert_load(self._home, self._choices, self._top_k, *self._rows, self._experts)


def loads(layers: Iterable[int], tops: Sequence[int], lines: Sequence[Sequence[int]]) -> list[LayerLoad]:
    """The loads of all layers that computed at least one row."""
    return [
        LayerLoad(layer, touched, largest * top_k / pairs)
        for layer, top_k, (touched, largest, pairs) in zip(layers, tops, lines)
        if pairs
    ]
