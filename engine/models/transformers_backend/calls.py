"""The attention and experts calls of a forward through transformers' modules, and the step that the forward runs.

A forward calls attention and experts in the same order each time, so the n-th attention call of a step belongs to the
n-th cache, and the n-th experts call to the n-th layer with experts. On the meta device the calls are only recorded.
Thread: any.
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
    head_dim: int  # width of queries and keys
    value_dim: int  # at most head_dim
    window: int  # 0: all
    scale: float
    softcap: float
    sinks: bool


@dataclass(slots=True)
class ExpertsCall:
    """One call of experts; has the SparseLayer attributes that engine/step/parts/expert_load reads."""

    layer: int  # number of the decoder layer, from 0
    routing: Routing
    of_tokens: bool  # the call's rows are exactly the step's tokens
    lasting: Tensor | None = None  # on an accelerator: int32 buffer for the experts that the newest step chose
    newest: Tensor | None = None  # on a CPU: the experts that the newest step chose, [rows, top_k]


@dataclass(slots=True)
class Calls:
    """All calls of a forward."""

    attention: list[Call] = field(default_factory=list)
    experts: list[ExpertsCall] = field(default_factory=list)

    @property
    def sparse(self) -> dict[int, ExpertsCall]:
        """Layer number -> experts call; empty if some call's rows are not exactly the step's tokens."""
        found = {call.layer: call for call in self.experts}
        return found if len(found) == len(self.experts) and all(call.of_tokens for call in self.experts) else {}


class Running(threading.local):
    """The forward that the current thread runs."""

    batch: Batch | None = None
    calls: Calls  # the running model's calls; a forward on the meta device appends to them
    num_attention_calls: int = 0  # calls so far in this forward
    num_expert_calls: int = 0
    tokens: int = 0  # number of tokens of a forward on the meta device


running = Running()


@contextmanager
def step(batch: Batch, calls: Calls) -> Iterator[None]:
    """A context in which a forward uses the caches of `batch`."""
    running.batch, running.calls, running.num_attention_calls, running.num_expert_calls = batch, calls, 0, 0
    try:
        yield
    finally:
        running.batch = None


@contextmanager
def recording(calls: Calls, tokens: int) -> Iterator[None]:
    """A context that records the calls of a forward of `tokens` tokens on the meta device."""
    running.calls, running.tokens = calls, tokens
    yield
