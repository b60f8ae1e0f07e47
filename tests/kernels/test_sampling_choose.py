"""The draws of `choose` on a CPU follow the distribution of top_k_top_p, however a row's token is found."""

import numpy as np
import pytest
import torch

from engine.kernels.sampling import choose as module
from engine.kernels.sampling import cut
from engine.kernels.sampling.choose import choose, choose_room
from engine.kernels.sampling.logprobs import most_likely
from engine.kernels.sampling.top_k_top_p import top_k_top_p
from tests.kernels.sampling import fits, rows_of

VOCAB, DRAWS = 150, 1000
RULES = [(1.0, 0, 0.9, 0.0), (0.8, 0, 0.6, 0.0), (0.8, 0, 0.3, 0.0), (1.0, 20, 0.8, 0.0), (1.2, 0, 0.8, 0.05)]


def seen(line, rules, draws=DRAWS):
    rows, room = rows_of(draws, [rules], vocab=VOCAB), choose_room(draws, VOCAB, "cpu")
    rows.slots.seed.fill_(11)
    choose(rows.tokens, rows.slots, rows.tables, room, line.expand(draws, -1), rows.row, rows.slot, rows.place)
    return np.bincount(rows.tokens[1:-1].numpy(), minlength=VOCAB)


def weights(line, rules):
    fields = (torch.tensor([value]) for value in rules)
    return top_k_top_p(line[None], *fields)[0].double().numpy()


@pytest.mark.slow
@pytest.mark.parametrize("rules", RULES)
def test_draws_follow_the_distribution(rules):
    line = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3))
    assert fits(seen(line, rules), weights(line, rules))


@pytest.mark.slow
def test_draws_follow_the_distribution_where_trials_run_out(monkeypatch):
    monkeypatch.setattr(module, "TRIALS", 1)
    monkeypatch.setattr(cut, "TRIALS", 1)
    line = torch.randn(VOCAB, generator=torch.Generator().manual_seed(4))
    assert fits(seen(line, RULES[1]), weights(line, RULES[1]))


def test_nothing_but_the_largest_logit_where_top_p_is_next_to_nothing():
    line = torch.randn(VOCAB, generator=torch.Generator().manual_seed(5))
    counts = seen(line, (1.0, 0, 1e-6, 0.0), draws=20)
    assert counts[line.argmax()] == 20


@pytest.mark.parametrize("k", [0, 1, 2, 20, 399])
def test_of_equal_logits_the_least_tokens_are_the_most_likely(k):
    logits = (torch.randn(5, 400) * 3).bfloat16().float()  # with many equal values
    logits[1, ::2] = float("-inf")
    logits[2, 7] = float("inf")
    logits[3] = -5.0
    for row, ids in zip(logits.tolist(), most_likely(logits, k).tolist()):
        assert ids == sorted(range(400), key=lambda token: (-row[token], token))[:k]
