"""Batch: the tensors of one step, as a model's forward reads them.

Owner: the stream; made by a backend (engine/step/backend) from a StepPlan, read by one forward, then dropped. All
tensors are on the model's device. Tokens of all rows are concatenated; `attention` has the rows' boundaries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from engine.cache.spec import LayerCache
from engine.kernels.drafts_rows import DraftedRows
from engine.kernels.moe.capture import Capture
from engine.layers.stream import Stream


class LayerHook(Protocol):
    """The work of a step part (engine/step/parts) inside a decoder's forward; graphs record its launches."""

    passes: int  # most passes of `draft` in a step
    whole: bool  # forwards compute every token in the last layer: Batch.whole

    def draft(self, batch: Batch, rows: DraftedRows, first: bool) -> None:
        """A pass that guesses drafts of a step, before its forward: pass j is launched in steps in which a row has more
        than j drafts. `batch`: at least the step's tokens; `rows.most`: rows with drafts, at most; `first`: pass 0."""

    def begin(self, batch: Batch, rows: DraftedRows | None) -> None:
        """Called with the new batch, before the first layer and after the passes of `draft`; `rows`: None on a server
        without drafts."""

    def after_layer(self, number: int, x: Stream) -> None:
        """Called after layer `number`, from 0; may read x.rows(). If `Batch.whole` is false, the last layer's stream
        has only the sampled tokens."""


class FollowedHook:
    """A hook of rank 0 on the other ranks, whose forwards have the same shapes and do nothing for it."""

    def __init__(self, hook: LayerHook) -> None:
        self.passes, self.whole = hook.passes, hook.whole

    def draft(self, batch: Batch, rows: DraftedRows, first: bool) -> None:
        """Does nothing: the rank gets rank 0's drafts."""

    def begin(self, batch: Batch, rows: DraftedRows | None) -> None:
        """Does nothing."""

    def after_layer(self, number: int, x: Stream) -> None:
        """Does nothing."""


@dataclass(slots=True, eq=False)
class Batch:
    """One step of T tokens."""

    token_ids: Tensor  # [T] int64; positions taken by media hold the placeholder's id
    positions: Tensor  # [T] int64, or [axes, T] for M-RoPE models
    media: list[tuple[int, int, Tensor]]  # (token_start, length, rows [length, hidden or more])
    attention: list[Any]  # by cache group: an AttentionMeta, or the StateMeta of layers with states
    caches: list[LayerCache]  # in the order of cache_specs
    group_of: Sequence[int]  # in the same order: the index of each cache in `attention`
    # [S] int64: the tokens whose hidden states a forward returns, in this order. None: all T.
    sample_index: Tensor | None = None
    # How many of the T tokens, and of sample_index, are not padding: int32 [1], on the device. None: all.
    num_tokens: Tensor | None = None
    num_sampled: Tensor | None = None
    hooks: Sequence[LayerHook] = ()  # called after every layer
    whole: bool = False  # the last layer computes every token, not only the sampled tokens
    routed: Capture | None = None  # the buffer for the experts of every token; None: no capture. Set by a hook
    # `media` for a recorded forward: which tokens, [T, 1] bool, and their rows [T, hidden or more].
    overlay: tuple[Tensor, Tensor] | None = None
    adapters: Tensor | None = None  # [T] int32: the number of each token's adapter, 0 for none. None: no token has one
    named: bool = True  # a token may have an adapter by name
    second_start: Tensor | None = None  # [num_rows] int32, for encoders: offset of a row's second text; 0: no pair
    pool_start: Tensor | None = None  # [num_rows] int32: the first pooled token of a row. None: all tokens are pooled
