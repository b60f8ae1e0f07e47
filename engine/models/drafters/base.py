"""DraftModel: what the step needs of a model that guesses tokens over a target's hidden states.

Owner: device thread; weights are filled once. Two kinds: a chain guesses one draft after the other, a block drafter all
drafts of a row in one pass, and may then choose them in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from engine.attention.meta import AttentionMeta
from engine.base.model_config import ModelConfig, TextConfig
from engine.cache.spec import LayerCache
from engine.cache.tokens import FullSpec, GuestSpec
from engine.layers.batch import Batch
from engine.models.base.model import Model
from engine.models.drafters.small_head import LentHead
from engine.weights.table import Weighted

FIRST_ENTRY = 1  # the first place with an entry
Kind = Literal["chain", "block", "parallel", "walk"]
Passed = tuple[Tensor, ...]  # what a pass over N queries leaves for the walk over their guesses, by query


class Block(NamedTuple):
    """N queries of a masked drafter: of each row with drafts the newest token and masks, adjacent."""

    token_ids: Tensor  # [N] int64
    positions: Tensor  # [N] or [axes, N]
    before: Tensor  # [N] int32: queries of the same row before it
    metas: list[AttentionMeta]  # for each layer, as the next
    caches: list[LayerCache]


class DraftModel(Weighted, Protocol):
    """A drafter without state besides its entries in the cache."""

    kind: Kind

    @property
    def text(self) -> TextConfig:
        """The sizes of its decoder layers."""

    @property
    def streams(self) -> Sequence[int]:
        """The target's residual streams that it reads: n is the input of layer n."""

    @property
    def described(self) -> str:
        """A few words about it for the log."""

    @property
    def lent(self) -> LentHead | None:
        """The head that the target lends; None: the drafter has its own."""

    @property
    def warning(self) -> str:
        """What the operator should know about its files; "": nothing."""

    def cache_specs(self) -> list[GuestSpec]:
        """Its caches, without their hosts."""


class ChainDrafter(DraftModel, Protocol):
    """A pass for each draft. The entry of the token at place p reads the feature of place p - 1, so there is no entry
    at place 0. Its keys and values depend on the target's streams of earlier tokens and on the token."""

    def feature(self, streams: list[Tensor]) -> Tensor:
        """The target's streams of T tokens, each [T, hidden] -> features [T, H]."""

    def inputs(self, batch: Batch) -> Tensor:
        """The step's tokens for `store`: embeddings [T, H] with the target's media rows in their places."""

    def store(
        self, embedded: Tensor, before: Tensor, positions: Tensor, meta: AttentionMeta, caches: list[LayerCache]
    ) -> None:
        """Writes the entries of T tokens, from `inputs`; before [T, H]: the features of the tokens before them. With
        several caches, `meta` is for attention of the drafter's heads over its entries."""

    def step(
        self, token_ids: Tensor, before: Tensor, positions: Tensor, meta: AttentionMeta, caches: list[LayerCache]
    ) -> tuple[Tensor, Tensor]:
        """Logits [B, vocabulary of the target] of the tokens after B tokens, and the B tokens' features [B, H]."""


class ParallelDrafter(ChainDrafter, Protocol):
    """A chain whose one pass goes over the newest token and masks, causally; a query guesses the token behind it."""

    mask_id: int  # the token whose embedding stands for a mask

    def masked(self) -> Tensor:
        """The feature before each mask, [1, H]."""


class MaskedDrafter(DraftModel, Protocol):
    """One pass for all drafts, over the newest token and masks. The entry of a token depends only on the target's
    streams of the token."""

    skipped: int  # 1: a query guesses the token of its own place, the first nothing; 0: the token behind its place
    mask_id: int  # the token whose embedding stands for a mask
    whole: tuple[bool, ...]  # for each layer: queries see all queries of their row, not only earlier ones

    def store(self, streams: list[Tensor], positions: Tensor, meta: AttentionMeta, caches: list[LayerCache]) -> None:
        """Writes the entries of T tokens; the target's streams, each [T, hidden]."""


class BlockDrafter(MaskedDrafter, Protocol):
    """The pass gives every draft its logits."""

    def block(self, queries: Block) -> Tensor:
        """Logits [N, vocabulary of the target] of N queries."""


class WalkingDrafter(MaskedDrafter, Protocol):
    """Behind the pass, drafts are chosen in order: the logits of a draft depend on the token before it."""

    confident: bool  # it is a ConfidentDrafter

    def passed(self, queries: Block) -> Passed:
        """The pass over N queries."""

    def begun(self, found: Passed, queries: Tensor, before: Tensor) -> Tensor | None:
        """What the walk knows of the blocks before their first guesses, [B, n]; None: nothing. Arguments as below."""

    def walked(
        self, found: Passed, queries: Tensor, before: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Logits [B, vocabulary of the target] of the guesses of queries int64 [B] behind tokens int64 [B]; `state`:
        what the walk knows besides these tokens, before and behind the queries."""


class ConfidentDrafter(WalkingDrafter, Protocol):
    """It estimates how often its drafts are right."""

    def confidence(self, found: Passed, queries: Tensor, before: Tensor) -> Tensor:
        """How probable it is that these guesses are right if those before them are, float32 [B]."""


def guest_specs(target: Model, text: TextConfig, count: int = 1) -> list[GuestSpec]:
    """The caches of keys and values of a drafter's layers; a window saves no blocks."""
    return [GuestSpec(text.num_kv_heads, text.head_dim, target.dtype) for _ in range(count)]


def hosted(specs: Sequence[GuestSpec], target: Model) -> tuple[GuestSpec, ...]:
    """The same caches in the blocks of the target's layers that cache every token; without these, in their own."""
    lent = next((spec for spec in target.cache_specs() if isinstance(spec, FullSpec)), specs[0])
    return tuple(replace(spec, host=lent.shared) for spec in specs)


def text_places(positions: Tensor) -> Tensor:
    """Positions [T] of [T] or [axes, T], of which the first axis counts."""
    return positions[0] if positions.dim() == 2 else positions


def places_before(positions: Tensor) -> Tensor:
    """Positions of the tokens before; positions as above."""
    return (text_places(positions) - 1).clamp(min=0)


def config_of(name: str, folder: str, text: TextConfig, dtype: torch.dtype, longest: int) -> ModelConfig:
    """A drafter's configuration as the loader reads it; `longest`: tokens of context of the target."""
    return ModelConfig(
        architecture=name,
        implementation="native",
        folder=folder,
        text=text,
        towers={},
        processor="",
        media_token_ids={},
        eos_token_ids=(),
        max_position=longest,
        torch_dtype=dtype,
    )
