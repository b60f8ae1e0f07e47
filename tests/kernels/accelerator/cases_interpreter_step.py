"""The prep kernels in the interpreter against their reference, with plans of the real scheduler and broken records."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
import triton  # noqa: F401  (must precede the import of any kernel file; TRITON_INTERPRET sets the mode)

from _fast.layout import SLOT_WORDS, UPDATE_WORDS, Header, RowColumn, SlotWord, column_at, tail_at, tokens_at
from engine.kernels.pool_home import launch_pool_home, pool_home_reference
from engine.kernels.pool_rows import KINDS, launch_pool, pool_rows_reference
from engine.kernels.record import Records, records_in
from engine.kernels.sampling.drafts_home import UNREAD, launch_drafts, send_drafts_reference
from engine.kernels.sampling.home import launch_home, send_home_reference
from engine.kernels.state_inputs import launch_state_inputs, state_inputs_reference
from engine.kernels.step_inputs import launch_inputs, step_inputs_reference
from engine.kernels.step_tensors import empty_inputs, empty_slots
from engine.kernels.target import HAS_TRITON
from tests.kernels.plans import Walk
from tests.kernels.state_plans import MAX_ROWS, SLOTS, StatePlans, same
from tests.kernels.test_step_inputs import VOCAB, copy_slots, plant


def equal(got, want) -> None:
    for field in dataclasses.fields(got):
        mine, theirs = getattr(got, field.name), getattr(want, field.name)
        if dataclasses.is_dataclass(mine):
            equal(mine, theirs)
            continue
        assert (mine is None and theirs is None) or torch.equal(mine, theirs), field.name


def alone(record: torch.Tensor) -> Records:
    """Records with a single record, which is always the next one."""
    pinned = torch.zeros(1, -(-len(record) // 16) * 16, dtype=torch.int32)
    pinned[0, : len(record)] = record
    return records_in(pinned, "cpu")


@pytest.mark.covering(2)
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("planted", [False, True])
@pytest.mark.parametrize("axes", [1, 3, 4])
@pytest.mark.parametrize("seed", range(3))
def test_a_step_equals_the_reference(seed, axes, planted, drafts):
    assert HAS_TRITON
    groups = ((0, 0), (1, 6))[: 1 + seed % 2]
    walk, draw, marked = Walk(seed, axes, groups=groups, drafts=drafts), np.random.default_rng(seed), 0
    mine = empty_slots(walk.max_slots, walk.max_blocks, len(groups), "cpu", drafts)
    theirs = copy.deepcopy(mine)
    turns = [records_in(torch.zeros(2, walk.capacity, dtype=torch.int32), "cpu") for _ in range(2)]
    for number, (plan, record) in enumerate(walk.steps(20)):
        if planted:
            plant(walk, plan, record, draw)
        sizes = walk.max_rows, walk.max_tokens, len(groups), axes, "cpu", False, False
        got, want = (empty_inputs(*sizes, drafts and 3 * walk.max_rows) for _ in range(2))  # some lines have no room
        for field in dataclasses.fields(got):
            if (tensor := getattr(got, field.name)) is not None:
                tensor.fill_(-77)
        for slots in (mine, theirs):
            copy_slots(slots, walk)
        size = (walk.max_rows, walk.max_tokens, walk.block_size, VOCAB)
        for records in turns:
            records.pinned[number % 2, : len(record)] = torch.from_numpy(record)
        turns[0].staged.fill_(-7)  # the kernel must not read what was not copied
        launch_inputs(got, mine, turns[0], *size)
        step_inputs_reference(want, theirs, turns[1], *size)
        equal(got, want)
        equal(mine, theirs)
        assert torch.equal(turns[0].turn, turns[1].turn)
        marked += int(mine.word(SlotWord.OUTSIDE).sum())
    assert drafts or (marked > 0) == planted


@pytest.mark.parametrize(("bidirectional", "adapted"), [(False, False), (True, False), (False, True)])
def test_more_tokens_and_changes_than_one_program_takes(bidirectional, adapted):
    max_rows, max_tokens, block_size = 40, 700, 2
    updates, params = 5000, 600
    tail = tail_at(max_rows, max_tokens)
    end = tail + UPDATE_WORDS * updates + SLOT_WORDS * params
    record = torch.zeros(end + max_tokens, dtype=torch.int32)
    counts = {Header.NUM_ROWS: 33, Header.NUM_TOKENS: 650, Header.NUM_UPDATES: updates, Header.NUM_PARAMS: params}
    if bidirectional:
        counts[Header.POSITIONS_AT] = end
        record[end : end + 650] = torch.randint(-900, 900, (650,))  # the cache holds 400 blocks of 2
    for place, value in counts.items():
        record[place] = value
    starts = torch.cat([torch.tensor([0]), torch.randperm(649)[:32].sort().values + 1, torch.tensor([650])])
    column = {one: record[column_at(one, max_rows) :] for one in RowColumn}
    column[RowColumn.SLOT][:33] = torch.randperm(700)[:33]
    column[RowColumn.START][:34] = starts
    column[RowColumn.LEN][:33] = starts.diff()
    column[RowColumn.COMPUTED][:33] = torch.randint(0, 40, (33,))
    column[RowColumn.FLAGS][:33] = torch.randint(0, 4, (33,))
    record[tokens_at(max_rows) :][:650] = torch.randint(-3, 1000, (650,))
    places = torch.randperm(700 * 400)[:updates]
    entries = record[tail:][: UPDATE_WORDS * updates].view(updates, UPDATE_WORDS)
    entries[:, 0], entries[:, 1] = places // 400, places % 400
    entries[:, 2] = torch.randint(0, 99, (updates,))
    entries[:, 3] = torch.randint(-1, 3, (updates,))
    words = record[tail + UPDATE_WORDS * updates : end].view(params, SLOT_WORDS)
    words.copy_(torch.randint(0, 1 << 30, (params, SLOT_WORDS)))
    words[:, SlotWord.SLOT], words[:, SlotWord.OUTSIDE] = torch.randperm(700)[:params], 0
    mine, theirs = empty_slots(700, 400, 2, "cpu"), empty_slots(700, 400, 2, "cpu")
    got, want = (empty_inputs(max_rows, max_tokens, 2, 1, "cpu", bidirectional, adapted) for _ in range(2))
    launch_inputs(got, mine, alone(record), max_rows, max_tokens, block_size, 990)
    step_inputs_reference(want, theirs, alone(record), max_rows, max_tokens, block_size, 990)
    equal(got, want)
    equal(mine, theirs)
    assert 2 < int(mine.word(SlotWord.OUTSIDE).sum()) < 30
    assert not adapted or (got.adapters[:650].max() > 0 and not got.adapters[650:].any())
    assert not bidirectional or (got.last_keys[:650].min() == -800 and got.last_keys[:650].max() == 799)


@pytest.mark.parametrize("value", [-1, 1 << 30, -(1 << 30), 7])
def test_a_broken_record_stays_inside_its_tensors(value):
    slots, out = empty_slots(3, 5, 1, "cpu"), empty_inputs(2, 4, 1, 4, "cpu")
    record = torch.full((tail_at(2, 4) + 40,), value, dtype=torch.int32)
    launch_inputs(out, slots, alone(record), 2, 4, 16, 5)
    assert ((out.row_slot >= 0) & (out.row_slot <= 3)).all()
    assert (out.context_len <= 5 * 16).all()
    assert ((out.query_start >= 0) & (out.query_start <= 4)).all()
    assert ((out.sample_index >= 0) & (out.sample_index < 4)).all()
    assert ((out.token_ids >= 0) & (out.token_ids < 5)).all()
    assert (out.slot_mapping >= -1).all()


@pytest.mark.parametrize("home", [-1, 0, 2, 9])
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (256, 1), (600, 1), (200, 3)])
def test_tokens_go_to_the_buffer_that_the_step_named(rows, width, home):
    tokens = torch.randint(-4, 1000, (rows, width), dtype=torch.int32)
    row_slot, slots = torch.randperm(rows, dtype=torch.int32), empty_slots(rows, 1, 1, "cpu")
    slots.word(SlotWord.OUTSIDE)[:] = torch.rand(rows + 1) < 0.2
    slots.word(SlotWord.NUM_DRAFTS)[:] = torch.randint(0, 9, (rows + 1,))
    got, want = (torch.full((3, rows, width), -77, dtype=torch.int32) for _ in range(2))
    drafts = torch.randint(-1, 5, (rows,), dtype=torch.int32) if width > 1 and home else None
    launch_home(got, tokens, torch.tensor([home], dtype=torch.int32), row_slot, slots, drafts)
    send_home_reference(want, tokens, torch.tensor([home], dtype=torch.int32), row_slot, slots, drafts)
    assert torch.equal(got, want)


@pytest.mark.parametrize("home", [-1, 0, 2, 9])
@pytest.mark.parametrize(("rows", "most"), [(1, 1), (200, 3), (40, 64)])
def test_drafts_go_to_the_buffer_that_the_step_named(rows, most, home):
    row_slot, slots = torch.randperm(rows, dtype=torch.int32), empty_slots(rows, 1, 1, "cpu", most)
    slots.drafts[:] = torch.randint(-3, 1000, slots.drafts.shape)
    drafts, number = torch.randint(-1, most + 1, (rows,), dtype=torch.int32), torch.tensor([home], dtype=torch.int32)
    got, want = (torch.full((3, rows, 1 + most), UNREAD, dtype=torch.int32) for _ in range(2))
    launch_drafts(got, number, drafts, row_slot, slots)
    send_drafts_reference(want, number, drafts, row_slot, slots)
    assert torch.equal(got, want)
    assert (got[min(max(home, 0), 2)] != UNREAD).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("dtype", "skips"), [(torch.float32, False), (torch.bfloat16, False), (torch.float16, True), (torch.float32, True)]
)
def test_pooled_rows_equal_the_reference(kind, dtype, skips):
    bounds = torch.tensor([0, 3, 3, 40, 41, 77, 77], dtype=torch.int32)  # two rows have no tokens
    hidden = torch.randn(80, 200, generator=torch.Generator().manual_seed(1)).to(dtype)
    hidden[77:] = float("nan")  # belongs to no row
    # In one row every token belongs to the excluded prompt.
    counted = torch.tensor([2, 0, 36, 1, 17, 5], dtype=torch.int32) if skips else None
    found, wanted = (pool(hidden, bounds, kind, counted) for pool in (launch_pool, pool_rows_reference))
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("home", [0, 2, 9, -4])
def test_pooled_lines_reach_their_buffer(home):
    lines = torch.randn(5, 1300)
    found, wanted = torch.zeros(2, 3, 7, 1300)
    launch_pool_home(found, lines, torch.tensor([home], dtype=torch.int32))
    pool_home_reference(wanted, lines, torch.tensor([home], dtype=torch.int32))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("fed", [False, True])
def test_rows_with_states_equal_the_reference(fed):
    walk, checkpoints, moved = StatePlans(int(fed)), 0, 0
    slots = empty_slots(SLOTS, 0, 0, "cpu", 3) if fed else None
    mine, theirs = walk.tables(), walk.tables()
    records = records_in(torch.full((2, len(walk.record)), -7, dtype=torch.int32), "cpu")
    for number, _ in enumerate(walk.steps(25)):
        records.turn.fill_(number % 2)
        records.pinned[number % 2] = torch.from_numpy(walk.record)
        if slots is not None:  # rows begin where the device says, never before their base
            slots.words.random_(0, 130)
            records.pinned[number % 2, column_at(RowColumn.FLAGS, MAX_ROWS) :][:MAX_ROWS].random_(0, 4)
        launch_state_inputs(mine, records, walk.sizes, slots)
        state_inputs_reference(theirs, records.pinned[number % 2], walk.sizes, slots)
        assert same(mine, theirs)
        planned = torch.from_numpy(walk.record)[column_at(RowColumn.COMPUTED, MAX_ROWS) :][: walk.plan.num_rows]
        moved += int((theirs.rows[5, : len(planned)] != planned).sum())
        assert int(records.turn) == number % 2
        checkpoints += int(theirs.checkpoints[0].count_nonzero())
    assert checkpoints > 0
    assert (moved > 0) == fed
