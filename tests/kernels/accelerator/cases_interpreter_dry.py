"""DRY in Triton's interpreter: tokens, logits after the rules and the table of repetitions, step by step."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import triton  # noqa: F401  (must precede the import of any kernel file; TRITON_INTERPRET sets the mode)

from _fast.layout import SamplerWord, SlotWord
from engine.base.request import SamplingParams
from engine.kernels.sampling.choose import choose_reference, choose_room, launch_choose
from engine.kernels.sampling.dry import HEAD_LEN, MOST, PARTS
from engine.kernels.sampling.rules import REPEATS, RuleTables, rule_tables
from engine.sampling.dry import DryHistory
from tests.kernels.repetitions import dry_penalties, packed
from tests.kernels.sampling import RULES, Rows, rows_of, with_rules

pytestmark = pytest.mark.filterwarnings(
    "ignore:(overflow|divide by zero|invalid value|All-NaN slice) encountered:RuntimeWarning"
)
DRY = [  # dry_multiplier, dry_base, dry_allowed_length, dry_penalty_last_n
    (0.8, 1.75, 2, -1),
    (2.0, 3.0, 1, -1),
    (1.0, 1.2, 3, 20),
    (5.0, 100.0, 2, 64),
]


def with_dry(rows: Rows, vocab: int, prompts: list[np.ndarray], breakers: set[int], history: int) -> Rows:
    """Every second row also gets DRY; the other rules are those of `with_rules`."""
    ruled, slots = with_rules(rows, vocab), rows.slots
    tables = rule_tables(len(ruled.tables.counts), vocab, "cpu", history)
    for name in ("counts", "seen", "allowed", "edits"):
        getattr(tables, name).copy_(getattr(ruled.tables, name))
    tables.repeats.fill_(-5)
    for slot in range(0, len(prompts), 2):
        multiplier, base, allowed, last_n = DRY[slot // 2 % len(DRY)]
        params = SamplingParams(
            dry_multiplier=multiplier, dry_base=base, dry_allowed_length=allowed, dry_penalty_last_n=last_n,
            dry_breakers=packed(breakers, vocab),
        )  # fmt: skip
        made = DryHistory(params, prompts[slot], vocab, history)
        line = int(slots.word(SlotWord.RULE_LINE)[slot]) - 1
        tables.repeats[line] = torch.from_numpy(made.line)
        padded = np.zeros(4 * tables.breakers.shape[1], np.uint8)
        padded[: len(params.dry_breakers)] = np.frombuffer(params.dry_breakers, np.uint8)
        tables.breakers[line] = torch.from_numpy(padded.view(np.int32))
        slots.word(SlotWord.RULE_KINDS)[slot] |= REPEATS
        slots.word(SlotWord.PROMPT_LEN)[slot] = len(prompts[slot])
        slots.real(SamplerWord.DRY_MULTIPLIER)[slot], slots.real(SamplerWord.DRY_BASE)[slot] = multiplier, base
        slots.word(SamplerWord.DRY_ALLOWED)[slot], slots.word(SamplerWord.DRY_WINDOW)[slot] = allowed, made.window
    return replace(ruled, tables=tables)


def copied(tables: RuleTables) -> RuleTables:
    names = "counts", "seen", "allowed", "edits", "repeats", "breakers"
    return RuleTables(*(getattr(tables, name).clone() for name in names))


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab", "alphabet", "longest"), [(40, 4, 50), (4500, 3, 150)])
def test_steps_with_dry(vocab, alphabet, longest, dtype):
    """Prompts over few tokens, shorter and longer than the history of 64; greedy and drawn rows; other rules too."""
    draw = np.random.default_rng(2)
    count = 2 * len(RULES)
    prompts = [draw.integers(0, alphabet, 1 + slot * longest // count, dtype=np.int32) for slot in range(count)]
    prompts[4] = np.append(prompts[4], [-1, vocab + 3, 2**31 - 1] * 3).astype(np.int32)  # ids that media have
    rows = with_dry(rows_of(count, [(0.0, 0, 1.0, 0.0), (1.0, 3, 1.0, 0.0)]), vocab, prompts, {1, vocab - 1}, 64)
    places = rows.place.clone().fill_(0)
    runs = [(run, copied(rows.tables), choose_room(count, vocab, "cpu")) for run in (launch_choose, choose_reference)]
    lines = rows.slots.word(SlotWord.RULE_LINE)[:count:2].long() - 1
    listed = 0
    for step in range(4):
        listed += int((runs[0][1].repeats[lines, 0] > 0).sum())
        logits = torch.randn(count, vocab).to(dtype)
        logits[:, :alphabet] += 8
        found = []
        for run, tables, room in runs:
            tokens = rows.tokens.clone()
            run(tokens, rows.slots, tables, room, logits, rows.row, rows.slot, places + step)
            found.append(tokens)
        assert torch.equal(*found), step
        assert torch.allclose(runs[0][2].work, runs[1][2].work, rtol=1e-5, atol=1e-5), step
        assert torch.equal(runs[0][1].repeats, runs[1][1].repeats), step
    assert listed >= 6


def test_the_list_of_a_hostile_text_is_bounded_and_its_penalty_finite():
    """Every place repeats the end of the text: each is listed, and the row still chooses a token."""
    vocab, history = 300, 64
    rows = with_dry(rows_of(2, [(0.0, 0, 1.0, 0.0)]), vocab, [np.full(5000, 7, np.int32)] * 2, set(), history)
    rows.slots.word(SlotWord.RULE_KINDS)[0] = REPEATS
    rows.slots.word(SlotWord.NUM_EDITS)[0] = 0
    rows.slots.real(SamplerWord.DRY_BASE)[0] = 100.0
    room, tables = choose_room(2, vocab, "cpu"), copied(rows.tables)
    logits = torch.full((2, vocab), float("-inf"))
    logits[:, 7] = 3.0  # the only possible token is the punished one
    launch_choose(rows.tokens, rows.slots, tables, room, logits, rows.row, rows.slot, rows.place * 0)
    assert rows.tokens[1] == 7
    assert room.work[0, 7] == torch.tensor(3.0 - MOST)
    assert int(tables.repeats[0, 0]) == history - 2  # at the first place the repetition is shorter than allowed
    lags = tables.repeats[0, HEAD_LEN:].view(PARTS, history)[1]
    assert int(lags.max()) <= history


def test_a_prompts_first_state_is_the_definition():
    draw = np.random.default_rng(4)
    for number in range(60):
        multiplier, base, allowed, last_n = DRY[number % len(DRY)]
        prompt = draw.integers(0, 3, draw.integers(1, 90), dtype=np.int32)
        breakers = {2} if number % 3 else set()
        params = SamplingParams(
            dry_multiplier=multiplier, dry_base=base, dry_allowed_length=allowed, dry_penalty_last_n=last_n,
            dry_breakers=packed(breakers, 50),
        )  # fmt: skip
        made = DryHistory(params, prompt, 50, 64)
        logits = torch.zeros(50, dtype=torch.float32)
        made.apply(logits)
        last = 64 if last_n < 0 else last_n
        wanted = dry_penalties(prompt.tolist(), breakers, multiplier, base, allowed, last)
        expected = torch.zeros(50)
        for token, value in wanted.items():
            expected[token] -= min(value, MOST)
        assert torch.allclose(logits, expected, rtol=1e-5), number
