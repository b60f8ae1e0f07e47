"""Mistakes that several ranks make possible, each with the test that finds it. The mutants of the order of tokens."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import engine.run.start
from engine.kernels.parallel.tokens import sent_slots, take_slots_reference
from engine.parallel.host import HostExchange
from engine.step.backend.device.buffers import StepBuffers
from tests.engine.host_accelerator import HostAccelerator
from tests.engine.parallel.test_running import PROMPTS, QWEN2, expected, greedy
from tests.engine_kit import answer, running

ROOT = Path(__file__).parents[3]
FOUND_BY = {
    "step N+1 on rank 0 before step N on rank 1": (
        "tests/fast/test_ranks_order.py",
        "test_a_launcher_that_begins_a_step_early_on_rank_0_is_found",
    ),
    "a record rewritten once rank 0's prep has read it": (
        "tests/fast/test_ranks_order.py",
        "test_a_launcher_that_waits_for_the_first_rank_alone_is_found",
    ),
    "an exchange under `if rank == 0`: graphs": (
        "tests/fast/test_ranks_order.py",
        "test_an_exchange_on_rank_0_alone_is_found",
    ),
    "an exchange under `if rank == 0`: eager steps": (
        "tests/engine/parallel/test_faults_of_ranks.py",
        "test_an_exchange_that_only_some_ranks_take_ends_in_bounded_time",
    ),
    "tokens taken behind the next prep": (
        "tests/engine/parallel/test_mutants.py",
        "test_tokens_that_come_behind_the_next_prep_are_found",
    ),
    "a step computed before rank 0's drafts have come": (
        "tests/engine/parallel/test_drafts_on_ranks.py",
        "test_a_rank_that_lacks_what_rank_0_has_drafted_is_found",
    ),
    "a drafter's passes behind rank 0's forward": (
        "tests/fast/test_ranks_order.py",
        "test_passes_that_rank_0_launches_behind_its_forward_are_found",
    ),
    "two areas in place of three": (
        "tests/kernels/accelerator/cases_interpreter_parallel.py",
        "test_two_areas_in_place_of_three_are_found",
    ),
    "a counter advanced by the host": (
        "tests/kernels/accelerator/cases_interpreter_parallel.py",
        "test_a_counter_that_the_host_repeats_is_found",
    ),
    "a bias on every rank": ("tests/engine/parallel/test_faults_of_ranks.py", "test_a_bias_on_every_rank_is_found"),
    "a rank that times products by itself": (
        "tests/engine/parallel/test_timed_products.py",
        "test_a_rank_that_times_by_itself_is_found",
    ),
}


@pytest.mark.parametrize("mistake", FOUND_BY)
def test_each_mistake_has_its_test(mistake):
    file, name = FOUND_BY[mistake]
    assert f"def {name}(" in (ROOT / file).read_text()


class Late:
    """Rank 1 takes rank 0's tokens only with its next prep: before it, or (the mistake) behind it."""

    def __init__(self, behind: bool) -> None:
        self._behind, self._held = behind, []
        self._prep = StepBuffers.prep

    def share(self, link, inputs, slots):
        sent = sent_slots(inputs, slots)
        chosen = link.total(torch.zeros_like(sent) if link.rank else sent)  # rank 0's
        if link.rank:
            lines = replace(inputs, sample_row=inputs.sample_row.clone(), sample_slot=inputs.sample_slot.clone())
            self._held.append((inputs, chosen, lines, slots))

    def prep(self, buffers, drafting=True):
        late = [given for inputs, *given in self._held if inputs is buffers.inputs]
        if late:
            self._held.clear()
        if self._behind:
            self._prep(buffers, drafting)
        for given in late:
            take_slots_reference(*given)
        if not self._behind:
            self._prep(buffers, drafting)


@pytest.mark.parametrize("behind", [False, True])
async def test_tokens_that_come_behind_the_next_prep_are_found(monkeypatch, behind):
    late = Late(behind)
    monkeypatch.setattr(engine.run.start, "open_accelerator", lambda _device: HostAccelerator())
    monkeypatch.setattr(HostExchange, "share", lambda link, *given: late.share(link, *given))
    monkeypatch.setattr(StepBuffers, "prep", lambda buffers, *given: late.prep(buffers, *given))
    async with running(QWEN2, tensor_parallel=2) as served:
        found = await asyncio.gather(*(answer(served, greedy(number)) for number in range(len(PROMPTS))))
    assert (found == [[expected(number)] for number in range(len(PROMPTS))]) == (not behind)
