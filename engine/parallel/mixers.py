"""A rank's part of the layers that replace attention: their slices, what divides them, and what ranks exchange there.

In: a layer's mixer as the checkpoint's configuration has it. Out: the mixer of a rank: value heads with their key
heads, heads with their groups, or channels. Key heads and groups that are fewer than the ranks are copied. Thread: any;
no state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from engine.base.dealing import Section, share
from engine.base.mixers import (
    BothConfig,
    ConvolutionConfig,
    DeltaConfig,
    Mamba1Config,
    Mamba2Config,
    MixerConfig,
)
from engine.base.model_config import TextConfig
from engine.kernels.parallel.dealt_norm import Parts
from engine.layers.attention import DealtNorm, HeadNorms
from engine.layers.mamba import DealtGroups, Mamba1, Mamba2
from engine.layers.stream import Exchange
from engine.models.base.decoder import DecoderLayer


class Count(NamedTuple):
    """A number of heads, groups or channels that ranks share."""

    units: int
    name: str
    copied: bool = False  # each may be on several ranks

    def divides(self, ranks: int) -> bool:
        """Whether the units can be dealt out over so many ranks."""
        return self.units % ranks == 0 or (self.copied and ranks % self.units == 0)


def counts_of(mixer: MixerConfig | None) -> tuple[Count, ...]:
    """What a number of ranks must divide; empty: nothing."""
    if isinstance(mixer, BothConfig):
        return counts_of(mixer.state)
    if isinstance(mixer, DeltaConfig):
        keys = Count(mixer.key_heads, "key heads", copied=not mixer.by_key_head)
        return Count(mixer.value_heads, "value heads"), keys
    if isinstance(mixer, Mamba2Config):
        return Count(mixer.heads, "heads of states"), Count(mixer.groups, "groups of B and C", copied=True)
    if isinstance(mixer, Mamba1Config | ConvolutionConfig):
        return (Count(mixer.width, "channels"),)
    return ()


def mixer_of(mixer: MixerConfig | None, ranks: int) -> MixerConfig | None:
    """The mixer of a rank; all ranks' are alike."""
    if isinstance(mixer, BothConfig):
        return replace(mixer, state=_mamba2(mixer.state, ranks))
    if isinstance(mixer, DeltaConfig):
        return replace(mixer, key_heads=max(1, mixer.key_heads // ranks), value_heads=mixer.value_heads // ranks)
    if isinstance(mixer, Mamba2Config):
        return _mamba2(mixer, ranks)
    if isinstance(mixer, Mamba1Config | ConvolutionConfig):
        return replace(mixer, width=mixer.width // ranks)
    return mixer


def _mamba2(mixer: Mamba2Config, ranks: int) -> Mamba2Config:
    return replace(mixer, heads=mixer.heads // ranks, groups=max(1, mixer.groups // ranks))


def _state_of(mixer: MixerConfig | None) -> MixerConfig | None:
    return mixer.state if isinstance(mixer, BothConfig) else mixer


def _deals_norm(mixer: MixerConfig | None, ranks: int) -> bool:
    """Whether a rank has a part of the channels over which a norm goes."""
    return isinstance(mixer, Mamba2Config) and mixer.norm != "none" and mixer.groups < ranks


def _sums_of(mixer: Mamba2Config) -> int:
    """Sums of squares that ranks exchange: at least two, as for queries and keys."""
    return max(2, mixer.groups)


def connect(
    layer: DecoderLayer, text: TextConfig, mixer: MixerConfig | None, link: Exchange, rank: int, ranks: int
) -> None:
    """Connects a rank's layer to the other ranks, if sums in it go over heads or channels of several ranks, and gives
    norms of heads the number of the first; `text` and `mixer`: of the layer in the whole model."""
    attention, state = layer.attention, layer.state
    if attention is not None and attention.qk_norm == "head layer norm":
        for norm, heads in ((attention.q_norm, text.num_heads), (attention.k_norm, text.num_kv_heads)):
            assert isinstance(norm, HeadNorms)
            norm.first, _ = share(Section(heads), rank, ranks)
    if attention is not None and attention.qk_norm == "projection":
        copies = ranks * attention.num_kv_heads // text.num_kv_heads
        sizes = text.num_heads * text.head_dim, text.num_kv_heads * text.head_dim
        attention.dealt_norm = DealtNorm(link, *sizes, copies)
    mixer = _state_of(mixer)
    if isinstance(state, Mamba1):
        state.exchange = link
    if isinstance(state, Mamba2) and isinstance(mixer, Mamba2Config) and _deals_norm(mixer, ranks):
        group, _ = share(Section(mixer.groups), rank, ranks)
        parts = Parts((state.shape.inner,), (mixer.width // mixer.groups,), group, _sums_of(mixer))
        state.deal_norm(DealtGroups(link, parts, gates_last=mixer.norm == "before gate"))


def exchanged(mixer: MixerConfig | None, ranks: int, dtype: torch.dtype) -> Iterator[tuple[torch.dtype, int]]:
    """Dtypes and widths of the rows that ranks exchange inside the layer; `dtype`: the model's."""
    mixer = _state_of(mixer)
    if isinstance(mixer, Mamba1Config):
        yield dtype, mixer.rank + 2 * mixer.state_size
    elif isinstance(mixer, Mamba2Config) and _deals_norm(mixer, ranks):
        yield torch.float32, _sums_of(mixer)
