"""The sampling kernels in Triton's interpreter: tokens and thresholds against the references."""

from dataclasses import replace

import pytest
import torch
import triton  # noqa: F401  (must precede the import of any kernel file; TRITON_INTERPRET sets the mode)

from _fast.layout import SamplerWord, SlotWord
from engine.kernels.sampling import choose, cut
from engine.kernels.sampling.choose import choose_reference, choose_room, launch_choose
from engine.kernels.sampling.groups import groups, groups_reference
from engine.kernels.sampling.logprobs import launch_log_sum, log_sum_reference
from engine.kernels.sampling.noise import philox
from engine.kernels.sampling.rules import COUNTED, rule_tables
from engine.kernels.sampling.top_logprobs import LINE, MOST, launch_top_logprobs, top_logprobs_reference
from engine.kernels.sampling.top_n_sigma import MOMENTS
from engine.kernels.sampling.top_p_rejection import LEAST_P
from engine.kernels.step_tensors import empty_slots
from tests.kernels.sampling import (
    KINDS,
    NARROW,
    RULES,
    Rows,
    allowed_tokens,
    applies_to,
    narrow_rows,
    narrowed_tokens,
    rows_of,
    with_rules,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:(overflow|divide by zero|invalid value|All-NaN slice) encountered:RuntimeWarning"
)
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def chosen(run, logits, rows: Rows, thresholds=True):
    """(tokens, last tokens, bounds [rows, 2]) of a run whose output buffers were poisoned."""
    room = choose_room(len(logits), logits.shape[1], "cpu")
    for field in (room.best, room.mass, room.moments, room.bounds):
        field.fill_(float("nan"))
    room.chosen.fill_(2**30)
    room.work.fill_(float("nan"))
    slots = replace(rows.slots, words=rows.slots.words.clone())
    slots.word(SlotWord.LAST_TOKEN).fill_(-9)
    tokens, tables = rows.tokens.clone(), rows.tables
    tables = replace(tables, counts=tables.counts.clone(), seen=tables.seen.clone())  # a run counts its tokens
    if tables.counts.shape[1] != logits.shape[1]:
        tables = rule_tables(1, logits.shape[1], "cpu")
    run(tokens, slots, tables, room, logits, rows.row, rows.slot, rows.place, thresholds)
    return tokens, slots.word(SlotWord.LAST_TOKEN), room.bounds


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocab", "spread"), [(1000, 3.0), (4500, 0.5), (50, 2.0)])
def test_tokens_and_thresholds(vocab, spread, dtype):
    rows = rows_of(len(KINDS) + 1, KINDS)
    logits = (torch.randn(len(rows.row), vocab) * spread).to(dtype)
    logits[:, 3::7] = float("-inf")
    rows.row[-1] = -1
    got, want = chosen(launch_choose, logits, rows), chosen(choose_reference, logits, rows)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    for row, kind in enumerate(KINDS):
        if kind[0] > 0:
            keep = allowed_tokens(logits[row], *kind)
            line = logits[row].float()
            assert torch.equal((line >= got[2][row, 0]) & line.isfinite(), torch.from_numpy(keep)), kind


@pytest.mark.covering(1)
@pytest.mark.parametrize("trials", [1, 16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_top_p_by_trial(dtype, trials, monkeypatch):
    """Logits hardly differ, so every trial takes a pass; after one trial many rows are left to `cut`."""
    monkeypatch.setattr(choose, "TRIALS", trials)
    monkeypatch.setattr(cut, "TRIALS", trials)
    monkeypatch.setattr(choose, "LANES", 16)
    rows = rows_of(6, [(1.0, 0, 0.9, 0.0), (0.7, 0, 0.75, 0.0), (1.0, 0, LEAST_P, 0.0)])
    logits = (torch.randn(6, 3000) * 0.3).to(dtype)
    wanted = chosen(choose_reference, logits, rows)[0]
    assert torch.equal(chosen(launch_choose, logits, rows, thresholds=False)[0], wanted)
    assert torch.equal(chosen(launch_choose, logits, rows)[0], wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_are_no_numbers_and_rows_of_equal_logits(dtype):
    kinds = [KINDS[0], KINDS[1], KINDS[4], KINDS[5], KINDS[8]]
    rows = rows_of(5 * len(kinds), kinds)
    logits = torch.randn(len(rows.row), 200).to(dtype)
    logits[:5, 77] = float("nan")
    logits[5:10, 130] = float("inf")
    logits[10:15] = float("-inf")
    logits[15:20] = -0.0
    logits[15:20, ::2] = 0.0
    logits[20:] = float("-inf")
    logits[20:, 150] = -3e38
    tokens, last, _ = chosen(launch_choose, logits, rows)
    assert tokens[0] == tokens[-1] == -7
    assert (tokens[1:16] == -1).all()
    assert (last[:15] == 0).all()
    assert tokens[16] == 0
    assert ((tokens[16:21] >= 0) & (tokens[16:21] < 200)).all()
    assert (tokens[21:26] == 150).all()
    assert torch.equal(tokens, chosen(choose_reference, logits, rows)[0])
    assert torch.equal(tokens, chosen(launch_choose, logits, rows, thresholds=False)[0])


def test_a_row_keeps_its_token_wherever_it_stands():
    rows = rows_of(len(KINDS), KINDS)
    logits = torch.randn(len(KINDS), 700) * 2
    together = chosen(launch_choose, logits, rows)[0][1:-1]
    turned = [(number * 5 + 3) % len(KINDS) for number in range(len(KINDS))]
    other = replace(rows, slot=rows.slot[turned], place=rows.place[turned])
    assert torch.equal(chosen(launch_choose, logits[turned], other)[0][1:-1], together[turned])
    for row in range(0, len(KINDS), 4):
        one = replace(rows, row=rows.row[:1], slot=rows.slot[row : row + 1], place=rows.place[row : row + 1])
        assert chosen(launch_choose, logits[row : row + 1], one)[0][1] == together[row]


def test_groups_of_strided_rows():
    logits = torch.randn(3, 400)[:, :331]
    slots, tables, work = empty_slots(2, 1, 1, "cpu"), rule_tables(1, 331, "cpu"), torch.zeros(3, 331)
    slots.real(SlotWord.TEMPERATURE).copy_(torch.tensor([0.0, 0.5, 1.0]))
    row, slot = torch.tensor([0, -1, 2]), torch.tensor([1, 0, 2])
    got = torch.full((2, 3, 6), -1.0)
    want = got.clone()
    moments = torch.zeros(3, 1, MOMENTS)
    groups(got[0], got[1], moments, work, logits, slots, tables, row, slot, row)
    groups_reference(want[0], want[1], moments, work, logits, slots, tables, row, slot, row)
    assert torch.allclose(got, want)
    assert (got[:, 1] == -1).all()


def test_philox_gives_the_published_numbers():
    """Vectors from the authors' known-answer file for philox4x32 with ten rounds."""
    assert philox(0, 0, torch.tensor([0]), 0).tolist() == [0x6627E8D5]


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [40, 4500])
def test_rules(vocab, dtype):
    """Rows with and without rules in one step: tokens, logits after the rules, and counts."""
    rows = with_rules(rows_of(len(KINDS) * 2, KINDS), vocab)
    logits = (torch.randn(len(rows.row), vocab) * 2).to(dtype)
    logits[0, 3], logits[4, 7], logits[8, 9] = float("nan"), float("inf"), float("-inf")
    rows.row[6] = -1
    found = []
    for run in (launch_choose, choose_reference):
        tables = replace(rows.tables, counts=rows.tables.counts.clone(), seen=rows.tables.seen.clone())
        room = choose_room(len(logits), vocab, "cpu")
        tokens = rows.tokens.clone()
        run(tokens, rows.slots, tables, room, logits, rows.row, rows.slot, rows.place)
        found.append((tokens, room.work, tables))
    (tokens, work, tables), (want, wanted_work, wanted) = found
    assert torch.equal(tokens, want)
    assert torch.allclose(work, wanted_work, equal_nan=True, rtol=1e-6, atol=1e-6)
    assert not work[6].any()
    assert not work[1::2].any()
    assert tokens[1] == -1
    assert tokens[5] == -1
    assert torch.equal(tables.counts, wanted.counts)
    assert torch.equal(tables.seen, wanted.seen)
    counted = sum(
        int(tokens[1 + row]) >= 0 and row != 6 and bool(RULES[row // 2 % len(RULES)][3] & COUNTED)
        for row in range(0, len(logits), 2)
    )
    assert int((tables.counts - rows.tables.counts).sum()) == counted > 3


def test_a_row_keeps_its_token_among_rows_with_rules():
    vocab = 700
    plain, mixed = rows_of(len(KINDS), KINDS), with_rules(rows_of(len(KINDS), KINDS), vocab)
    logits = (torch.randn(len(KINDS), vocab) * 2).bfloat16()
    alone, beside = chosen(launch_choose, logits, plain)[0], chosen(launch_choose, logits, mixed)[0]
    assert torch.equal(alone[2:-1:2], beside[2:-1:2])


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocab", "spread"), [(60, 2.0), (4500, 1.0)])
def test_top_n_sigma_and_xtc(vocab, spread, dtype):
    """With and without rules: tokens, and which logits may be drawn."""
    rows = narrow_rows(rows_of(len(NARROW), [kind for kind, *_ in NARROW]))
    logits = (torch.randn(len(rows.row), vocab) * spread).to(dtype)
    logits[:, 3::7] = float("-inf")
    got, want = chosen(launch_choose, logits, rows), chosen(choose_reference, logits, rows)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[0], chosen(launch_choose, logits, rows, thresholds=False)[0])
    for row, (line, (low, high)) in enumerate(zip(logits.float(), got[2].tolist())):
        keep = narrowed_tokens(logits[row], *NARROW[row % len(NARROW)], applies_to(rows, row))
        assert torch.equal((line >= low) & (line <= high) & line.isfinite(), torch.from_numpy(keep)), row
    ruled = with_rules(rows, vocab, every=3)
    assert torch.equal(chosen(launch_choose, logits, ruled)[0], chosen(choose_reference, logits, ruled)[0])


def test_rows_without_top_n_sigma_and_xtc_keep_their_tokens_among_rows_with_them():
    plain = rows_of(len(KINDS), KINDS)
    logits = (torch.randn(len(KINDS), 700) * 2).bfloat16()
    alone = chosen(launch_choose, logits, plain)[0]
    words = plain.slots.words.clone()
    narrow = replace(plain, slots=replace(plain.slots, words=words))
    for number, (word, value) in enumerate(
        ((SamplerWord.TOP_N_SIGMA, 1.5), (SamplerWord.XTC_PROBABILITY, 1.0), (SamplerWord.XTC_THRESHOLD, 0.05))
    ):
        narrow.slots.real(word)[: len(KINDS) : 2] = value if number else 0.0
    mixed = chosen(launch_choose, logits, narrow)[0]
    assert torch.equal(alone[2:-1:2], mixed[2:-1:2])
    assert not torch.equal(alone, mixed)
    narrow.slots.real(SamplerWord.XTC_PROBABILITY).fill_(1e-12)  # applies to no token
    assert torch.equal(chosen(launch_choose, logits, narrow)[0], alone)


@pytest.mark.parametrize("vocab", [40, 4096, 9001])
def test_log_sums(vocab):
    logits = torch.randn(5, vocab) * 4
    logits[1] *= 100
    logits[2, 1::2] = float("-inf")
    logits[2, 0] = float("-inf")
    logits[3] = float("-inf")
    logits[4, 7] = float("inf")
    assert torch.allclose(launch_log_sum(logits), log_sum_reference(logits), rtol=1e-6)
    assert launch_log_sum(logits[:0]).shape == (0,)


@pytest.mark.parametrize("as_logits", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [30, 700, 9001])
def test_top_logprobs(vocab, dtype, as_logits):
    slots, rows = empty_slots(6, 1, 1, "cpu"), 6
    slots.word(SlotWord.TOP_LOGPROBS)[:6] = torch.tensor([1, 0, 21, 6, 3, 21])
    logits = (torch.randn(rows, vocab + 3) * 2).round().to(dtype)[:, :vocab]  # with many equal values
    logits[2, ::2], logits[3, 5:], logits[5, 0], logits[5, 1] = float("-inf"), -0.0, -0.0, 0.0
    tokens = torch.randint(vocab, (8,), dtype=torch.int32)
    tokens[3], tokens[5] = 3, 1
    row, slot = torch.tensor([1, 2, 3, 4, -1, 6]).int(), torch.tensor([0, 1, 2, 3, 4, 5]).int()
    tokens[4] = int(logits[3].float().argmax())
    tops, home = torch.zeros(rows, -(-vocab // 64), dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
    found = []
    for run in (launch_top_logprobs, top_logprobs_reference):
        ring = torch.full((3, 8, LINE), -9, dtype=torch.int32)
        run(ring, tops, logits, slots, tokens, home, row, slot, as_logits)
        found.append(ring)
    got, want = found
    values = [1, *range(3 + MOST, LINE)]
    near, far = (ring[..., values].contiguous().view(torch.float32) for ring in found)
    assert torch.allclose(near, far, atol=1e-5, equal_nan=True)
    got[..., values] = want[..., values] = 0
    assert torch.equal(got, want)
    assert (got[1, [0, 2, 5, 7], 0] == -9).all()
