"""Per-layer inputs of Gemma 4: a second embedding table; every layer reads its part of a token's row.

Thread: device. In: token ids, and the stream of a layer. Out: rows of the table, and the term that a layer adds.
"""

from __future__ import annotations

from torch import Tensor

from engine.base.model_config import TextConfig
from engine.kernels.activation import BY_NAME, pointwise
from engine.kernels.gemm.pack import Placement
from engine.layers.embed import Embedding
from engine.layers.linear import Linear
from engine.layers.norm import stream_norm
from engine.layers.stream import Made, Stream


class PerLayerTable(Embedding):
    """The embedding table of all layers' inputs."""

    __slots__ = ("marks", "pad")

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__(vocab_size, width, None)
        self.pad = 0
        self.marks: list[int] = []  # media tokens, which use the row of `pad`

    def fill(self, pieces: dict[str, list[Tensor | None]], placement: Placement) -> None:
        super().fill(pieces, placement)
        for mark in self.marks:
            self.table[mark : mark + 1] = self.table[self.pad]


class PerLayerInput:
    """The term that a layer adds, computed from its per-layer input of each token."""

    def __init__(self, text: TextConfig, number: int) -> None:
        self.number = number
        self.activation = BY_NAME[text.activation]
        self.gate = Linear(text.hidden_size, text.hidden_size_per_layer_input)
        self.project = Linear(text.hidden_size_per_layer_input, text.hidden_size)
        self.norm = stream_norm(text)

    def add_to(self, x: Stream) -> None:
        """Each rank computes the whole term: to exchange a part of it would take longer."""
        assert x.per_layer_inputs is not None, "the decoder makes it before the first layer"
        gated = pointwise(self.gate(x.rows()), self.activation)
        x.add(Made(self.project(gated * x.per_layer_inputs[:, self.number])), self.norm)
