"""Pace: what it learns from the durations of steps."""

from types import SimpleNamespace

from engine.kernels import tune
from engine.kernels.target import Target
from engine.run.pace import (
    HORIZON,
    LEAST_PROMPT,
    PREFILL_ONLY_TOKENS,
    RETRY,
    Pace,
    round_up_tiles,
)
from engine.step.step import StepTimes

TILE = 128
WAITED = 0.001  # seconds that the thread waited for the step's end


def level(tokens: int) -> float:
    """A device on which products with any number of tiles use all units."""
    return 1.0


def plan(rows: int, prompt: int = 0) -> SimpleNamespace:
    return SimpleNamespace(num_rows=rows + bool(prompt), num_decode_rows=rows, num_tokens=rows + prompt)


def plan_at(pace: Pace, of: SimpleNamespace) -> float:
    """The planning time after a step that began at second 1."""
    return pace.plan_at(SimpleNamespace(plan=of, times=StepTimes(started_at=1.0)))


def expected(pace: Pace, of: SimpleNamespace) -> float:
    """Expected seconds of such a step."""
    return pace.clock.at_least(pace._class(of.num_tokens))


def test_a_step_is_planned_behind_the_margin_before_the_expected_end():
    pace = Pace(2048, TILE, level)
    assert plan_at(pace, plan(8)) == 0, "nothing is known: at once"
    for took, end in ((0.010, 0.010), (0.006, 0.006), (0.026, 0.007)):
        pace.note(plan(8), took, WAITED)
        assert abs(expected(pace, plan(8)) - end) < 1e-9
    pace.note(plan(1), 0.0002, WAITED)
    assert abs(plan_at(pace, plan(1)) - 1.0001) < 1e-9, "the margin is at most half of the step"
    assert pace.plan_at(SimpleNamespace(plan=plan(8), times=StepTimes(started_at=1.0, plan_at=3.0))) == 3.0, (
        "told by the GIL-free loop"
    )


def test_steps_of_other_tiles_are_learned_apart_and_unknown_ones_taken_for_smaller():
    pace = Pace(2048, TILE, level)
    pace.note(plan(0, prompt=512), 0.012, WAITED)
    pace.note(plan(0, prompt=900), 0.020, WAITED)
    for prompt, rows, end in ((500, 12, 0.012), (513, 0, 0.012), (1000, 0, 0.020), (2048, 0, 0.020)):
        assert abs(expected(pace, plan(rows, prompt=prompt)) - end) < 1e-9
    assert expected(pace, plan(64)) == 0


def test_prompts_may_double_a_step_that_decodes():
    pace = Pace(2048, TILE, level)
    assert pace.prompt_budget(64, 1, 900, 900) == 2048  # nothing has been measured yet
    pace.note(plan(64), 0.008, WAITED)
    pace.note(plan(0, prompt=2000), 0.040, WAITED)  # 20 microseconds per token
    assert pace.prompt_budget(64, 1, 900, 900) == 768 - 64  # 800 tokens would fit: six whole tiles
    pace.note(plan(64), 0.001, WAITED)
    assert LEAST_PROMPT <= pace.prompt_budget(64, 1, 900, 900) < LEAST_PROMPT + TILE


def test_waiting_prompts_are_split_over_steps_and_may_make_them_longer():
    pace = Pace(2048, TILE, level)
    pace.note(plan(64), 0.008, WAITED)
    pace.note(plan(64, prompt=936), 0.020, WAITED)
    assert pace.prompt_budget(64, 20, HORIZON * 300, 500) == 768 - 64
    assert pace.prompt_budget(64, 30, HORIZON * 1000, 500) == 1024 - 64
    assert pace.prompt_budget(200, 60, HORIZON * 2000, 500) == 1792 - 200  # a step may take 36 milliseconds
    pace.note(plan(200), 0.040, WAITED)  # twice this exceeds the limit of a long step
    assert pace.prompt_budget(200, 60, HORIZON * 2000, 500) == 2048 - 200


def test_keys_that_many_rows_read_are_not_taken_for_the_price_of_prompts():
    pace = Pace(2048, TILE, level)
    pace.note(plan(1), 0.006, WAITED)
    pace.note(plan(256), 0.017, WAITED)  # 11 milliseconds for keys
    for _ in range(40):
        pace.note(plan(256, prompt=256), 0.021, WAITED)  # 0.0195 microseconds per token
    budget = pace.prompt_budget(256, 1, 4000, 500)
    assert budget in (1152 - 256, 1280 - 256)  # 34 milliseconds minus the keys' time
    assert pace.prompt_budget(1, 1, 4000, 500) == 640 - 1  # twice the weights' time


def test_rows_that_never_decode_alone_are_learned_from_steps_with_prompts():
    pace = Pace(2048, TILE, level)
    pace.note(plan(1), 0.006, WAITED)
    pace.note(plan(0, prompt=2000), 0.042, WAITED)  # 21 microseconds per token
    pace.note_decode(8, 0.009)  # 130 rows that had just begun
    assert pace.prompt_budget(250, 2, 900, 500) == 768 - 250  # 0.015 seconds of products
    for _ in range(60):
        pace.note(plan(250, prompt=262), 0.0195, WAITED)  # by now their keys take 9 milliseconds
        pace.note_decode(8, 0.009)  # no steps have run since
    assert pace.prompt_budget(250, 2, 900, 500) == 1024 - 250  # 0.021 seconds
    pace.note_decode(8, 0.010)
    assert pace.prompt_budget(250, 2, 900, 500) < 1024 - 250


def test_a_burst_takes_whole_steps():
    pace = Pace(2048, TILE, level)
    pace.note(plan(64), 0.008, WAITED)
    pace.note(plan(64, prompt=936), 0.020, WAITED)
    assert pace.prompt_budget(64, 40, 20_000, 500) == 2048
    assert pace.prompt_budget(64, 30, 20_000, 500) < 2048  # most rows decode already
    assert pace.prompt_budget(0, 200, 100_000, 500) == 2048
    roomy = Pace(8192, TILE, level)
    roomy.note(plan(64), 0.008, WAITED)
    roomy.note(plan(64, prompt=936), 0.020, WAITED)
    assert roomy.prompt_budget(64, 30, 20_000, 500) == 8192  # the operator allows longer steps than FULL
    assert roomy.prompt_budget(64, 8, 20_000, 2500) < 2048
    assert Pace(8192, TILE, level).prompt_budget(0, 16, 16_384, 1024) == 8192
    assert Pace(8192, TILE, level).prompt_budget(0, 8, 8192, 1024) == 8192
    assert Pace(8192, TILE, level).prompt_budget(0, 7, 7168, 1024) == 1024


def test_a_few_long_prompts_are_no_burst():
    pace = Pace(2048, TILE, level)
    pace.note(plan(4), 0.006, WAITED)
    pace.note(plan(0, prompt=2000), 0.040, WAITED)  # 20 microseconds per token
    assert pace.prompt_budget(4, 3, 60_000, 20_000) == 640 - 4
    assert pace.prompt_budget(4, 0, 60_000, 20_000) == 640 - 4
    assert pace.prompt_budget(4, 9, 60_000, 5000) == 2048


def test_prompts_that_wait_together_are_computed_one_after_the_other():
    pace = Pace(2048, TILE, level)
    assert pace.prompt_budget(0, 4, 2000, 500) == PREFILL_ONLY_TOKENS
    assert pace.prompt_budget(0, 4, 4000, 1000) == 1000
    assert pace.prompt_budget(0, 1, 9000, 9000) == 2048
    assert pace.prompt_budget(0, 2, 16_000, 8000) == 2048
    assert Pace(256, TILE, level).prompt_budget(0, 4, 2000, 500) == 256


def test_an_unknown_number_of_rows_is_taken_for_the_nearest_known():
    pace = Pace(2048, TILE, level)
    pace.note(plan(64), 0.008, WAITED)
    pace.note_decode(1, 0.006)
    pace.note(plan(0, prompt=2000), 0.040, WAITED)
    assert pace.prompt_budget(4, 1, 900, 900) == 640 - 4
    assert pace.prompt_budget(200, 1, 900, 900) == 640 - 200  # two of the eight milliseconds are for the rows' keys


def test_a_step_found_done_halves_what_is_expected():
    pace = Pace(2048, TILE, level)
    pace.note(plan(8), 1.0, WAITED)  # some work ran for the first time
    for _ in range(8):
        pace.note(plan(8), expected(pace, plan(8)), 0.0)  # planned too late: the step had ended long before
    assert expected(pace, plan(8)) < 0.005


def test_a_step_behind_one_that_was_found_done_is_not_believed_to_be_short():
    pace = Pace(2048, TILE, level)
    pace.note(plan(200), 0.014, WAITED)
    pace.note(plan(0, prompt=2000), 0.040, WAITED)  # 20 microseconds per token
    assert pace.prompt_budget(200, 1, 900, 900) == 1408 - 200
    pace.note(plan(200), 0.003, WAITED, began_before=True)
    assert expected(pace, plan(200)) > 0.013
    pace.note(plan(200, prompt=900), 0.001, WAITED, began_before=True)
    assert pace.prompt_budget(200, 1, 900, 900) == 1408 - 200


def test_where_steps_are_found_done_their_period_limits_the_prompts_that_join():
    pace = Pace(2048, TILE, level)
    pace.note(plan(0, prompt=2000), 0.002, WAITED)  # one microsecond per token
    for _ in range(50):
        pace.note(plan(8), 0.0003, 0.0)  # the host's time: the device waits for the host
    assert plan_at(pace, plan(8)) == 0  # so the next step is planned at once
    assert pace.prompt_budget(8, 1, 900, 900) == 640 - 8
    for took in (0.005, 0.00001):  # the thread was delayed, and found the next step done as well
        pace.note(plan(8), took, 0.0)
    assert 640 - 8 <= pace.prompt_budget(8, 1, 900, 900) <= 1152 - 8
    pace.note(plan(8), 0.0002, WAITED)
    assert pace.prompt_budget(8, 1, 900, 900) == 384 - 8


def test_a_step_takes_the_tiles_that_fill_the_device_when_they_are_near():
    card = Target("cuda", "sm_90", 132, 32, 227 << 10)
    full = [tune.fullness(card, 128 * tiles, 12288, 4096) for tiles in range(17)]  # gate and up of an 8B
    assert full[11] == 1.0  # 11 x 96 tiles make eight full waves
    assert full[10] < 0.92
    assert full[6] == full[7] == full[3] == 0.9  # the vendor's kernels
    chosen = round_up_tiles(16, lambda tiles: full[tiles])
    assert [chosen[tiles] for tiles in (1, 4, 6, 7, 8, 9, 10, 11, 14, 16)] == [1, 4, 6, 8, 8, 11, 11, 11, 15, 16]
    assert round_up_tiles(16, lambda tiles: 1.0) == list(range(17))
    for of, tiles in ((level, 10), (lambda tokens: full[tokens // TILE], 11)):
        pace = Pace(2048, TILE, of)
        pace.note(plan(200), 0.013, WAITED)
        pace.note(plan(0, prompt=2000), 0.040, WAITED)
        assert pace.prompt_budget(200, 1, 9000, 500) == tiles * TILE - 200


def test_other_cards_have_no_size_that_is_better():
    other = Target("hip", "gfx942", 304, 64, 64 << 10)
    assert {tune.fullness(other, 128 * tiles, 12288, 4096) for tiles in range(17)} == {1.0}


def test_idle_rows_join_while_the_step_takes_no_longer_than_allowed():
    pace = Pace(2048, TILE, level, 1.5)
    assert pace.idle_budgets(5, 0) == (7 - 5, 0)  # the step without them is measured first
    pace.note(plan(5), 0.006, WAITED)
    assert pace.idle_budgets(5, 0)[0] == 15 - 5  # then steps with more rows, a class at a time
    pace.note(plan(15), 0.007, WAITED)
    pace.note(plan(31), 0.008, WAITED)
    assert pace.idle_budgets(5, 0)[0] == 63 - 5
    pace.note(plan(63), 0.0091, WAITED)
    assert pace.idle_budgets(5, 0)[0] == 31 - 5
    assert [pace.idle_budgets(5, 0)[0] for _ in range(RETRY)].count(63 - 5) == 1  # it may have become faster
    assert Pace(2048, TILE, level, 1.0).idle_budgets(1, 9) == (0, 0)


def test_idle_prompts_take_the_tokens_that_a_step_of_others_leaves():
    pace = Pace(2048, TILE, level, 1.5)
    pace.note(plan(4), 0.006, WAITED)
    pace.note(plan(9), 0.009001, WAITED)
    assert pace.idle_budgets(4, 3) == (3, LEAST_PROMPT)  # the cost of a token is not known
    pace.note(plan(0, prompt=2000), 0.040, WAITED)  # 20 microseconds
    assert pace.idle_budgets(4, 3) == (3, 450 - 7)
    assert pace.idle_budgets(4, 0) == (3, 450 - 4)
    assert pace.idle_budgets(0, 3)[1] == 0  # the others have prompts only
    pace.note(plan(4, prompt=440), 0.010, WAITED)  # longer than 440 tokens of a full step take
    assert pace.idle_budgets(4, 3) == (3, 3 * TILE - 7)
    pace.note(plan(4, prompt=3 * TILE - 4), 0.0091, WAITED)
    pace.note(plan(4, prompt=2 * TILE - 4), 0.0091, WAITED)
    pace.note(plan(4, prompt=TILE - 4), 0.008, WAITED)
    assert pace.idle_budgets(4, 3) == (3, TILE - 7)
    pace.note(plan(4, prompt=TILE - 4), 0.040, WAITED)
    assert pace.idle_budgets(4, 3) == (3, 127 - 7)
    pace.note(plan(4, prompt=100), 0.0091, WAITED)
    assert pace.idle_budgets(4, 3) == (3, 63 - 7)
    assert max(pace.idle_budgets(4, 3)[1] for _ in range(RETRY)) > 2 * TILE  # they may have become shorter
