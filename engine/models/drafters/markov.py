"""Markov heads: what the token before adds to the logits of a guess. User: engine/models/drafters/dspark.

    vanilla   bias = W2 e                        e = W1[token before],  h: the query's hidden state
    gated     bias = W2 (e * sigmoid(gate (h | e)))
    rnn       g, c, o = cell (s | e | h);  bias = W2 tanh(o);  next s = s sigmoid(g) + tanh(c) (1 - sigmoid(g))

W1 counts the target's tokens, W2 the tokens of the drafter's head. The state s is zero before a block's first query,
and passes from query to query. Thread: device. Source: the files of deepseek-ai/DeepSpec and vllm-project/speculators.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.layers.embed import Embedding, Head
from engine.layers.linear import Linear
from engine.weights.table import Row

ROWS = (
    Row(("markov_head.markov_w1",), "markov.token_before"),
    Row(("markov_head.markov_w2",), "markov.bias"),
    Row(("markov_head.gate_proj",), "markov.gate"),
    Row(("markov_head.joint_proj",), "markov.cell"),
)


class Markov:
    """`vanilla`: the bias depends on the token before alone."""

    gate: Linear | None = None
    cell: Linear | None = None

    def __init__(self, vocab_size: int, head_size: int, rank: int, hidden_size: int) -> None:
        """`vocab_size`: tokens of the target, `head_size`: of the drafter's head."""
        self.token_before = Embedding(vocab_size, rank, None)
        self.bias = Head(head_size, rank, False)

    def __call__(self, logits: Tensor, hidden: Tensor, before: Tensor, state: Tensor | None) -> Tensor | None:
        """Adds to logits [B, tokens of the head] of guesses behind the tokens `before` int64 [B]; hidden [B, H].

        In, out: the state [B, rank] before and behind these queries; None: zeros, or a head without one.
        """
        known, state = self.mixed(hidden, self.token_before(before), state)
        self.bias.add_to(logits, known.to(logits.dtype))
        return state

    def begun(self, hidden: Tensor, before: Tensor) -> Tensor | None:
        """The state behind a block's first queries, if these guess nothing: [B, rank]; arguments as above."""
        return None

    def mixed(self, hidden: Tensor, known: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The factor of W2 and the state behind the queries; known [B, rank]: of the tokens before."""
        return known, None


class GatedMarkov(Markov):
    """`gated`: the hidden state decides how much each number of the token before counts."""

    def __init__(self, vocab_size: int, head_size: int, rank: int, hidden_size: int) -> None:
        super().__init__(vocab_size, head_size, rank, hidden_size)
        self.gate: Linear = Linear(hidden_size + rank, rank, bias=True)

    def mixed(self, hidden: Tensor, known: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """See Markov."""
        return known * self.gate(torch.cat([hidden, known], 1)).sigmoid(), None


class RecurrentMarkov(Markov):
    """`rnn`: the bias depends on all tokens of the block before the guess."""

    def __init__(self, vocab_size: int, head_size: int, rank: int, hidden_size: int) -> None:
        super().__init__(vocab_size, head_size, rank, hidden_size)
        self.cell: Linear = Linear(2 * rank + hidden_size, 3 * rank, bias=True)

    def begun(self, hidden: Tensor, before: Tensor) -> Tensor | None:
        """See Markov."""
        return self.mixed(hidden, self.token_before(before), None)[1]

    def mixed(self, hidden: Tensor, known: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """See Markov."""
        state = torch.zeros_like(known) if state is None else state
        keeps, new, out = self.cell(torch.cat([state, known, hidden], 1)).chunk(3, 1)
        return out.tanh(), torch.lerp(new.tanh(), state, keeps.sigmoid())


TYPES: dict[str, Callable[[int, int, int, int], Markov]] = {
    "vanilla": Markov,
    "gated": GatedMarkov,
    "rnn": RecurrentMarkov,
}
