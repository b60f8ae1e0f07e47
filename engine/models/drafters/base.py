"""DraftModel: what the step needs of a model that guesses tokens over a target's hidden states.

Owner: device thread; weights are filled once. The entry of the token at place p reads the feature of place p - 1, so
there is no entry at place 0. Its keys and values depend on the target's streams of earlier tokens and on the token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from engine.attention.meta import AttentionMeta
from engine.base.model_config import TextConfig
from engine.cache.spec import CacheSpec, LayerCache
from engine.cache.tokens import FullSpec, GuestSpec
from engine.models.base.model import Model
from engine.weights.table import Weighted

FIRST_ENTRY = 1  # the first place with an entry


class DraftModel(Weighted, Protocol):
    """A drafter without state besides its entries in the cache."""

    @property
    def text(self) -> TextConfig:
        """The sizes of its decoder layer."""

    @property
    def streams(self) -> Sequence[int]:
        """The target's residual streams that it reads: n is the input of layer n."""

    @property
    def described(self) -> str:
        """A few words about it for the log."""

    @property
    def warning(self) -> str:
        """What the operator should know about its files; "": nothing."""

    def cache_specs(self) -> list[CacheSpec]:
        """Its caches, in the target's blocks."""

    def feature(self, streams: list[Tensor]) -> Tensor:
        """The target's streams of T tokens, each [T, hidden] -> features [T, H]."""

    def store(
        self, token_ids: Tensor, before: Tensor, positions: Tensor, meta: AttentionMeta, caches: list[LayerCache]
    ) -> None:
        """Writes the entries of T tokens; before [T, H]: the features of the tokens before them. With several caches,
        `meta` is for attention of the drafter's heads over its entries."""

    def step(
        self, token_ids: Tensor, before: Tensor, positions: Tensor, meta: AttentionMeta, caches: list[LayerCache]
    ) -> tuple[Tensor, Tensor]:
        """Logits [B, vocabulary of the target] of the tokens after B tokens, and the B tokens' features [B, H]."""


def guest_specs(target: Model, text: TextConfig, count: int = 1) -> list[CacheSpec]:
    """The caches of keys and values of a drafter's layers, with the target's blocks; a window saves no blocks."""
    lent = next((spec for spec in target.cache_specs() if isinstance(spec, FullSpec)), None)
    host = None if lent is None else lent.shared
    return [GuestSpec(text.num_kv_heads, text.head_dim, target.dtype, host=host) for _ in range(count)]


def places_before(positions: Tensor) -> Tensor:
    """Positions of entries, those of the tokens before; positions [T] or [axes, T], of which the first counts."""
    return ((positions[0] if positions.dim() == 2 else positions) - 1).clamp(min=0)
