"""Vocabulary: a drafter's embedding and head, its own or those that the target lends, and the tokens of the head.

Owner: device thread; weights are filled once. A head of the drafter may have fewer tokens than the target; `d2t` says
which. Logits are always those of the target's tokens, so a draw takes the noise of the target's own draw.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from engine.base.drafts import FLAG
from engine.base.errors import ConfigError
from engine.kernels.gemm.pack import Placement
from engine.layers.embed import Embedding, Head
from engine.models.base.decoder import Decoder
from engine.models.drafters.small_head import LentHead, quantise
from engine.weights.table import Row, Wanted

UNLIKELY = -1e30  # logit of the target's tokens that the drafter's head lacks; finite, as the samplers want it
ROWS = (
    Row(("embed_tokens",), "vocabulary.embed"),
    Row(("lm_head",), "vocabulary.head", "rows"),
    Row(("",), "vocabulary.token_map"),
)


class TokenMap:
    """`d2t`: the target's token of each token of the drafter's head, less the token's own number."""

    tokens: Tensor  # [D] int64

    def __init__(self, count: int, vocab_size: int) -> None:
        self.count, self.vocab_size = count, vocab_size

    def expects(self) -> dict[str, tuple[Wanted | None, ...]]:
        return {"d2t": (Wanted((self.count,), (torch.int64,)),)}

    def fill(self, pieces: dict[str, list[Tensor | None]], placement: Placement) -> None:
        piece = pieces["d2t"][0]
        assert piece is not None
        tokens = piece + torch.arange(self.count, device=piece.device)
        wrong = ((tokens < 0) | (tokens >= self.vocab_size)).nonzero().flatten()
        if len(wrong):
            entry = int(wrong[0])
            raise ConfigError(
                f"{FLAG}: d2t[{entry}]={int(piece[entry])} leads to token {int(tokens[entry])}; the target has tokens "
                f"0 to {self.vocab_size - 1}"
            )
        self.tokens = tokens.to(placement.device)

    def widened(self, logits: Tensor) -> Tensor:
        """Logits [n, D] -> [n, vocabulary of the target]."""
        wide = logits.new_full((len(logits), self.vocab_size), UNLIKELY)
        return wide.index_copy_(1, self.tokens, logits)


class Vocabulary:
    """Embedding, head and token map; None: the target's, or no map."""

    def __init__(
        self, target: Decoder, names: Collection[str], hidden_size: int, head_size: int, small: bool = False
    ) -> None:
        """`names`: canonical names of the files' tensors; `head_size`: tokens of the drafter's head, if it has one;
        `small`: the head's, see small_head."""
        text = target.config.text
        maps, fits = "d2t" in names or head_size != text.vocab_size, hidden_size == text.hidden_size
        heads = "lm_head.weight" in names or maps or not fits or target.head is None
        embeds = "embed_tokens.weight" in names or not fits
        self.embed = Embedding(text.vocab_size, hidden_size, None) if embeds else None
        self.head = Head(head_size, hidden_size, False) if heads else None
        self.token_map = TokenMap(head_size, text.vocab_size) if maps else None
        self.lent = None if heads else LentHead(target, small)
        if small and self.head is not None:
            quantise(self.head)
        self._target = target

    def embedded(self, token_ids: Tensor) -> Tensor:
        """token_ids [T] int64 -> a new [T, hidden]."""
        return (self._target.embed if self.embed is None else self.embed)(token_ids)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, hidden] -> logits [n, vocabulary of the target]."""
        return self.widened(self.products(hidden) if self.lent is None else self.lent.logits(hidden))

    def products(self, hidden: Tensor) -> Tensor:
        """hidden [n, hidden] -> new logits [n, tokens of the head], without the target's scale and soft cap."""
        if self.lent is not None:
            return self.lent.products(hidden)
        assert self.head is not None
        return self.head(hidden)

    def widened(self, logits: Tensor) -> Tensor:
        """Logits [n, tokens of the head] -> logits [n, vocabulary of the target]."""
        return logits if self.token_map is None else self.token_map.widened(logits)
