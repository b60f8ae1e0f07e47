"""The state columns of a step's rows reach their StateMetas: columns, padding, and blocks of each run by group."""

import numpy as np
import pytest
import torch

from engine.cache.layout import CacheLayout
from engine.cache.runs import runs_over
from engine.cache.state import Part, StateSpec
from engine.cache.tokens import FullSpec
from engine.step.backend.states import StateColumns, StateRows

F32 = torch.float32
# Four layers in two groups: a state has 5 pages in each group, a tail 4.
STATE = StateSpec((Part(16, 128, F32), Part(3, 1024, F32)), (Part(4, 128, F32), Part(1, 512, F32)), 4, 4)
RUNS = CacheLayout([FullSpec(2, 32, F32)] * 2 + [STATE] * 4, 8).runs
MAX_ROWS, IDS = 5, 40


def drawn(draw, rows):
    """Random columns for `rows` rows, and the places of their tokens."""
    ids = draw.integers(1, IDS + 1, (3, rows), dtype=np.int32)
    base = 4 * draw.integers(0, 9, rows, dtype=np.int32)
    checkpoints = draw.integers(0, IDS + 1, (2, 4, rows), dtype=np.int32)
    columns = StateColumns(*ids, base, base + 4, *checkpoints)
    lens = draw.integers(1, 9, rows, dtype=np.int32)
    return columns, base + draw.integers(0, 4, rows, dtype=np.int32), np.concatenate([[0], lens.cumsum()])


def test_metas_have_the_columns_of_the_plan_and_padded_rows_have_none():
    draw = np.random.default_rng(3)
    rows = StateRows(RUNS, MAX_ROWS, IDS, "cpu")
    recorded = rows.metas(MAX_ROWS)[0]  # as in a graph: later steps use the same addresses
    for count in (5, 2, 0, 3):
        columns, start, query_start = drawn(draw, count)
        rows.fill(columns, start, query_start)
        (meta, _), padded = rows.metas(count), MAX_ROWS - count
        names = ("base_run", "write_run", "tail_run", "base", "new_base")
        given = {name: getattr(columns, name) for name in names} | {"start": start}
        for name, column in given.items():
            assert getattr(meta, name).tolist() == column.tolist()
            assert getattr(recorded, name).tolist() == [*column.tolist(), *[0] * padded]
            assert getattr(recorded, name).is_contiguous()
        for name in ("checkpoint_run", "checkpoint_at"):
            assert getattr(meta, name).tolist() == getattr(columns, name).T.tolist()
            assert getattr(recorded, name)[count:].count_nonzero() == 0
            assert getattr(recorded, name).is_contiguous()
        assert meta.query_start.tolist() == query_start.tolist()
        assert recorded.query_start.tolist() == [*query_start.tolist(), *query_start[-1:].tolist() * padded]


def test_each_group_finds_its_blocks_of_states_and_tails():
    assert [group.layers for group in RUNS.groups] == [(2, 3), (4, 5)]
    assert [(group.state_pages, group.tail_pages) for group in RUNS.groups] == [(5, 4), (5, 4)]
    rows, blocks = StateRows(RUNS, MAX_ROWS, IDS, "cpu"), list(range(1, 19))
    first, second = rows.metas(1)
    rows.set_runs({7: blocks[:10], 40: [*blocks[10:18], 0, 0]})  # as in a plan: 0 after the last block
    assert first.runs[7].tolist() == [1, 2, 3, 4, 5]
    assert second.runs[7].tolist() == [6, 7, 8, 9, 10]
    assert first.runs[40].tolist() == [11, 12, 13, 14, 0]
    assert second.runs[40].tolist() == [15, 16, 17, 18, 0]
    assert first.runs.stride() == (RUNS.columns, 1)
    rows.set_runs({7: blocks[5:15]})  # the run has other blocks now
    assert second.runs[7].tolist() == [11, 12, 13, 14, 15]
    assert first.runs[0].count_nonzero() == second.runs[0].count_nonzero() == 0
    with pytest.raises(AssertionError, match="run 0 has the dummy block"):
        rows.set_runs({0: blocks[:10]})


def test_runs_of_unlike_layers_differ_in_their_number_of_blocks():
    """A state and a tail have equally many pages in total, but in different groups."""
    low, high = (StateSpec((Part(rows, 64, F32),), (Part(tail, 64, F32),), 1, 1) for rows, tail in ((1, 3), (3, 1)))
    runs = runs_over({low: [0], high: [1]}, [256])
    assert (runs.state_blocks, runs.tail_blocks) == (4, 5)
    assert runs.columns_of(4) == [0, 3, 4, 5]
    assert runs.columns_of(5) == [0, 1, 2, 3, 4]
