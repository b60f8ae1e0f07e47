"""Pictures in a graph with a budget of patches: the rows equal those of a run without spare room."""

import pytest
import torch

from engine.encoders.qwen_vl.graphs import BUDGETS, TowerGraphs
from engine.encoders.qwen_vl.tables import exact_room, grid_parts, grid_tables
from tests import tiny
from tests.models.harness import load

SMALL = (384, 640)


@pytest.fixture(scope="module", params=["omni", "qwen3_vl"])
def tower(request):
    """A tower with windows; and a tower without, with interpolated positions and rows of several parts."""
    return load(tiny.checkpoint(request.param)).vision


@pytest.fixture
def graphed(tower, monkeypatch):
    """The tower with graphs that are plain calls, and a list of the budgets that were used."""
    used = []

    def record(body):
        body()
        return lambda: (used.append(body.args[0].patches), body())

    graphs = TowerGraphs(tower.config, tower.patch_embed.in_features, tower.compute, tower.dtype, "cpu", SMALL)
    monkeypatch.setattr(tower, "graphs", graphs)
    tower.record(record)
    yield tower, used
    monkeypatch.undo()
    tower.record(record)


def rows(tower, patches, grid):
    with torch.inference_mode():
        return tower([patches], [torch.tensor([grid])])[0]


def alone(tower, patches, grid):
    """The rows of the tower without graphs, and without other items."""
    parts = [grid_parts(grid, tower.config)]
    return tower.compute(patches, grid_tables(parts, exact_room(parts, tower.config), "cpu"))


@pytest.mark.parametrize(
    ("grid", "budget"),
    [
        ((1, 2, 2), 384),
        ((1, 16, 18), 384),
        ((1, 16, 24), 384),
        ((1, 20, 20), 640),
        ((1, 22, 28), 640),
        ((3, 10, 14), 640),
        ((2, 10, 14), 640),  # two frames, and the padding as a third; a budget of 384 patches has only two
        ((1, 2, 192), 384),
        ((1, 26, 26), None),
        ((5, 2, 2), None),
    ],
)
def test_rows_are_those_without_room_to_spare(tower, graphed, grid, budget):
    t, h, w = grid
    patches = torch.randn(t * h * w, tower.patch_embed.in_features, generator=torch.Generator().manual_seed(h * w))
    with torch.inference_mode():
        wanted = alone(tower, patches, grid)
    tower, used = graphed
    rows(tower, torch.randn(384, tower.patch_embed.in_features), (1, 16, 24))  # leaves other values in the buffers
    used.clear()
    for _ in range(2):
        got = rows(tower, patches, grid)
        assert got.shape == wanted.shape
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    assert used == ([] if budget is None else [budget] * 2)


@pytest.mark.parametrize(
    ("grids", "budget"),
    [
        (((1, 8, 8), (1, 8, 8)), 640),  # padding is a third frame, and a budget of 384 patches has only two
        (((1, 12, 16), (1, 12, 16)), 384),
        (((1, 10, 14), (1, 10, 12), (1, 2, 90)), 640),
        (((1, 20, 20), (1, 20, 22)), None),
        (((1, 2, 2),) * 5, None),
    ],
)
def test_rows_of_items_together_are_those_of_each_alone(tower, graphed, grids, budget):
    draw = torch.Generator().manual_seed(7)
    numbers = tower.patch_embed.in_features
    items = [torch.randn(t * h * w, numbers, generator=draw) for t, h, w in grids]
    with torch.inference_mode():
        wanted = [alone(tower, *pair) for pair in zip(items, grids)]
    tower, used = graphed
    used.clear()
    features = [{"pixel_values": x, "grid_thw": torch.tensor([grid])} for x, grid in zip(items, grids)]
    with torch.inference_mode():
        found = tower.encode_together(features)
    assert used == ([] if budget is None else [budget])
    for rows, want in zip(found, wanted):
        torch.testing.assert_close(rows, want, rtol=1e-5, atol=1e-5)
        assert rows.untyped_storage().nbytes() == rows.nbytes, "rows that hold others' memory are never freed"


def test_what_a_graph_reads_is_one_picture_and_nothing_behind_it(graphed):
    tower, _ = graphed
    draw = torch.Generator().manual_seed(5)
    for grid in ((1, 22, 28), (1, 8, 8), (1, 8, 8), (1, 4, 16), (1, 20, 20), (1, 8, 8)):
        count = grid[1] * grid[2]
        patches = torch.randn(count, tower.patch_embed.in_features, generator=draw)
        rows(tower, patches, grid)
        tables = tower.tables.get((grid,))
        assert torch.equal(tower.graphs.patches[:count], patches)
        assert not tower.graphs.patches[count:].any()
        assert torch.equal(tower.graphs.flat[: tables.room.numbers], tables.flat)


def test_a_picture_keeps_its_rows_when_the_next_one_comes(graphed):
    tower, _ = graphed
    first = rows(tower, torch.randn(64, tower.patch_embed.in_features), (1, 8, 8))
    before = first.clone()
    rows(tower, torch.randn(64, tower.patch_embed.in_features), (1, 8, 8))
    assert torch.equal(first, before)


def test_long_segments_stay_long_in_every_budget(tower):
    graphs = TowerGraphs(tower.config, 4, tower.compute, tower.dtype, "cpu")
    for budget in BUDGETS:
        room = graphs._room(budget)
        assert room.frames >= 2
        assert budget > 128 * room.frames
        assert budget <= 128 * room.windows or not tower.config.window_size
