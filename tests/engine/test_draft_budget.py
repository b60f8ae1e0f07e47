"""The budget of drafts in a server: equal answers while it decides, rests, measured times."""

from __future__ import annotations

import numpy as np
import pytest

import engine.run.budget
import engine.step.parts.drafts
from engine.step.parts.drafter_chain import ChainSteps
from engine.step.times import Times, curve, some, timed
from tests import tiny
from tests.block_drafters import Form, folder_of
from tests.drafters import eagle3
from tests.engine.test_drafts import (
    ONE_PATH,
    PATHS,
    check,
    collected,
    drafts_of,
    ngram,
    on_path,
    requests_of,
    undrafted,
)
from tests.engine_kit import running, text_request

__all__ = ["on_path"]  # a fixture

MEASURE = engine.run.budget.times_of  # the session's fixture has replaced the function that servers call


def steps_that_take(monkeypatch, marginal: float, **passes: np.ndarray) -> None:
    """Steps of n tokens take 1 + marginal * n seconds."""
    seconds = 1 + marginal * np.arange(300)
    times = Times(seconds, seconds, np.zeros(1), **passes)
    monkeypatch.setattr(engine.run.budget, "times_of", lambda _runtime: times)


@pytest.mark.covering(1)
@pytest.mark.parametrize("marginal", [0.05, 0.4, 3.0])
@pytest.mark.parametrize("drafter", ["ngram", "eagle3", pytest.param("dflash", marks=pytest.mark.full), "dspark"])
@pytest.mark.parametrize("on_path", PATHS, indirect=True)
async def test_answers_do_not_depend_on_the_budget(on_path, drafter, marginal, monkeypatch):
    requests = requests_of(7, 8, 40 if drafter == "ngram" else 20)
    async with running(tiny.checkpoint("qwen3"), max_num_seqs=8) as own:
        wanted = await collected(own, requests)
    steps_that_take(monkeypatch, marginal)
    sure = Form(kind="dspark", rank=16, skipped=0, confident="both", block=7)
    folders = {
        "eagle3": lambda: eagle3("qwen3"),
        "dflash": lambda: folder_of("qwen3", Form()),
        "dspark": lambda: folder_of("qwen3", sure),
    }
    drafts = {"model": str(folders[drafter]()), "num_speculative_tokens": 3} if drafter in folders else ngram(4)
    async with running(tiny.checkpoint("qwen3"), max_num_seqs=8, speculative=drafts) as own:
        check(await collected(own, requests), wanted)
        found = drafts_of(own)
        assert found.num_draft_tokens > 0
        assert found.budget.adaptive
        assert bool(found.budget.variant) == (drafter == "ngram")


@pytest.mark.covering(1)
@pytest.mark.parametrize(("further", "most"), [(9.0, 1), (0.0, 3), (None, 3)])
@pytest.mark.parametrize("on_path", PATHS, indirect=True)
async def test_a_step_has_as_many_passes_as_its_rows_have_drafts(on_path, further, most, monkeypatch):
    """A further pass costs nothing, or more than its drafts save; None: the operator wants every draft verified."""
    requests = [text_request(np.arange(5, 14) + n, 24, ignore_eos=True) for n in range(3)]
    wanted = await undrafted(tiny.checkpoint("qwen3"), requests)
    passes: list[bool] = []
    draft = ChainSteps.draft

    def counted(steps, batch, rows, first):
        passes.append(first)
        draft(steps, batch, rows, first)

    monkeypatch.setattr(ChainSteps, "draft", counted)
    steps_that_take(monkeypatch, 0.05, first=np.zeros(1), further=np.full(1, further or 0.0))
    asked = {"model": str(eagle3("qwen3")), "num_speculative_tokens": 3}
    if further is None:
        asked["enable_adaptive_verification"] = False
    async with running(tiny.checkpoint("qwen3"), speculative=asked) as own:
        passes.clear()  # those of the start
        check(await collected(own, requests), wanted)
        assert drafts_of(own).num_draft_tokens > 0
    runs = "".join("|" if first else "." for first in passes).split("|")[1:]
    assert len(runs) > 5
    assert max(map(len, runs)) == most - 1


@pytest.mark.parametrize("on_path", ONE_PATH[:2], indirect=True)
async def test_useless_drafts_end_with_steps_of_a_server_without_drafts(on_path, monkeypatch):
    """Long answers that drafts do not shorten: nothing is verified and nothing is looked up but for the probes."""
    looks, rules = [], {"temperature": 2.0, "ignore_eos": True}
    requests = [text_request(np.tile(np.arange(5, 11), 3), 90, seed=n, **rules) for n in range(4)]
    async with running(tiny.checkpoint("qwen3")) as own:
        wanted = await collected(own, requests)
    steps_that_take(monkeypatch, 1.0)
    launched = engine.step.parts.drafts.ngram
    monkeypatch.setattr(engine.step.parts.drafts, "ngram", lambda *given: (looks.append(given), launched(*given)))
    async with running(tiny.checkpoint("qwen3"), speculative=ngram(4, prompt_lookup_min=1)) as own:
        before = len(looks)  # at the start
        check(await collected(own, requests), wanted)
        found, steps = drafts_of(own), own.stats.steps
        assert found.budget.rest.num_probes > 0
        assert len(looks) - before < steps / 2


@pytest.mark.parametrize("on_path", ONE_PATH, indirect=True)
async def test_every_draft_is_verified_where_the_operator_wants_it(on_path, monkeypatch):
    steps_that_take(monkeypatch, 9.0)
    requests = [text_request(np.tile(np.arange(5, 14), 6), 24, ignore_eos=True)] * 3
    async with running(tiny.checkpoint("qwen3"), speculative=ngram(4)) as own:
        answers = await collected(own, requests)
        few = drafts_of(own).num_draft_tokens
    all_of_them = ngram(4, enable_adaptive_verification=False)
    async with running(tiny.checkpoint("qwen3"), speculative=all_of_them) as own:
        check(await collected(own, requests), answers)
        assert not drafts_of(own).budget.adaptive
        assert drafts_of(own).num_draft_tokens > 4 * few
    ranges = ngram(4, enable_adaptive_verification=False, num_speculative_tokens_per_batch_size=[[1, 1, 4], [2, 9, 0]])
    async with running(tiny.checkpoint("qwen3"), speculative=ranges) as own:
        check(await collected(own, requests[:1]), answers[:1])
        alone = drafts_of(own).num_draft_tokens
        assert alone > 0


@pytest.mark.parametrize("on_path", PATHS, indirect=True)
async def test_times_of_steps_are_measured_at_start(on_path, monkeypatch):
    measured = []

    def measure(runtime):
        measured.append(MEASURE(runtime))
        return measured[-1]

    monkeypatch.setattr(engine.run.budget, "times_of", measure)
    async with running(tiny.checkpoint("qwen3"), speculative=ngram(2)) as own:
        await collected(own, [text_request(np.tile(np.arange(5, 14), 3), 9)])
        assert drafts_of(own).budget.adaptive
    (times,) = measured
    for values in (times.plain, times.mixed, times.choice):
        assert (np.diff(values) >= 0).all()
    assert times.plain[1] > 0
    assert len(times.mixed) == 257


def test_a_curve_follows_the_graphs_and_goes_on_beyond_the_measured_sizes():
    found = curve({16: 1.0, 32: 3.0, 64: 2.5}, 100, [16, 32, 64])
    assert found[0] == found[16] == 1.0
    assert found[17] == found[32] == found[33] == found[64] == 3.0
    assert found[100] == 3.0
    assert curve({1: 1.0, 3: 2.0}, 5).tolist() == [1.0, 1.0, 1.5, 2.0, 2.5, 3.0]
    assert some(range(1, 257), 6)[::5] == [1, 256]
    assert some([1, 2], 6) == [1, 2]


def test_a_slow_start_measures_two_sizes():
    times = iter([1.0])
    calls = [(size, lambda size=size: float(size)) for size in (1, 2, 4, 8)]
    assert timed(calls, 0.5, lambda: next(times)) == {1: 1.0, 2: 2.0}
