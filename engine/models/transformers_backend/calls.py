"""What a thread's forward through transformers' modules is for, and the calls that such a forward makes.

A forward calls attention and experts in the same order each time, so the n-th call of a step is that of the n-th entry
of the cache, or of the n-th layer with experts. On the meta device the calls are written down instead. Thread: any.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from engine.base.model_config import Routing
from engine.layers.batch import Batch


@dataclass(frozen=True, slots=True)
class Call:
    """One attention call of a forward."""

    num_heads: int
    num_kv_heads: int
    head_dim: int  # of queries and keys
    value_dim: int  # at most head_dim
    window: int  # 0: all
    scale: float
    softcap: float
    sinks: bool


@dataclass(slots=True)
class ExpertsCall:
    """One call of experts, as engine/step/parts/expert_load knows the layers of a model."""

    layer: int  # of the decoder, from 0
    routing: Routing
    of_tokens: bool  # its rows are the tokens, all of them
    lasting: Tensor | None = None  # int32, becomes the memory of what the newest step chose; on an accelerator
    newest: Tensor | None = None  # on a CPU: [rows, top_k]


@dataclass(slots=True)
class Calls:
    """All of a forward."""

    attention: list[Call] = field(default_factory=list)
    experts: list[ExpertsCall] = field(default_factory=list)

    @property
    def sparse(self) -> dict[int, ExpertsCall]:
        """Layers with experts, by number; none where a layer's choices are not those of the step's tokens."""
        found = {call.layer: call for call in self.experts}
        return found if len(found) == len(self.experts) and all(call.of_tokens for call in self.experts) else {}


class Running(threading.local):
    """The forward that a thread runs."""

    batch: Batch | None = None
    calls: Calls  # of the model that runs; on the meta device they are added
    num_attention_calls: int = 0  # so far
    num_expert_calls: int = 0
    tokens: int = 0  # of a forward on the meta device


running = Running()


@contextmanager
def step(batch: Batch, calls: Calls) -> Iterator[None]:
    """Inside, a forward reads and writes the caches of `batch`."""
    running.batch, running.calls, running.num_attention_calls, running.num_expert_calls = batch, calls, 0, 0
    try:
        yield
    finally:
        running.batch = None


@contextmanager
def recording(calls: Calls, tokens: int) -> Iterator[None]:
    """Inside, calls of a forward of so many tokens on the meta device are written down."""
    running.calls, running.tokens = calls, tokens
    yield
