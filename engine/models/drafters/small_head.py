"""8-bit heads of drafters: half the bytes of a product that each draft needs. The target's own head stays as it is.

A head of the drafter's files is quantised while it is read. For a head that the target lends there is a copy, made of
the target's embedding if they are tied, else of the target's files. Each row has its scale (engine/quant/online). A
head of codes is used as it is. If the target's head is dealt out over ranks, rank 0 has a copy for the drafter, of the
same numbers or of 8 bits. Owner: device thread; weights are filled once.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.kernels.gemm.pack import Placement
from engine.layers.embed import Head
from engine.models.base.decoder import Decoder
from engine.quant.base import UNQUANTISED, Quantised
from engine.quant.online import Floats
from engine.weights.load import load_weights, weight_bytes
from engine.weights.table import Table

SMALL = Quantised((Floats(),), ("lm_head",))


def quantise(head: Head) -> None:
    """Makes 8 bits of an unquantised head when it is filled."""
    if head.scheme is UNQUANTISED:
        head.scheme = SMALL


def tied_bytes(head: Head | None) -> int:
    """Bytes of an 8-bit head that is made of the embedding; 0: another head."""
    return head.in_features * sum(head.out_features) if head is not None and head.tied and head.scheme is SMALL else 0


@dataclass(frozen=True, slots=True)
class OfHead(Table):
    """The row of a head; all other tensors belong to the target."""

    def ignored(self, name: str) -> bool:
        """Whether a canonical name may be left over."""
        return True


class HeadCopy:
    """A copy of a target's head, of 8 bits if it is `small`; without them a tied head remains the embedding."""

    def __init__(self, target: Decoder, small: bool) -> None:
        text, head = target.config.text, target.head
        assert head is not None, "a model with a pooler has no drafter"
        self.config, self.dtype, self.device, self._target = target.config, target.dtype, target.device, target
        self.head = Head(text.vocab_size, text.hidden_size, text.tie_embeddings and not small, text.head_bias)
        self.head.scheme = head.scheme
        if small:
            quantise(self.head)

    def weight_table(self) -> Table:
        """See Weighted."""
        table = self._target.weight_table()
        rows = tuple(row for row in table.rows if row.target == "head")
        return OfHead(rows, table.prefixes, (), table.spelled, True)

    @property
    def num_bytes(self) -> int:
        """Bytes on an accelerator."""
        return weight_bytes(self)

    def load(self, load_format: str, placement: Placement | None, seed: int) -> None:
        """Fills the copy; the target has its weights."""
        if self.config.text.tie_embeddings:
            place = placement or Placement(self.dtype, self.device)
            self.head.fill({"weight": [self._target.embed.table]}, place)
        else:
            load_weights(self, self.config.folder, load_format, placement, seed)

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [n, hidden] -> new logits [n, vocabulary], before the target's scale and soft cap."""
        return self.head(hidden)


class LentHead:
    """The target's head, or a copy of it."""

    def __init__(self, target: Decoder, small: bool) -> None:
        codes = target.head is None or target.head.scheme is not UNQUANTISED
        small = small and not codes
        self._target, self.copy = target, HeadCopy(target, small) if small or target.is_dealt else None

    def products(self, hidden: Tensor) -> Tensor:
        """hidden [n, hidden] -> new logits [n, vocabulary], before the target's scale and soft cap."""
        return self._target.products(hidden) if self.copy is None else self.copy(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, hidden] -> logits [n, vocabulary]."""
        return self._target.scaled(self.products(hidden))
