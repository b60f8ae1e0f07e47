"""gpu_moe_tiles without a card: every class is tried with tiles that fit, and the printed lines can be committed."""

from __future__ import annotations

import math

import pytest

from engine.kernels.moe import tiles
from engine.kernels.moe.float8 import float8_tile
from engine.kernels.moe.grouped import Tile, grouped_reference
from engine.kernels.moe.tiles import CLASSES, LINES, Shape, line_of, tile_for
from engine.kernels.target import Target
from tests.bench import gpu_moe_tiles

H100 = Target("cuda", "sm_90", 132, 32, 227 << 10)


@pytest.mark.parametrize("form", gpu_moe_tiles.FORMS)
def test_each_form_gets_a_line_of_its_fastest_tiles(form, monkeypatch, capsys):
    shape = Shape(4, 128, 256, gated=True)
    monkeypatch.setattr(gpu_moe_tiles, "DEVICE", "cpu")
    monkeypatch.setattr(gpu_moe_tiles, "FORMS", {form: ((shape,), 2)})
    monkeypatch.setattr(gpu_moe_tiles, "CLASSES", (0, 16, 64, math.inf))
    seen = []

    def time_of(calls):
        tile = calls[0].keywords["tile"]
        seen.append(tile)
        return abs(tile.block_m - 64) + tile.block_n / 1e3 + tile.stages / 1e6

    gpu_moe_tiles.show([form], H100, time_of)
    assert all(4 * (tile.block_m * tile.block_n) <= 128 * 256 * 4 for tile in seen)
    *_, line = capsys.readouterr().out.splitlines()
    said, made = line.rstrip(",").split(": ", 1)
    assert eval(said) == shape
    runs = eval(made, {"_line": tiles._line, "Tile": Tile})
    # Tiles for twice the pairs are tried too.
    nearest = 32 if "E4M3 by E4M3" in form or form in ("MXFP4", "INT4 by 128") else 16
    assert [tile.block_m for tile in runs] == [32 if "E4M3 by E4M3" in form else 16, nearest, 64, 64]


def test_old_and_new_kernels_are_compared(monkeypatch, capsys):
    monkeypatch.setattr(gpu_moe_tiles, "DEVICE", "cpu")
    shapes = Shape(4, 16, 24, gated=True), Shape(4, 24, 16, gated=False)
    monkeypatch.setattr(gpu_moe_tiles, "FORMS", {"bfloat16": (shapes, 2)})

    def grouped(x, weight, bias, pairs, activation, _tile):
        return grouped_reference(x, weight, bias, pairs, activation)

    monkeypatch.setattr(gpu_moe_tiles, "launch_grouped", grouped)
    gpu_moe_tiles.compare([8], H100, lambda calls: 2.0 * bool(calls[0]().numel()), 1e9)
    *lines, old, new = capsys.readouterr().out.splitlines()
    assert old.startswith("8 rows, sort and both, grouped: 2.0 us")
    assert new.startswith("8 rows, sort and both, persistent: 2.0 us")
    errors = [float(line.rpartition(" ")[2]) for line in lines]
    assert len(errors) == 16
    assert max(errors) < 8e-3


@pytest.mark.parametrize("room", [99 << 10, 160 << 10, 227 << 10])  # shared memory of sm_89, gfx950 and sm_90
@pytest.mark.parametrize("gated", [False, True])
def test_tiles_of_fp8_by_a_rule_find_room(room, gated):
    for each in (8, 32, 64, 999):
        tile = float8_tile(Target("cuda", "sm_89", 128, 32, room), each, gated)
        assert tile.stages * (tile.block_m + 2 * tile.block_n) * tile.block_k < room
        assert tile.block_n == 128 or not gated


@pytest.mark.parametrize(("form", "shapes"), LINES["sm_90"].items())
def test_committed_lines_have_a_tile_per_class(form, shapes):
    for shape, line in shapes.items():
        assert len(line) == len(CLASSES)
        assert line_of("sm_90", form, shape) is line


def test_an_unmeasured_shape_takes_the_nearest_and_says_so_once(monkeypatch, caplog):
    monkeypatch.setattr(tiles, "target", lambda: H100)
    line_of.cache_clear()
    near, shape = Shape(128, 768, 2048, gated=True), Shape(64, 768, 2048, gated=True)
    rule = Tile(1, 2, 3, 4, 5)
    with caplog.at_level("INFO", "omniloop.engine"):
        for each, place in ((0, 0), (8, 1), (8.5, 2), (1e6, -1)):
            assert tile_for("bfloat16", shape, each, lambda: rule) == LINES["sm_90"]["bfloat16"][near][place]
            assert tile_for("INT8 by 128", shape, each, lambda: rule) is rule
    first, second = [record.getMessage() for record in caplog.records]
    assert "(64, 768, 2048) of gate and up in bfloat16 have no measured tiles on sm_90: those of (128, 768," in first
    assert "in INT8 by 128 have no measured tiles on sm_90: a rule says them" in second
