"""DSpark: DFlash whose drafts are chosen in order, each with a bias that follows from the token before it.

    h = DFlash's hidden states of the block;  a query guesses the token behind its place, the newest token's too
    logits = head(h) + bias of a Markov head        confidence = sigmoid(proj(h | W1[token before]))

W1 is the Markov head's (engine/models/drafters/markov). `sample_from_anchor: false`: a query guesses the token of its
own place, as DFlash's. Thread: device. Source: the files of deepseek-ai/DeepSpec; options as vllm-project/speculators
and vLLM read them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.gemm.pack import Placement
from engine.models.base.decoder import Decoder
from engine.models.drafters import markov, vocabulary
from engine.models.drafters.base import Block, Kind, Passed
from engine.models.drafters.dflash import IGNORED, MASK, ROWS, SPELLED, DFlash
from engine.models.drafters.dspark_settings import DSparkConfig
from engine.weights.files import Shard
from engine.weights.table import Row, Table, Wanted

HEADS = (*markov.ROWS, Row(("confidence_head.proj",), "confidence_head"))


class ConfidenceHead:
    """sigmoid(x w + b): how probable it is that a draft is right. Numbers of a token: h, or h | W1[token before]."""

    weight: Tensor  # [size] float32
    bias: Tensor  # [1] float32

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, hidden: Tensor, before: Tensor | None) -> Tensor:
        """hidden [n, H], before [n, rank] or None -> float32 [n]."""
        rows = hidden if before is None else torch.cat([hidden, before.to(hidden.dtype)], 1)
        return torch.sigmoid(rows.float() @ self.weight + self.bias)

    def expects(self) -> dict[str, tuple[Wanted | None, ...]]:
        return {"weight": (Wanted((1, self.size)),), "bias": (Wanted((1,)),)}

    def fill(self, pieces: dict[str, list[Tensor | None]], placement: Placement) -> None:
        weight, bias = pieces["weight"][0], pieces["bias"][0]
        assert weight is not None
        assert bias is not None
        self.weight = weight.to(placement.device, torch.float32, copy=True).flatten()
        self.bias = bias.to(placement.device, torch.float32, copy=True)


class DSpark(DFlash):
    """One drafter; the target lends its embedding and head if the files have none."""

    kind: Kind = "walk"
    named = "DSpark"

    def __init__(self, config: DSparkConfig, target: Decoder, shards: list[Shard]) -> None:
        super().__init__(config, target, shards)
        self.mask = None  # masks have the embedding of their token
        text, rank, self.confident = config.text, config.rank, config.confident
        sizes = text.vocab_size, config.vocab_size, rank, text.hidden_size
        self.markov = markov.TYPES[config.markov_type](*sizes) if rank else None
        width = text.hidden_size + rank * config.confident_of_token
        self.confidence_head = ConfidenceHead(width) if config.confident else None
        self._of_token = config.confident_of_token

    def weight_table(self) -> Table:
        """The tensors, by the names of DeepSpec's files."""
        return Table(ROWS + vocabulary.ROWS + HEADS, ("model.",), (*IGNORED, MASK), SPELLED)

    def passed(self, queries: Block) -> Passed:
        """See WalkingDrafter."""
        hidden = self.hidden(queries)
        return hidden, self.products(hidden)

    def begun(self, found: Passed, queries: Tensor, before: Tensor) -> Tensor | None:
        """See WalkingDrafter."""
        if self.markov is None or not self.skipped:
            return None
        return self.markov.begun(found[0].index_select(0, (queries - 1).clamp(min=0)), before)

    def walked(
        self, found: Passed, queries: Tensor, before: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """See WalkingDrafter."""
        logits = found[1].index_select(0, queries)
        if self.markov is not None:
            state = self.markov(logits, found[0].index_select(0, queries), before, state)
        return self.vocabulary.widened(logits), state

    def confidence(self, found: Passed, queries: Tensor, before: Tensor) -> Tensor:
        """See WalkingDrafter."""
        assert self.confidence_head is not None
        known = self.markov.token_before(before) if self._of_token and self.markov is not None else None
        return self.confidence_head(found[0].index_select(0, queries), known)
