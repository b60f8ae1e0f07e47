"""Adapter: a LoRA adapter in memory, checked and packed for the layers of one model.

    y = W x + B (A x)      A [rank, in], B [out, rank]; the adapter's scale is part of B

Owner: the host home (engine/lora/home.py); frozen. Any thread may read it. In: the files of an adapter
(engine/lora/load.py). Out: matrices by the path of the layer in the model's own tree (`layers.3.attention.qkv`).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PackedSite:
    """The matrices of a linear layer. A piece that the adapter leaves alone has zeros."""

    a: Tensor  # [pieces * rank, in], the model's dtype
    b: tuple[Tensor, ...]  # for each piece of the layer [rows of the piece, rank], rows in the layer's arrangement

    @property
    def rank(self) -> int:
        """The largest rank of the pieces; smaller pieces are filled up with zeros."""
        return self.a.shape[-2] // len(self.b)

    @property
    def nbytes(self) -> int:
        return self.a.nbytes + sum(piece.nbytes for piece in self.b)


@dataclass(frozen=True, slots=True, eq=False)
class PackedExperts:
    """The matrices of the same product of all experts: gate and up, or down."""

    a: Tensor  # [experts, pieces * rank, in], the model's dtype
    b: tuple[Tensor, ...]  # for each piece [experts, rows of the piece, rank]; gate's rows are not mixed with up's

    @property
    def rank(self) -> int:
        """The largest rank of the pieces; smaller pieces are filled up with zeros."""
        return self.a.shape[-2] // len(self.b)

    @property
    def nbytes(self) -> int:
        return self.a.nbytes + sum(piece.nbytes for piece in self.b)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Adapter:
    """One adapter. Its identity is the hash, not the name."""

    name: str
    sha256: bytes  # 32 bytes: of the weights file and of the configuration's keys that count
    rank: int  # the largest rank of all sites
    sites: dict[str, PackedSite | PackedExperts]  # by the layer's path in the model's tree
    nbytes: int  # of all matrices
    in_towers: bool = False  # whether a tower or a connector is a target
