"""The sampling kernels on a real GPU: thresholds and draws against float64 definitions."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from _fast.layout import SlotWord
from engine.kernels.sampling.choose import choose, choose_room
from engine.kernels.sampling.logprobs import log_sum, logprobs
from engine.kernels.sampling.rules import rule_tables
from engine.kernels.sampling.top_logprobs import LINE, MOST, top_logprobs
from engine.kernels.sampling.top_p_rejection import LEAST_P
from engine.kernels.step_tensors import empty_slots
from tests.kernels.sampling import KINDS, allowed_tokens, fits, rows_of, with_rules

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def chosen(logits, rows):
    """(tokens by row, thresholds) from poisoned outputs; tokens must not depend on whether thresholds are requested."""
    room = choose_room(len(logits), logits.shape[1], "cuda")
    for field in (room.best, room.mass, room.moments, room.bounds):
        field.fill_(float("nan"))
    room.chosen.fill_(2**30)
    tokens = torch.full_like(rows.tokens, -7)
    choose(tokens, rows.slots, tables_of(rows, logits), room, logits, rows.row, rows.slot, rows.place)
    assert tokens[0] == tokens[-1] == -7
    again = torch.full_like(tokens, -7)
    choose(again, rows.slots, tables_of(rows, logits), room, logits, rows.row, rows.slot, rows.place, thresholds=True)
    assert torch.equal(again, tokens)
    return tokens[rows.row.long()], room.bounds[:, 0]


def tables_of(rows, logits):
    """The rows' own tables if their vocabulary fits, else empty tables."""
    vocab = logits.shape[1]
    return rows.tables if rows.tables.counts.shape[1] == vocab else rule_tables(1, vocab, logits.device)


def logits_of(rows, vocab, spread, dtype):
    return (torch.randn(rows, vocab, device="cuda") * spread).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("vocab", "spread"), [(151936, 3.0), (151936, 1.0), (32000, 2.0), (1000, 2.0), (50257, 4.0)])
def test_thresholds_are_those_of_sorted_values(vocab, spread, dtype):
    rows = rows_of(len(KINDS), KINDS, "cuda")
    logits = logits_of(len(KINDS), vocab, spread, dtype)
    logits[:, 5::11] = float("-inf")
    tokens, least = chosen(logits, rows)
    for row, kind in enumerate(KINDS):
        line = logits[row].float()
        if kind[0] == 0:
            assert tokens[row] == int((line == line.max()).nonzero()[0])
            continue
        keep = allowed_tokens(logits[row], *kind)
        assert keep[int(tokens[row])]
        differ = ((line >= least[row]) & line.isfinite()).cpu().numpy() != keep
        # Rounding may move a bound of mass (or of min_p) past one value, never further.
        values = np.unique(line.cpu().numpy()[differ])
        assert len(values) <= (1 if kind[2] < 1 or kind[3] > 0 else 0), kind


@pytest.mark.parametrize("rules", [KINDS[1], KINDS[2], KINDS[4], KINDS[5], KINDS[6], KINDS[9]])
def test_draws_follow_the_distribution(rules):
    vocab, count = 1000, 20_000
    line = logits_of(1, vocab, 2.0, torch.bfloat16)
    rows = rows_of(count, [rules], "cuda")
    rows.slots.seed.fill_(3)
    rows.place.copy_(torch.arange(count))
    tokens, _ = chosen(line.expand(count, -1).contiguous(), rows)
    weight = torch.softmax(line[0].double() / rules[0], 0).cpu().numpy() * allowed_tokens(line[0], *rules)
    assert fits(np.bincount(tokens.cpu().numpy(), minlength=vocab), weight)


@pytest.mark.parametrize("spread", [1.0, 4.0])
@pytest.mark.parametrize("top_p", [0.95, 0.8, LEAST_P, 0.5, 0.1])
def test_tokens_of_top_p_alone_are_the_specified_ones(top_p, spread):
    """Sums differ in their last bits: a bound may move past one value, and a near tie may be decided differently."""
    rows, near = (rows_of(24, [(0.8, 0, top_p, 0.0)], device) for device in ("cuda", "cpu"))
    logits = logits_of(24, 151936, spread, torch.bfloat16)
    tokens, _ = chosen(logits, rows)
    room = choose_room(24, 151936, "cpu")
    choose(near.tokens, near.slots, tables_of(near, logits.cpu()), room, logits.cpu(), near.row, near.slot, near.place)
    assert (tokens.cpu() == near.tokens[1:25]).sum() >= 23


@pytest.mark.parametrize("vocab", [151936, 50257])
def test_a_row_keeps_its_token_at_any_size_and_place(vocab):
    size = 256
    rows = rows_of(size, KINDS, "cuda")
    logits = logits_of(size, vocab, 2.0, torch.bfloat16)
    together, _ = chosen(logits, rows)
    order = torch.randperm(size, device="cuda")
    turned, _ = chosen(logits[order], replace(rows, slot=rows.slot[order], place=rows.place[order]))
    assert torch.equal(turned, together[order])
    for few in (1, 3, 17, 129, 255):
        part = replace(rows, row=rows.row[-few:], slot=rows.slot[-few:], place=rows.place[-few:])
        assert torch.equal(chosen(logits[-few:], part)[0], together[-few:])


def test_rows_that_are_no_numbers():
    rows = rows_of(256, KINDS, "cuda")
    logits = logits_of(256, 151936, 2.0, torch.bfloat16)
    logits[3, 151935], logits[17, 0], logits[31, 70000] = float("nan"), float("inf"), float("nan")
    logits[100] = float("-inf")
    logits[101], logits[101, 9] = float("-inf"), -1e30
    rows.row[200] = -1
    tokens, _ = chosen(logits, replace(rows, row=rows.row.clone()))
    bad = (tokens == -1).nonzero()[:, 0].tolist()
    assert bad == [3, 17, 31, 100]
    assert tokens[101] == 9


def test_replayed_steps_are_the_captured_ones():
    rows = rows_of(64, KINDS, "cuda")
    room = choose_room(64, 151936, "cuda")
    logits, fresh = (logits_of(64, 151936, 2.0, torch.bfloat16) for _ in range(2))

    def run():
        choose(rows.tokens, rows.slots, tables_of(rows, logits), room, logits, rows.row, rows.slot, rows.place)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    logits.copy_(fresh)
    rows.place.add_(5)
    graph.replay()
    replayed = rows.tokens.clone()
    run()
    assert torch.equal(replayed, rows.tokens)


@pytest.mark.parametrize("vocab", [151936, 50257])
def test_rules(vocab):
    """Rows with and without rules in one step: logits after the rules, tokens, and counts."""
    rows = with_rules(rows_of(len(KINDS) * 2, KINDS, "cuda"), vocab)
    near = with_rules(rows_of(len(KINDS) * 2, KINDS), vocab)
    logits = logits_of(len(rows.row), vocab, 2.0, torch.bfloat16)
    room, near_room = (choose_room(len(rows.row), vocab, device) for device in ("cuda", "cpu"))
    for _ in range(3):
        for step, work, x in ((rows, room, logits), (near, near_room, logits.cpu())):
            choose(step.tokens, step.slots, step.tables, work, x, step.row, step.slot, step.place)
        assert torch.allclose(room.work[::2].cpu(), near_room.work[::2], rtol=1e-5, atol=1e-5)
        assert torch.equal(rows.tokens.cpu(), near.tokens)
        assert torch.equal(rows.tables.counts.cpu(), near.tables.counts)
        assert torch.equal(rows.tables.seen.cpu(), near.tables.seen)
    plain = rows_of(len(KINDS) * 2, KINDS, "cuda")
    assert torch.equal(chosen(logits, plain)[0][1::2], rows.tokens[1:-1][1::2]), "the company of rules changes nothing"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocab", [151936, 50257, 1000])
def test_top_log_probabilities(vocab, dtype):
    """Rows request 0 to 20 top log-probabilities, or none at all; the bits are equal in any batch."""
    count = 64
    logits = logits_of(count, vocab, 3.0, dtype)  # with many equal values
    logits[3, ::2] = float("-inf")
    tokens = torch.randint(vocab, (count,), device="cuda", dtype=torch.int32)
    slots = empty_slots(count, 1, 1, "cuda")
    tops = torch.zeros(count, -(-vocab // 64), dtype=torch.int32, device="cuda")
    asked = torch.arange(count, dtype=torch.int32) % 22
    slots.word(SlotWord.TOP_LOGPROBS)[:count] = asked.cuda()
    row, home = torch.arange(count, dtype=torch.int32, device="cuda"), torch.ones(1, dtype=torch.int32, device="cuda")
    ring = torch.full((2, count, LINE), -9, dtype=torch.int32, pin_memory=True)
    top_logprobs(ring, tops, logits, slots, tokens, home, row, row)
    torch.cuda.synchronize()
    own, rank, ids, values = (each.cpu() for each in logprobs(logits.float(), tokens.long(), 20))
    for number in range(count):
        line, k = ring[1, number], int(asked[number]) - 1
        if k < 0:
            assert (line == -9).all()
            continue
        assert (line[0], line[2]) == (int(tokens[number]), rank[number])
        assert torch.equal(line[3 : 3 + k], ids[number, :k].int())
        told = line[[1, *range(3 + MOST, 3 + MOST + k)]].view(torch.float32)
        assert torch.allclose(told, torch.cat([own[number : number + 1], values[number, :k]]), atol=2e-5)
    again = torch.full_like(ring, -9, pin_memory=True)
    for number in (2, 21, 40):
        part = slice(number, number + 1)
        top_logprobs(again, tops, logits[part], slots, tokens, home, row[part], row[part])
    torch.cuda.synchronize()
    assert torch.equal(again[1, [2, 21, 40]], ring[1, [2, 21, 40]])


@pytest.mark.parametrize("vocab", [151936, 152064, 50257, 1000])
def test_log_probabilities_have_the_same_bits_in_any_company(vocab):
    logits = logits_of(64, vocab, 3.0, torch.bfloat16).float()  # with many equal values
    logits[3, ::2] = float("-inf")
    sums = log_sum(logits)
    assert (sums.double() - logits.double().logsumexp(-1)).abs().max() < 8e-6
    tokens = torch.randint(vocab, (64,), device="cuda")
    want = logprobs(logits, tokens, 20)
    for rows, k in ((1, 20), (2, 1), (3, 7), (5, 20), (16, 2), (33, 12), (63, 20)):
        for first in (0, 64 - rows):
            part = slice(first, first + rows)
            got = logprobs(logits[part].clone(), tokens[part], k)
            assert torch.equal(log_sum(logits[part].clone()), sums[part])
            assert torch.equal(got[0], want[0][part])
            assert torch.equal(got[1], want[1][part])
            assert torch.equal(got[2], want[2][part, :k])
            assert torch.equal(got[3], want[3][part, :k])
