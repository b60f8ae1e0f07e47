"""Batch: the tensors of one step, as a model's forward reads them.

Owner: the stream; made by a backend (engine/step/backend) from a StepPlan, read by one forward, then dropped. All of it
lies on the device of the model. Rows are not separated here: tokens of all rows follow each other, and `attention` says
where rows begin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.attention.meta import AttentionMeta
from engine.cache.spec import LayerCache
from engine.kernels.moe.capture import Capture
from engine.layers.stream import Stream


class LayerHook(Protocol):
    """What a part of the step (engine/step/parts) does inside each forward of a decoder; graphs record its launches."""

    def begin(self, batch: Batch) -> None:
        """The batch is made, no layer has run."""

    def after_layer(self, number: int, x: Stream) -> None:
        """Layer `number`, from 0, has run; it may read x.rows(). Where `Batch.whole` is false, the last layer's stream
        has the sampled tokens alone."""


@dataclass(slots=True, eq=False)
class Batch:
    """One step of T tokens."""

    token_ids: Tensor  # [T] int64; positions taken by media hold the placeholder's id
    positions: Tensor  # [T] int64, or [axes, T] for M-RoPE models
    media: list[tuple[int, int, Tensor]]  # (token_start, length, rows [length, hidden or more])
    attention: list[AttentionMeta]  # by cache group
    caches: list[LayerCache]  # by layer that keeps something
    group_of: Sequence[int]  # by the same: whose AttentionMeta is its
    # [S] int64: the tokens whose hidden states a forward returns, in this order. None: all T.
    sample_index: Tensor | None = None
    # How many of the T tokens are no padding, and how many of sample_index: int32 [1], on the device. None: all.
    num_tokens: Tensor | None = None
    num_sampled: Tensor | None = None
    hooks: Sequence[LayerHook] = ()  # called behind every layer
    whole: bool = False  # the last layer computes every token, not the sampled ones alone
    routed: Capture | None = None  # where layers write the experts of every token; None: nowhere. Set by a hook
    # The same as `media` for a forward that was recorded: which tokens, [T, 1] bool, and rows [T, hidden or more].
    overlay: tuple[Tensor, Tensor] | None = None
    adapters: Tensor | None = None  # [T] int32: the number of each token's adapter, 0 for none. None: no token has one
    second_start: Tensor | None = None  # [num_rows] int32, of encoders: where a row's second text begins; 0: no pair
    pool_start: Tensor | None = None  # [num_rows] int32: the first of a row's tokens that is pooled. None: all are
