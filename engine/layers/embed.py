"""Embedding, Positions and Head: token ids -> rows of the residual stream, and hidden states -> logits.

Owner: the model; read only after loading. If the checkpoint ties them, the embedding fills the head from its table.
On an accelerator both share the table; on a CPU the head packs a second copy, because it reads in a different order.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from engine.base.dealing import width
from engine.kernels.gemm.pack import Placement
from engine.layers.linear import Linear
from engine.quant.base import weight_dtype
from engine.weights.table import Wanted


class Head(Linear):
    """logits = hidden W^T (+ b)."""

    __slots__ = ("span", "tied")

    def __init__(
        self, vocab_size: int, hidden_size: int, tied: bool, bias: bool = False, span: tuple[int, int] | None = None
    ) -> None:
        """`span`: first and end of the tokens whose logits are computed; None: all tokens."""
        self.span = span or (0, vocab_size)
        super().__init__(hidden_size, self.span[1] - self.span[0], bias=bias)
        self.rows = ((width(vocab_size),),)
        self.tied = tied

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [n, hidden_size] -> [n, vocab_size], on a CPU in float32, so that the logits are not rounded to
        bfloat16.

        On an accelerator in hidden's dtype, which the samplers read, with half the bytes.
        """
        return super().__call__(hidden.to(torch.float32) if hidden.is_cpu else hidden)

    def expects(self) -> dict[str, tuple[Wanted | None, ...]]:
        return {} if self.tied else super().expects()


class Positions:
    """Learned rows for positions, which are added to the embeddings."""

    __slots__ = ("hidden_size", "num_positions", "offset", "table")

    table: Tensor  # [offset + num_positions, hidden_size]

    def __init__(self, num_positions: int, hidden_size: int, offset: int = 0) -> None:
        """`offset`: rows of the table before the first position's row."""
        self.num_positions = num_positions
        self.hidden_size = hidden_size
        self.offset = offset

    def __call__(self, positions: Tensor) -> Tensor:
        """positions [T] int64, each below num_positions -> a new [T, hidden_size]."""
        return functional.embedding(positions + self.offset, self.table)

    def expects(self) -> dict[str, tuple[Wanted | None, ...]]:
        return {"weight": (Wanted((self.offset + self.num_positions, self.hidden_size)),)}

    def fill(self, pieces: dict[str, list[Tensor | None]], placement: Placement) -> None:
        (piece,) = pieces["weight"]
        assert piece is not None
        self.table = piece.to(placement.device, placement.dtype, copy=piece.is_cpu)


class Embedding:
    """Rows of a table, in the activations' dtype."""

    __slots__ = ("dtype", "head", "hidden_size", "table", "vocab_size")

    table: Tensor  # [vocab_size, hidden_size], in the dtype of weight_dtype

    def __init__(self, vocab_size: int, hidden_size: int, head: Head | None) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.head = head
        self.dtype = torch.float32

    def __call__(self, token_ids: Tensor) -> Tensor:
        """token_ids [T] int64, each below vocab_size -> a new [T, hidden_size]; one launch on an accelerator."""
        return functional.embedding(token_ids, self.table).to(self.dtype)

    def expects(self) -> dict[str, tuple[Wanted | None, ...]]:
        return {"weight": (Wanted((self.vocab_size, self.hidden_size)),)}

    def fill(self, pieces: dict[str, list[Tensor | None]], placement: Placement) -> None:
        piece = pieces["weight"][0]
        assert piece is not None
        self.dtype = placement.dtype
        # On a CPU the piece is a view of the file and is copied; on an accelerator the model takes over the piece.
        self.table = piece.to(placement.device, weight_dtype(piece.dtype, placement), copy=piece.is_cpu)
        if self.head is not None and self.head.tied:
            first, end = self.head.span
            self.head.fill({"weight": [self.table[first:end]]}, placement)
