"""MediaExperts: two groups of experts in a layer, one for the tokens of media and one for all other tokens.

    x += sum over k of weights[k] * expert[chosen[k]](n) (+ shared(n))     chosen: experts of the token's group

Both groups route all rows; the rows of the other group then choose no expert, so the products read no weight for them.
Whether a token belongs to media depends on its id alone, so its experts are the same in a prompt, in a chunk of a
prompt, and in a row that computes its tokens again. The shared MLP is that of the first group.

Thread: device. In: the residual stream and the ids of a step. Out: an Addend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from engine.base.model_config import ExpertsConfig, TextConfig
from engine.kernels.gemm.pack import Placement
from engine.kernels.moe.capture import Capture
from engine.layers.moe import Mixture, PerExpert, Router, SparseMLP
from engine.layers.norm import Normed
from engine.weights.table import Wanted


class MediaTokens:
    """Which tokens of the current forward belong to media. Owner: the model; every layer with two groups reads it."""

    __slots__ = ("_ids", "of_media", "others")

    of_media: Tensor  # [T, 1] bool
    others: Tensor

    def __init__(self, ids: Sequence[int], device: str) -> None:
        """ids: the tokens that stand for a tower's rows, and the tokens around them."""
        self._ids = torch.tensor(sorted(set(ids)), device=device)

    def begin(self, token_ids: Tensor) -> None:
        """Begins a forward; token_ids: int64 [T]."""
        self._set((token_ids[:, None] == self._ids).any(1, keepdim=True))

    def keep(self, index: Tensor) -> None:
        """Restricts the rest of the forward to the tokens of `index`, int64 [S]."""
        self._set(self.of_media.index_select(0, index))

    def _set(self, of_media: Tensor) -> None:
        self.of_media, self.others = of_media, ~of_media


class TurnedRouter(Router):
    """A router whose matrix is transposed in the checkpoint: [hidden, E]."""

    __slots__ = ("kind",)

    in_floats: ClassVar[bool] = True

    def __init__(self, hidden_size: int, num_experts: int, kind: str) -> None:
        super().__init__(hidden_size, num_experts, biased=False)
        self.kind = kind  # the tensor's name within its module in the checkpoint

    def expects(self) -> dict[str, tuple[Wanted | None, ...]]:
        return {self.kind: (Wanted((self.hidden_size, self.num_experts)),)}

    def fill(self, pieces: dict[str, list[Tensor | None]], placement: Placement) -> None:
        (piece,) = pieces[self.kind]
        assert piece is not None
        super().fill({"weight": [piece.T.contiguous()]}, placement)


class JoinedCorrections(PerExpert):
    """The corrections of several routers, which are the rows of one tensor in the checkpoint."""

    __slots__ = ("routers",)

    def __init__(self, kind: str, routers: Sequence[PerExpert], num_experts: int) -> None:
        super().__init__(kind, len(routers), num_experts)
        self.routers = routers

    def fill(self, pieces: dict[str, list[Tensor | None]], placement: Placement) -> None:
        (piece,) = pieces[self.kind]
        assert piece is not None
        for router, row in zip(self.routers, piece, strict=True):
            router.fill({router.kind: [row]}, placement)


class MediaExperts:
    """Replaces a SparseMLP."""

    __slots__ = ("corrections", "media", "text", "tokens")

    def __init__(self, text: TextConfig, config: ExpertsConfig, tokens: MediaTokens) -> None:
        """In the checkpoint the experts of media follow the others; both groups have the same number of experts."""
        count, self.tokens = config.routing.num_experts, tokens
        self.text = SparseMLP(text, config)
        self.media = SparseMLP(text, replace(config, width=config.media_width, shared_width=0, first=count))
        self.text.router = TurnedRouter(text.hidden_size, count, "weight")
        self.media.router = TurnedRouter(text.hidden_size, count, "weight_1")
        both = [each.correction for each in (self.text, self.media) if each.correction is not None]
        self.corrections = JoinedCorrections("e_score_correction_bias", both, count)

    def __call__(self, x: Normed, count: Tensor | None, capture: Capture | None) -> Mixture:
        """Arguments as SparseMLP's."""
        of_media = self.tokens.of_media
        self.media.number = self.text.number
        text, media = self.text(x, count, capture, of_media), self.media(x, count, capture, self.tokens.others)
        assert isinstance(text, Mixture)
        assert isinstance(media, Mixture)
        assert text.weights is not None
        assert media.weights is not None
        made = torch.where(of_media[:, :, None], media.whole(), text.whole())
        weights, own = torch.where(of_media, media.weights, text.weights), None
        if text.own is not None and media.own is not None:
            own = torch.where(of_media, media.own, text.own)
        return Mixture(made, weights, text.shared, None, count, own, text.held)
