"""The vision tower's graphs on a real accelerator: the same rows as its eager run, for one picture after the other."""

import pytest
import torch

from engine.device.accelerator import Accelerator
from engine.encoders.qwen_vl.graphs import BUDGETS
from engine.encoders.qwen_vl.tables import exact_room, grid_parts, grid_tables
from engine.models.registry import build_model, load_model_config
from engine.weights.load import load_weights
from tests import tiny

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")]
GRIDS = [
    (1, 2, 2),
    (1, 18, 18),
    (1, 36, 36),
    (1, 34, 46),
    (1, 4, 90),
    (2, 16, 32),
    (1, 54, 56),
    (1, 74, 74),
    (1, 90, 90),
]


@torch.inference_mode()
def test_graphs_give_the_rows_of_the_eager_tower():
    stream = torch.cuda.current_stream()
    accelerator = Accelerator("cuda:0")
    try:
        folder = tiny.checkpoint("omni")
        model = build_model(load_model_config(folder), torch.bfloat16, "cuda:0")
        load_weights(model, str(folder))
        tower = model.vision
        draw = torch.Generator(device="cuda").manual_seed(1)
        numbers = tower.patch_embed.in_features
        items = [torch.randn(t * h * w, numbers, generator=draw, device="cuda").bfloat16() for t, h, w in GRIDS]
        parts = [[grid_parts(grid, tower.config)] for grid in GRIDS]
        rooms = [exact_room(one, tower.config) for one in parts]
        tables = [grid_tables(one, room, "cuda:0") for one, room in zip(parts, rooms)]
        wanted = [tower.compute(x, table) for x, table in zip(items, tables)]
        tower.record(accelerator.recorded)
        assert set(tower.graphs._replays) == set(BUDGETS)
        grids = [torch.tensor([grid]) for grid in GRIDS]
        for _ in range(2):
            alone = [tower([x], [grid])[0] for x, grid in zip(items, grids)]
            assert all(tower.tables.get((grid,)).room.graphed for grid in GRIDS)
            together = tower(items[:5], grids[:5])
            assert tower.tables.get(tuple(GRIDS[:5])).room.graphed
            for rows, want in zip(alone + together, wanted + wanted[:5]):
                assert rows.shape == want.shape
                # With another number of rows a product may use another kernel: some roundings differ.
                assert (rows - want).float().norm() <= 0.01 * want.float().norm()
    finally:
        accelerator.close()
        torch.cuda.set_stream(stream)
