"""The prep kernels' reference against backend/host/buffers, with plans of the real scheduler; padding, bad records."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from _fast.layout import SLOT_WORDS, UPDATE_WORDS, Header, RowFlag, SlotWord, tail_at, tokens_at
from engine.kernels.record import Records, records_in
from engine.kernels.step_inputs import step_inputs
from engine.kernels.step_tensors import empty_inputs, empty_slots
from engine.step.backend.host.buffers import build
from engine.step.backend.host.home import HostEvent
from engine.step.rank import Rank
from engine.step.rows import RowArrays
from engine.step.step import Step
from tests.kernels.plans import Walk

VOCAB = 99
GROUPS = [((0, 0),), ((0, 0), (1, 6)), ((1, 3), (0, 0), (1, 3))]


def step_of(plan, rows) -> Step:
    """A step that is never launched."""
    return Step(plan, rows, HostEvent(), lambda call, *args: call(*args))


def rank_of(walk) -> Rank:
    """A device with a model that has no layers."""
    config = SimpleNamespace(axes=walk.axes, text=SimpleNamespace(vocab_size=VOCAB))
    return Rank(0, SimpleNamespace(config=config), walk.layout)


def poisoned(walk):
    """Inputs in which every entry is invalid until it is written."""
    lines = walk.max_rows * (1 + walk.drafts) if walk.drafts else 0
    out = empty_inputs(walk.max_rows, walk.max_tokens, len(walk.groups), walk.axes, "cpu", False, True, lines)
    for field in dataclasses.fields(out):
        if (tensor := getattr(out, field.name)) is not None:
            tensor.fill_(-77)
    return out


def alone(record) -> Records:
    """Records with a single record, which is always the next one."""
    pinned = np.zeros((1, -(-len(record) // 16) * 16), np.int32)
    pinned[0, : len(record)] = record
    return records_in(torch.from_numpy(pinned), "cpu")


def check_rows(out, walk, plan, batch, rows):
    count, real, lines = plan.num_rows, int(out.num_sampled), len(out.sample_row)
    dummy = walk.max_slots
    assert int(out.num_rows) == count
    assert torch.equal(out.query_start[: count + 1], batch.attention[0].query_start)
    assert (out.query_start[count + 1 :] == rows.starts[-1]).all()
    assert torch.equal(out.context_len[:count], batch.attention[0].context_len)
    assert (out.context_len[count:] == 0).all()
    assert out.row_slot.tolist() == [*rows.slots.tolist(), *[dummy] * (walk.max_rows - count)]
    sampled = rows.sampled
    drafts = np.where(rows.flags[sampled] & RowFlag.FEED, rows.lens[sampled] - 1, 0)
    line = sampled.repeat(1 + drafts)
    run = np.concatenate([np.arange(1 + each) for each in [*drafts, -1]])
    assert real == len(line)
    if walk.drafts:
        given = np.full(walk.max_rows, -1)
        given[sampled] = drafts
        assert out.row_drafts.tolist() == given.tolist()
    assert torch.equal(out.sample_index[:real], batch.sample_index)
    slots = rows.slots[line]
    place = rows.computed[line] + rows.lens[line] - walk.slots.positions.prompt_len[slots]
    place += run - drafts.repeat(1 + drafts)
    assert out.sample_row.tolist() == [*(line * walk.width + run).tolist(), *[-1] * (lines - real)]
    assert out.sample_slot.tolist() == [*slots.tolist(), *[dummy] * (lines - real)]
    assert out.sample_place.tolist() == [*place.tolist(), *[0] * (lines - real)]
    assert (out.sample_index[real:] == 0).all()


def plant(walk, plan, record, draw):
    """Plants ids outside the embedding into some prompts and some sampled tokens."""
    ids, at = np.asarray(plan.token_ids)[: plan.num_tokens], tokens_at(walk.max_rows)
    bad = draw.choice([-(2**31), -2, -1, VOCAB, 2**31 - 1], len(ids))
    ids[...] = np.where((ids >= 0) & (draw.random(len(ids)) < 0.05), bad, ids)
    record[at : at + len(ids)] = ids
    if draw.random() < 0.3:
        walk.slots.last_token[draw.integers(walk.max_slots)] = draw.choice([-5, VOCAB, 2**31 - 1])


def copy_slots(slots, walk):
    """Copies what the device writes, and the host's adapters, from the host's slots."""
    slots.word(SlotWord.LAST_TOKEN)[: walk.max_slots] = torch.from_numpy(walk.slots.last_token)
    for number in (SlotWord.LENGTH, SlotWord.NUM_DRAFTS):
        slots.word(number)[: walk.max_slots] = walk.slots.tensors.word(number)[: walk.max_slots]
    slots.drafts.copy_(walk.slots.tensors.drafts)
    slots.survivals.survivals.copy_(walk.slots.tensors.survivals.survivals)


def combinations():
    """(seed, drafts, axes, planted): `make test` walks each pair of seed and drafts once. GROUPS follow the seed, so
    among nine seeds each of them meets every number of axes."""
    for seed, drafts in [*((seed, 0) for seed in range(12)), *((seed, 1 + seed) for seed in range(6))]:
        first = (1, 3, 4)[(seed // 3 + bool(drafts)) % 3], (seed + seed // 3) % 2 == 1
        for axes in (1, 3, 4):
            for planted in (False, True):
                yield pytest.param(
                    seed, drafts, axes, planted, marks=() if (axes, planted) == first else pytest.mark.full
                )


@pytest.mark.parametrize(("seed", "drafts", "axes", "planted"), list(combinations()))
def test_a_step_equals_what_the_host_builds(seed, drafts, axes, planted):
    walk, draw = Walk(seed, axes, groups=GROUPS[seed % 3], drafts=drafts), np.random.default_rng(seed)
    slots = empty_slots(walk.max_slots, walk.max_blocks, len(walk.groups), "cpu", drafts)
    seen = marked = 0
    for plan, record in walk.steps(120):
        if planted:
            plant(walk, plan, record, draw)
        rows = RowArrays(plan)
        walk.slots.apply(plan)
        walk.slots.adapter[:] = draw.integers(0, 3, walk.max_slots) * bool(seed)
        planned, rows = rows, walk.slots.resolve(rows) if drafts else rows
        batch = build(step_of(plan, planned), rows, walk.slots, rank_of(walk))
        copy_slots(slots, walk)
        slots.word(SlotWord.ADAPTER)[: walk.max_slots] = torch.from_numpy(walk.slots.adapter)
        out = poisoned(walk)
        step_inputs(out, slots, alone(record), walk.max_rows, walk.max_tokens, walk.block_size, VOCAB)
        tokens = int(rows.starts[-1])
        assert torch.equal(out.token_ids[:tokens], batch.token_ids)
        assert torch.equal(out.positions[..., :tokens], batch.positions.clamp(min=0))
        for mapping, meta in zip(out.slot_mapping, batch.attention, strict=True):
            assert torch.equal(mapping[:tokens].clamp(min=0), meta.slot_mapping)  # -1: nothing is written
        named = slots.word(SlotWord.ADAPTER)[torch.from_numpy(rows.slots)]  # the record brings the words of new slots
        assert torch.equal(out.adapters[:tokens], named.repeat_interleave(torch.from_numpy(rows.lens)))
        assert (batch.adapters is None) == (not walk.slots.adapter[rows.slots].any())
        assert (
            batch.adapters is None
            or (batch.adapters == torch.from_numpy(walk.slots.adapter[rows.slots].repeat(rows.lens))).all()
        )
        assert not out.adapters[tokens:].any()
        assert (out.token_ids[tokens:] == 0).all()
        assert (out.positions[..., tokens:] == 0).all()
        assert (out.slot_mapping[:, tokens:] == -1).all()
        check_rows(out, walk, plan, batch, rows)
        marks = slots.word(SlotWord.OUTSIDE)[rows.slots]
        assert marks.bool().tolist() == walk.slots.outside[rows.slots].tolist()
        assert bool(((out.token_ids >= 0) & (out.token_ids < VOCAB)).all())
        marked += int(marks.sum())
        contexts = np.minimum(rows.computed + rows.lens, walk.slots.words[rows.slots, SlotWord.LAST_PLACE])
        for row, context in enumerate(contexts.tolist()):
            used = -(-context // walk.block_size)  # later entries may be left from the slot's last request
            for table, meta in zip(slots.block_tables, batch.attention, strict=True):
                assert torch.equal(table[rows.slots[row], :used], meta.block_tables[row, :used])
        seen += 1
    assert seen > 40
    assert bool(walk.verified) == bool(drafts) or walk.max_tokens == walk.max_rows
    assert (marked > 10) == planted


def test_small_pools_preempt_in_these_walks():
    walks = [Walk(seed, num_blocks=1) for seed in range(12)]
    for walk in walks:
        for _ in walk.steps(120):
            pass
    assert any(walk.scheduler.num_preemptions for walk in walks)
    assert any(walk.scheduler.prefix_hits for walk in walks)


def test_parameters_reach_their_slot():
    max_rows, max_tokens = 2, 3
    slots, out = empty_slots(4, 5, 2, "cpu"), empty_inputs(max_rows, max_tokens, 2, 1, "cpu")
    slots.word(SlotWord.OUTSIDE)[2] = slots.word(SlotWord.LAST_TOKEN)[2] = 1
    tail = tail_at(max_rows, max_tokens)
    record = np.zeros(tail + UPDATE_WORDS + SLOT_WORDS, np.int32)
    record[[Header.NUM_UPDATES, Header.NUM_PARAMS]] = 1
    record[tail : tail + UPDATE_WORDS] = 3, 1, 9, 1
    row = record[tail + UPDATE_WORDS :]
    row[:] = np.arange(-3, SLOT_WORDS - 3)
    row[[SlotWord.SLOT, SlotWord.SEED_LOW, SlotWord.SEED_HIGH]] = 2, -1, 0x12345678
    row.view(np.float32)[[SlotWord.TEMPERATURE, SlotWord.TOP_P]] = 0.7, 0.9
    row[[SlotWord.LAST_TOKEN, SlotWord.OUTSIDE]] = 0
    step_inputs(out, slots, alone(record), max_rows, max_tokens, 16, VOCAB)
    assert slots.block_tables.nonzero().tolist() == [[1, 3, 1]]
    assert int(slots.block_tables[1, 3, 1]) == 9
    assert slots.words[2].tolist() == row.tolist(), "whatever numbers a slot has, known here or not"
    assert slots.seed[2] == 0x12345678FFFFFFFF
    assert slots.real(SlotWord.TOP_P)[2] == np.float32(0.9)
    assert not slots.words[[0, 1, 3, 4]].any()


def test_records_take_turns_and_a_step_says_where_its_tokens_go():
    slots, out = empty_slots(3, 5, 2, "cpu"), empty_inputs(2, 4, 2, 1, "cpu")
    records = records_in(torch.zeros(3, tail_at(2, 4), dtype=torch.int32), "cpu")
    records.pinned[:, Header.HOME] = torch.tensor([7, 8, 9])
    homes = []
    for _ in range(7):
        step_inputs(out, slots, records, 2, 4, 16, VOCAB)
        homes.append(int(out.home))
    assert homes == [7, 8, 9, 7, 8, 9, 7]


def test_numbers_out_of_bounds_touch_nothing():
    max_rows, max_tokens = 2, 4
    slots, out = empty_slots(3, 5, 2, "cpu"), empty_inputs(max_rows, max_tokens, 2, 4, "cpu")
    record = np.full(tail_at(max_rows, max_tokens) + 40, 1 << 30, np.int32)
    step_inputs(out, slots, alone(record), max_rows, max_tokens, 16, VOCAB)
    assert not any(tensor.any() for tensor in (slots.block_tables, slots.words, slots.drafts))
    assert (out.slot_mapping == -1).all()
    assert (out.row_slot == 3).all()
    assert (out.context_len <= 5 * 16).all()
    assert ((out.query_start >= 0) & (out.query_start <= max_tokens)).all()
    assert ((out.sample_index >= 0) & (out.sample_index < max_tokens)).all()
