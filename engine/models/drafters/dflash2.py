"""DFlash2: DFlash with convolutions inside the block around each sublayer, and drafts chosen among candidates in order.

    rows = norm(x);  delta = kernel_projection(rows);  x += conv_1(sublayer(conv_0(rows)))     conv: block_convolution
    candidates of a place: the K largest logits;  the draft: argmax of logit[c] + <A[token before] * P h, B[c]>

The convolutions regard the block alone, so keys and values of the context are DFlash's. Tokens that are no candidates
cannot become drafts. Thread: device. Source: the files and the code of z-lab/dflash.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.attention.meta import AttentionMeta
from engine.base.model_config import LayerConfig, TextConfig
from engine.cache.spec import LayerCache
from engine.kernels.block_convolution import block_convolution
from engine.kernels.gemm.pack import Placement
from engine.layers.linear import Linear
from engine.layers.norm import Normed
from engine.layers.rope import Rope
from engine.layers.stream import Made, Product, Stream
from engine.models.base.decoder import Decoder
from engine.models.drafters import vocabulary
from engine.models.drafters.base import Block, Kind, Passed
from engine.models.drafters.dflash import IGNORED, ROWS, SPELLED, BlockLayer, DFlash
from engine.models.drafters.dflash2_settings import DFlash2Config
from engine.models.drafters.vocabulary import UNLIKELY
from engine.weights.files import Shard
from engine.weights.table import Row, Table, Wanted

FURTHER = (
    Row(("layers.*.attention_conv",), "layers.*.attention_conv"),
    Row(("layers.*.attention_conv.kernel_projection",), "layers.*.attention_conv.projection"),
    Row(("layers.*.mlp_conv",), "layers.*.mlp_conv"),
    Row(("layers.*.mlp_conv.kernel_projection",), "layers.*.mlp_conv.projection"),
    Row(("candidate_selector",), "codebooks"),
    Row(("candidate_selector.hidden_projection",), "projection"),
)
PREDECESSORS, SUCCESSORS = "predecessor_codebook", "successor_codebook"


class Convolution:
    """Both convolutions of a sublayer; the sublayer's normed input decides on their kernels."""

    base: Tensor  # [2, taps, H] float32

    def __init__(self, hidden_size: int, taps: int, group: int) -> None:
        self.shape = 2, taps, hidden_size
        self.projection = Linear(hidden_size, 2 * taps * (hidden_size // group))

    def kernels(self, rows: Tensor) -> Tensor:
        """What rows [N, H] add to the kernels, [N, 2 * taps * groups]."""
        return self.projection(rows)

    def __call__(self, rows: Tensor, kernels: Tensor, before: Tensor, side: int) -> Tensor:
        """A new [N, H]; side 0: a sublayer's input, 1: its output."""
        return block_convolution(rows, kernels, self.base, before, side)

    def expects(self) -> dict[str, tuple[Wanted | None, ...]]:
        return {"base_kernel": (Wanted(self.shape),)}

    def fill(self, pieces: dict[str, list[Tensor | None]], placement: Placement) -> None:
        piece = pieces["base_kernel"][0]
        assert piece is not None
        self.base = piece.to(placement.device, torch.float32, copy=True)


class Codebooks:
    """A and B: `rank` numbers of every token, as a token before a draft and as a draft."""

    predecessors: Tensor  # [V, rank], as the next
    successors: Tensor

    def __init__(self, vocab_size: int, rank: int) -> None:
        self.shape = vocab_size, rank

    def expects(self) -> dict[str, tuple[Wanted | None, ...]]:
        return {PREDECESSORS: (Wanted(self.shape),), SUCCESSORS: (Wanted(self.shape),)}

    def fill(self, pieces: dict[str, list[Tensor | None]], placement: Placement) -> None:
        before, after = pieces[PREDECESSORS][0], pieces[SUCCESSORS][0]
        assert before is not None
        assert after is not None
        self.predecessors = before.to(placement.device, placement.dtype, copy=True)
        self.successors = after.to(placement.device, placement.dtype, copy=True)


class ConvolvedLayer(BlockLayer):
    """One decoder layer over the block."""

    def __init__(self, text: TextConfig, layer: LayerConfig, taps: int, group: int) -> None:
        super().__init__(text, layer)
        self.attention_conv, self.mlp_conv = (Convolution(text.hidden_size, taps, group) for _ in range(2))

    def __call__(self, x: Stream, rope: Rope, meta: AttentionMeta, cache: LayerCache, before: Tensor) -> None:
        """See BlockLayer."""
        rows = x.normed(self.attention_norm).rows()
        kernels = self.attention_conv.kernels(rows)
        given = Normed(None, self.attention_conv(rows, kernels, before, 0))
        made = Product(self.o, self.attention(given, rope, meta, cache)).value()
        x.add(Made(self.attention_conv(made, kernels, before, 1)))
        rows = x.normed(self.mlp_norm).rows()
        kernels = self.mlp_conv.kernels(rows)
        made = self.mlp(Normed(None, self.mlp_conv(rows, kernels, before, 0))).value()
        x.add(Made(self.mlp_conv(made, kernels, before, 1)))


class DFlash2(DFlash):
    """One drafter; the target lends its embedding and head if the files have none."""

    kind: Kind = "walk"
    named = "DFlash2"
    confident = False

    def __init__(self, config: DFlash2Config, target: Decoder, shards: list[Shard]) -> None:
        super().__init__(config, target, shards)
        self.codebooks = Codebooks(config.text.vocab_size, config.rank)
        self.projection = Linear(config.text.hidden_size, config.rank)
        self._candidates = config.candidates

    def layers_of(self, config: DFlash2Config) -> Sequence[BlockLayer]:
        """See DFlash."""
        return [ConvolvedLayer(config.text, layer, config.taps, config.group) for layer in config.text.layers]

    def weight_table(self) -> Table:
        """The tensors, by the names of z-lab's files."""
        return Table(ROWS + vocabulary.ROWS + FURTHER, ("model.",), IGNORED, SPELLED)

    def passed(self, queries: Block) -> Passed:
        """See WalkingDrafter."""
        hidden = self.hidden(queries)
        values, tokens = self.products(hidden).float().topk(self._candidates)
        return values, tokens, self.projection(hidden)

    def begun(self, found: Passed, queries: Tensor, before: Tensor) -> Tensor | None:
        """See WalkingDrafter."""
        return None

    def walked(
        self, found: Passed, queries: Tensor, before: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """See WalkingDrafter."""
        values, tokens, projected = (each.index_select(0, queries) for each in found)
        known = (self.codebooks.predecessors[before] * projected).float()  # [B, rank]
        scores = values + (known[:, None] * self.codebooks.successors[tokens]).sum(2)
        wide = scores.new_full((len(before), self.text.vocab_size), UNLIKELY)
        return wide.scatter_(1, tokens, scores), None
