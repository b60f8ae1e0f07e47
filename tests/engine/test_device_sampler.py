"""The device's sampler on CPU tensors, with the kernels' references, compared with the CPU's sampler."""

import warnings
from contextlib import contextmanager

import numpy as np
import pytest
import torch

import engine.sampling.lines
import engine.sampling.pending
from _fast.layout import SLOT_WORDS, SamplerWord, SlotWord
from engine.base.request import SamplingParams, TokenLogprob
from engine.kernels.sampling.bits import unpack
from engine.kernels.sampling.logprobs import logprobs
from engine.kernels.sampling.top_logprobs import LINE, MOST
from engine.kernels.step_tensors import empty_inputs, empty_slots
from engine.sampling.device import DeviceSampler, prompt_logprobs
from engine.sampling.lines import RuleLines
from engine.sampling.rules import RowRules
from engine.sampling.sampler import Sampler
from tests.engine.test_sampler import expected_probs

VOCAB, SLOTS, ROWS = 50, 14, 8
DRY = {"dry_multiplier": 2.0, "dry_breakers": bytes([1, 0, 128, 0, 0, 0, 0])}
ACCELERATOR = pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")
WHERE = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, ACCELERATOR])]
MODES = ["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
RULES = [
    {},
    {"logit_bias": ((6, 5.0), (7, -100.0), (6, 0.5))},
    {"allowed_token_ids": (8, 6, 40)},
    {"bad_words": ((5,), (3, 4, 5), (9, 9))},
    {"min_tokens": 3, "eos_token_ids": (5,), "stop_token_ids": (6, 7)},
    {"min_tokens": 2, "eos_token_ids": (5,), "stop_token_ids": (6,), "ignore_eos": True, "logit_bias": ((6, 9.0),)},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.7, "repetition_penalty": 1.3},
    {"repetition_penalty": 0.7, "allowed_token_ids": tuple(range(0, 50, 3)), "logit_bias": ((3, 2.0),)},
    {"logprobs": 3, "top_n_sigma": 0.5},
    {"logprobs": -1, "presence_penalty": 0.5},
    {"logprobs": 0, "logprob_token_ids": (4, 44), "bad_words": ((2,),)},
    {**DRY, "dry_allowed_length": 1, "repetition_penalty": 1.1},
    {**DRY, "dry_penalty_last_n": 5, "logit_bias": ((6, 5.0),), "logprobs": 2},
]


def logits_of(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


@contextmanager
def without_waiting(where: str):
    """On a GPU, any call that waits for the device raises."""
    if where == "cpu":
        yield
        return
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings(action="ignore"):  # torch warns that this mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def prompt_logprobs_here(project, hidden, asked, vocab, as_logits=False) -> list[TokenLogprob]:
    """Log-probabilities of each prompt position computed alone, in float32 on the host."""
    found = []
    for place, token, wanted in asked.T.tolist():
        own, rank, ids, values = logprobs(project(hidden[[place]]).float(), torch.tensor([token]), wanted, as_logits)
        found.append(TokenLogprob(token, float(own), int(rank), ids[0].tolist(), values[0].tolist()))
    return found


class Both:
    """A DeviceSampler and a Sampler that get the same requests and the same logits."""

    def __init__(self, mode: str = "raw_logprobs", rows: int = ROWS, where: str = "cpu") -> None:
        self.slots = empty_slots(SLOTS, 1, 1, where)
        told = torch.full((2, rows, 1, LINE), -9, dtype=torch.int32, pin_memory=where != "cpu")
        self.device = DeviceSampler(self.slots, SLOTS, rows, VOCAB, where, mode, -1, told)
        self.where = where
        self.here = Sampler(SLOTS, VOCAB, mode)
        self.rows = rows

    def admit(self, slot: int, rules: dict, prompt=(3, 4), seed: int = 1) -> None:
        params, ids = SamplingParams(**rules), np.asarray(prompt, np.int32)
        self.stage(slot, params, ids, seed)
        self.here.admit(slot, params, ids, seed)

    def stage(self, slot: int, params: SamplingParams, ids: np.ndarray, seed: int) -> None:
        """Admission, and what the prep kernel does with the slot's row."""
        words = np.zeros(SLOT_WORDS, np.int32)
        words[SlotWord.SLOT], words[SlotWord.PROMPT_LEN] = slot, len(ids)
        self.device.admit(slot, params, ids, seed, words)
        self.send(words)

    def send(self, words: np.ndarray) -> None:
        self.slots.words[int(words[SlotWord.SLOT])] = torch.from_numpy(words).to(self.where)

    def step(self, logits: torch.Tensor, slots: list[int], index: list[int], record: bool = True):
        """(tokens, log-probabilities) of both samplers, the device's first; tokens by sampled row."""
        inputs = empty_inputs(self.rows, 32, 1, 1, self.where)
        count = len(slots)
        order = torch.randperm(self.rows)[:count].sort().values.int()
        inputs.sample_row[:count] = order
        inputs.sample_slot.fill_(SLOTS)
        inputs.sample_slot[:count] = torch.tensor(slots, dtype=torch.int32)
        inputs.sample_place[:count] = torch.tensor(index, dtype=torch.int32)
        tokens = torch.full((self.rows,), -7, dtype=torch.int32, device=self.where)
        at, there = np.asarray(slots), logits.to(self.where, copy=True)
        for words in self.device.take_lines(at)[0]:
            self.send(words)
        inputs.home.fill_(1)
        pending = None
        with without_waiting(self.where):
            if self.device.is_plain(at):
                self.device.launch_plain(inputs, there, tokens)
            else:
                pending = self.device.launch_special(inputs, there, tokens, at)
        tokens = tokens.cpu()
        got = tokens[order.long()].numpy()
        assert (tokens == -7).sum() == self.rows - count
        assert self.slots.word(SlotWord.LAST_TOKEN)[slots].tolist() == np.maximum(got, 0).tolist()
        if record:
            self.device.record(at, got)
        want, known = self.here.sample(logits.clone(), at, np.asarray(index))
        by_row = self.device.read(1, order.numpy(), at)
        told = {place: by_row[row] for place, row in enumerate(order.tolist()) if row in by_row}
        return got, told | (pending.collect() if pending else {}), want, known


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("where", WHERE)
def test_greedy_rows_with_every_rule_agree_over_several_steps(mode, where):
    both = Both(mode, where=where)
    for slot, rules in enumerate(RULES):
        both.admit(slot, {"temperature": 0.0, **rules}, prompt=[slot, 3, 4])
    number = dict.fromkeys(range(SLOTS), 0)
    for step in range(8):
        # There are more slots than lines, so lines are given up and written again.
        slots = [(step * 5 + k) % SLOTS for k in range(ROWS)]
        logits = logits_of(ROWS, 7)
        got, told, want, known = both.step(logits, slots, [number[slot] for slot in slots])
        assert got.tolist() == want.tolist(), step
        assert told.keys() == known.keys()
        for row, entry in known.items():
            mine = told[row]
            assert (mine.token_id, mine.rank) == (entry.token_id, entry.rank)
            assert mine.logprob == pytest.approx(entry.logprob, abs=1e-5)
            assert mine.top_logprobs == pytest.approx(entry.top_logprobs, abs=1e-5)
            assert len(mine.top_ids) == len(entry.top_ids)
            assert mine.top_ids[:3] == entry.top_ids[:3]
        for slot in slots:
            number[slot] += 1


def test_lines_that_were_given_up_are_written_again():
    both = Both(rows=2)
    for slot in range(5):
        both.admit(slot, {"temperature": 0.0, "frequency_penalty": 0.9, "repetition_penalty": 1.2}, prompt=[slot])
    logits = logits_of(2, 3)
    for step in range(20):
        slots = [step % 5, (step * 2 + 1) % 5]
        if slots[0] == slots[1]:
            continue
        got, _, want, _ = both.step(logits, slots, [step, step])
        assert got.tolist() == want.tolist(), step
    assert len(both.device.lines) == 2


ALONE = [  # rules that the other cases combine
    {"temperature": 0.5},
    {"temperature": 2.0, "top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"top_n_sigma": 1.0, "temperature": 1.5},
    {"xtc_probability": 1.0, "xtc_threshold": 0.04},
]


@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"temperature": 1.5, "top_k": 20, "top_p": 0.7, "min_p": 0.02},
        {"logit_bias": ((3, 2.0),), "top_p": 0.9},
        {"logit_bias": ((3, 2.0),), "top_n_sigma": 2.0, "top_k": 9, "xtc_probability": 1.0, "xtc_threshold": 0.2},
        *(pytest.param(rules, marks=pytest.mark.full) for rules in ALONE),
    ],
)
def test_draws_follow_the_distribution(rules):
    count, vocab = 700, 150  # more than two groups of tokens
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(1)) * 2
    biased = logits[0].clone()
    for token, value in rules.get("logit_bias", ()):
        biased[token] += value
    wanted = expected_probs(biased, **{name: value for name, value in rules.items() if name != "logit_bias"})
    slots = empty_slots(1, 1, 1, "cpu")
    told = torch.zeros(1, count, 1, LINE, dtype=torch.int32)
    sampler = DeviceSampler(slots, 1, count, vocab, "cpu", "raw_logprobs", 20, told)
    words = np.zeros(SLOT_WORDS, np.int32)
    sampler.admit(0, SamplingParams(**rules), np.zeros(1, np.int32), 12, words)
    sampler.take_lines(np.zeros(1, np.int64))
    slots.words[0] = torch.from_numpy(words)
    inputs = empty_inputs(count, 8, 1, 1, "cpu")
    inputs.sample_row.copy_(torch.arange(count))
    inputs.sample_place.copy_(torch.arange(count))
    tokens = torch.empty(count, dtype=torch.int32)
    sampler.launch_plain(inputs, logits.expand(count, -1).contiguous(), tokens)
    seen = np.bincount(tokens.numpy(), minlength=vocab)
    assert seen[wanted == 0].sum() == 0
    used = wanted * count >= 5
    chi2 = ((seen[used] - wanted[used] * count) ** 2 / (wanted[used] * count)).sum()
    freedom = used.sum() - 1
    # Wilson-Hilferty: about the 99.9 % point of the chi-squared distribution.
    assert freedom > 0
    assert chi2 <= freedom * (1 - 2 / (9 * freedom) + 3.09 * np.sqrt(2 / (9 * freedom))) ** 3


def test_equal_logits_have_the_same_order_next_to_a_row_that_wants_all():
    logits = logits_of(3).round()  # with many equal values
    told = []
    for company in ([0], [0, 1, 2]):
        both = Both()
        for slot in company:
            both.admit(slot, {"temperature": 0.0, "logprobs": (5, -1, 2)[slot]})
        told.append(both.step(logits[: len(company)], company, [0] * len(company))[1][0])
    assert told[0] == told[1]


def test_a_request_draws_the_same_tokens_whoever_shares_the_step():
    both = Both()
    kinds = [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.2}, {"presence_penalty": 1.0}, {"logprobs": 2}]
    kinds += [{"top_n_sigma": 1.0}, {"xtc_probability": 0.5, "xtc_threshold": 0.01}]
    for slot, rules in enumerate(kinds):
        both.admit(slot, rules, seed=2**63 + slot)
    logits = logits_of(len(kinds))
    together = both.step(logits, list(range(len(kinds))), [4] * len(kinds), record=False)[0]
    for slot in range(len(kinds)):
        other = Both()
        other.admit(slot, kinds[slot], seed=2**63 + slot - 2**64)
        assert other.step(logits[slot : slot + 1], [slot], [4])[0][0] == together[slot]


def test_rows_that_are_not_numbers_are_marked_and_report_nothing():
    both = Both()
    for slot in range(4):
        both.admit(slot, {"temperature": float(slot % 2), "logprobs": 1, "logit_bias": ((4, -3.0),)})
    logits = logits_of(4)
    logits[1, 4], logits[2, 9], logits[3, 1:] = float("nan"), float("inf"), float("-inf")
    got, told, _, _ = both.step(logits, [0, 1, 2, 3], [0, 0, 0, 0])
    assert got[1:].tolist() == [-1, -1, 0]
    assert sorted(told) == [0, 3]


def test_s37_reset_covers_everything_of_a_slot():
    both = Both()
    fresh = Both()
    rules = {
        "temperature": 0.3,
        "logprobs": 1,
        "presence_penalty": 1.0,
        "bad_words": ((1, 2),),
        "allowed_token_ids": (1, 2),
    }
    for poison in (False, True):
        both.admit(1, rules)
        both.step(logits_of(1), [1], [0])
        assert len(both.device.lines) == 1
        both.device.reset(1, poison)
        assert len(both.device.lines) == 0
        for name, value in vars(fresh.device).items():
            mine = vars(both.device)[name]
            if isinstance(value, np.ndarray):
                assert np.array_equal(mine, value), name
            elif isinstance(value, dict):
                assert mine == value, name
    both.admit(1, {"temperature": 0.0, "frequency_penalty": 0.5, "allowed_token_ids": (7, 9)})
    both.here.reset(1)
    both.admit(1, {"temperature": 0.0, "frequency_penalty": 0.5, "allowed_token_ids": (7, 9)})
    for step in range(3):  # no value of the poisoned lines is left
        got, _, want, _ = both.step(logits_of(1), [1], [step])
        assert got.tolist() == want.tolist()


def test_words_of_a_slot_hold_every_number_the_device_reads():
    both = Both()
    params = SamplingParams(
        temperature=0.25, top_k=10**6, top_p=0.5, min_p=0.125, presence_penalty=-1.5, frequency_penalty=0.75,
        repetition_penalty=1.25, top_n_sigma=1.5, xtc_probability=0.5, xtc_threshold=0.375,
    )  # fmt: skip
    both.stage(2, params, np.zeros(1, np.int32), -5)
    reals = (SlotWord.TEMPERATURE, SlotWord.TOP_P, SlotWord.MIN_P, SlotWord.PRESENCE, SlotWord.FREQUENCY)
    assert [both.slots.real(number)[2].item() for number in reals] == [0.25, 0.5, 0.125, -1.5, 0.75]
    assert both.slots.real(SlotWord.REPETITION)[2] == 1.25
    reals = (SamplerWord.TOP_N_SIGMA, SamplerWord.XTC_PROBABILITY, SamplerWord.XTC_THRESHOLD)
    assert [both.slots.real(number)[2].item() for number in reals] == [1.5, 0.5, 0.375]
    assert (both.slots.word(SlotWord.TOP_K)[2], both.slots.seed[2]) == (50, -5)


@pytest.mark.parametrize("as_logits", [False, True])
@pytest.mark.parametrize("k", [0, 5, VOCAB])
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("together", [1 << 20, 1], ids=["one copy", "many copies"])
def test_prompt_logprobs_are_those_of_the_cpu(k, as_logits, where, together, monkeypatch):
    monkeypatch.setattr(engine.sampling.pending, "ONE_COPY", together)
    hidden, head = torch.randn(150, 8), torch.randn(8, VOCAB)
    asked = np.stack([np.arange(150), np.arange(150) % VOCAB, np.full(150, k)])
    far, far_head = hidden.double().to(where), head.double().to(where)
    with without_waiting(where):
        pending = prompt_logprobs(lambda rows: far[rows] @ far_head, far.device, asked, VOCAB, as_logits)
    if where != "cpu":
        torch.cuda.synchronize()
    assert len(pending._parts) == (1 if together > 1 else 3), "each takes pinned memory of its own until it is read"
    got = pending.collect()
    want = prompt_logprobs_here(lambda rows: (rows @ head.double()).float(), hidden.double(), asked, VOCAB, as_logits)
    assert list(got) == list(range(150))
    for mine, entry in zip(got.values(), want):
        assert (mine.token_id, mine.rank, mine.top_ids) == (entry.token_id, entry.rank, entry.top_ids)
        assert mine.logprob == pytest.approx(entry.logprob, abs=1e-5)
        assert mine.top_logprobs == pytest.approx(entry.top_logprobs, abs=1e-5)


@pytest.mark.parametrize("vocab", [VOCAB, 700])
@pytest.mark.parametrize("where", WHERE)
def test_a_prompt_position_has_the_same_logprobs_alone_and_in_company(vocab, where):
    """Other positions request few, many or all of the likeliest tokens; the logits have many equal values."""
    draw = torch.Generator().manual_seed(3)
    hidden = torch.randint(-2, 3, (90, 4), generator=draw).float()
    head = torch.randint(-1, 2, (4, vocab), generator=draw).float()
    wanted = np.resize([0, 5, 20, vocab - 3, vocab - 20, vocab] if where == "cpu" else [0, 5, 20, vocab - 3], 200)
    places = np.arange(200) * 7 % 90
    asked = np.stack([places, places * 3 % vocab, wanted])

    def there(asked):
        far, far_head = hidden.to(where), head.to(where)
        found = prompt_logprobs(lambda rows: far[rows] @ far_head, far.device, asked, vocab)
        if where != "cpu":
            torch.cuda.synchronize()
        return [entry for _, entry in sorted(found.collect().items())]

    def here(asked):
        return prompt_logprobs_here(lambda rows: rows @ head, hidden, asked, vocab)

    for told in (there, here):
        got = told(asked)
        assert [len(entry.top_ids) for entry in got] == wanted.tolist()
        assert got == [told(asked[:, [number]])[0] for number in range(200)]


def test_warm_up_leaves_nothing_behind():
    both = Both()
    tokens = torch.full((ROWS,), -7, dtype=torch.int32)
    both.device.warm_up(empty_inputs(ROWS, 32, 1, 1, "cpu"), logits_of(1), tokens)
    assert (tokens == -7).all()
    assert both.device.is_plain(np.arange(SLOTS))
    assert len(both.device.lines) == 0
    both.admit(0, {"temperature": 0.0, "presence_penalty": 1.0, "allowed_token_ids": (3, 9, 11)})
    for step in range(4):
        got, _, want, _ = both.step(logits_of(1, 5), [0], [step])
        assert got.tolist() == want.tolist()


def test_a_step_whose_special_row_has_ended_is_sampled_like_any_other():
    both = Both()
    both.admit(0, {"temperature": 0.0})
    inputs = empty_inputs(ROWS, 32, 1, 1, "cpu")
    inputs.sample_row[:1], inputs.sample_slot[:1] = 2, 0
    tokens = torch.full((ROWS,), -7, dtype=torch.int32)
    logits = logits_of(1)
    assert both.device.launch_special(inputs, logits, tokens, np.array([0])) is None
    assert tokens[2] == logits[0].argmax()


def test_lines_of_a_step_are_written_with_one_copy_of_each_kind(monkeypatch):
    """Each copy holds its own pinned memory until it has run, and all rows of a step may arrive at once."""
    rules = {}
    for slot in range(ROWS):
        asked = {"presence_penalty": 1.0, "repetition_penalty": 1.2} if slot % 2 else {"allowed_token_ids": (slot, 3)}
        asked |= {"logit_bias": ((slot, 1.5), (9, -2.0)), "min_tokens": 4, "eos_token_ids": (9,)}
        rules[slot] = RowRules(SamplingParams(**asked), np.array([slot, 40, 40, VOCAB + 5]), VOCAB, 64)
    sent = []

    def send(values, device):
        sent.append(values.shape)
        return torch.from_numpy(values.copy())

    monkeypatch.setattr(engine.sampling.lines, "send", send)
    lines = RuleLines(ROWS, VOCAB, torch.device("cpu"), 64)
    tables = lines.tables
    tables.counts.fill_(9)
    assert lines.take(rules, set(rules)) == []
    assert len(sent) == 4
    for slot in rules:
        line = lines[slot]
        edits = tables.edits[line, :2]
        assert edits[:, 0].tolist() == [slot, 9]
        assert edits[:, 1].contiguous().view(torch.float32).tolist() == [1.5, -2.0]
        assert edits[:, 2].tolist() == [0, 4]
        if slot % 2:
            assert unpack(tables.seen[line], VOCAB).nonzero().flatten().tolist() == sorted({slot, 40})
            assert not tables.counts[line].any()
        else:
            assert unpack(tables.allowed[line], VOCAB).nonzero().flatten().tolist() == sorted({slot, 3})


def test_rows_with_rules_and_log_probabilities_are_plain():
    """Few request options need Python; for all others, the slot's words contain everything that the device needs."""
    both = Both()
    plain = [*RULES[:3], *RULES[4:10]]
    for slot, rules in enumerate(plain):
        both.admit(slot, rules)
        assert both.device.is_plain(np.array([slot])), rules
    for rules in (
        {"bad_words": ((1, 2),)}, {"logprobs": MOST + 1}, {"logprobs": -1}, {"logprobs": 1, "logprob_token_ids": (4,)},
    ):  # fmt: skip
        both.admit(11, rules)
        assert not both.device.is_plain(np.array([11])), rules
        both.device.reset(11)
    processed = Both("processed_logprobs")
    processed.admit(0, {"logprobs": 1})
    assert not processed.device.is_plain(np.array([0]))


def test_a_chosen_token_is_counted_without_a_record_on_the_host():
    both = Both()
    both.admit(3, {"temperature": 0.0, "frequency_penalty": 1.0, "repetition_penalty": 1.5}, prompt=[1, 2])
    logits = logits_of(1)
    for step in range(30):
        got, _, want, _ = both.step(logits, [3], [step], record=False)
        assert got.tolist() == want.tolist()
    assert int(both.device.lines.tables.counts.sum()) == 30
