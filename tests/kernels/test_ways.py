"""Which kernel multiplies, by the tables of gemm/ways, for an H100 that need not be here."""

from __future__ import annotations

import pytest

from engine.kernels import tune
from engine.kernels.gemm import ways
from engine.kernels.target import CARDS

H100 = CARDS["sm_90"]


@pytest.fixture(autouse=True)
def h100(monkeypatch):
    monkeypatch.setattr(ways, "few_rows", lambda *sizes: tune.choose(H100, *sizes))
    monkeypatch.setattr(
        ways, "one_wave_gated", lambda rows, *shape: rows <= tune.MAX_ROWS and tune.in_one_wave(H100, rows, *shape)
    )
    monkeypatch.setattr(
        ways, "many_gated", lambda rows, *shape: rows >= tune.MANY_ROWS and tune.fills(H100, rows, *shape)
    )


def test_gated_products_of_an_8b_by_their_rows():
    found = [ways.gated_way(rows, 12288, 4096) for rows in (1, 64, 65, 95, 96, 128, 129, 512, 768)]
    names = [None if choice is None else choice[0].name.removeprefix("gemm/") for choice in found]
    one_wave, many = "gated_one_wave", "gated_persistent"
    assert names == ["split_k", "split_k", None, None, one_wave, one_wave, None, many, None]


@pytest.mark.parametrize("shape", [*tune.ONE_WAVE["sm_90"], *tune.LEAST_FILL["sm_90"], (11008, 2048)])
def test_at_most_one_way_takes_a_gated_product(shape):
    """So rows that gemm/split_k leaves because they are not aligned go to the vendor's library."""
    for rows in (1, 32, 33, 64, 65, 96, 128, 129, 256, 257, 512, 1024, 4096):
        assert sum(bool(way.takes(rows, *shape, True, None, None)) for way in ways.GATED) <= 1
