"""Many rows times a quantised weight: dequantised as a whole where the start measured that as faster (faked clock)."""

from __future__ import annotations

import logging

import pytest
import torch

from engine.kernels.activation import Activation
from engine.kernels.gemm import long_products
from engine.kernels.gemm.codes import Codes, Inputs, Kind
from engine.kernels.gemm.long_products import LongProducts
from engine.kernels.gemm.pack import Placement, pack_pieces

WIDTH, DEPTH = 64, 96


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(long_products, "LEAST_WEIGHT", 0)
    monkeypatch.setattr(long_products, "SIZES", (4, 8, 16))
    monkeypatch.setattr(long_products, "LEAST_ROWS", 4)


@pytest.fixture
def widened(monkeypatch):
    """The dtypes of all weights that were dequantised as a whole."""
    found, widen = [], long_products.widen_weight

    def noted(weight, dtype):
        found.append(dtype)
        return widen(weight, dtype)

    monkeypatch.setattr(long_products, "widen_weight", noted)
    return found


def weight_of(bias=True, inputs=None, order=False, **placed):
    draw = torch.Generator().manual_seed(0)
    values = torch.randint(0, 16, (WIDTH, DEPTH), generator=draw).to(torch.uint8)
    columns = torch.randperm(DEPTH, generator=draw) if order else None
    codes = Codes(Kind.INT4, values, torch.rand(WIDTH, DEPTH // 32, generator=draw), 32, order=columns)
    if inputs is not None:
        codes = Codes(Kind.INT8, values.to(torch.int8), torch.ones(WIDTH, 1), DEPTH, inputs=inputs)
    placement = Placement(torch.float32, "cpu:0", float8_units=False, **placed)
    given = torch.rand(WIDTH, generator=draw) if bias else None
    return pack_pieces([codes], given, placement, gated=False), placement.products.long


def timed(monkeypatch, long, gains):
    """Autotunes with a clock by which dequantising the whole weight is faster from `gains` rows on."""

    def clock(rivals, codes, times, host):
        rows = len(rivals[0].args[0])
        return [2.0, 1.0 if rows >= gains else 3.0][: len(rivals)]

    monkeypatch.setattr(long_products, "seconds", clock)
    long.autotune([2, 16], torch.float32)


def rows(count):
    return torch.randn(count, DEPTH, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_many_rows_are_multiplied_by_the_widened_weight(monkeypatch, widened, bias, order):
    weight, long = weight_of(bias, order=order)
    x, out = rows(16), torch.ones(16, WIDTH)
    wanted = weight.linear(x), weight.linear(x, out.clone(), out), weight.gated(x, Activation.SILU)
    assert not widened  # the start has not timed products yet
    timed(monkeypatch, long, gains=8)
    for count in (2, 7, 8, 16):
        widened.clear()
        mine = out[:count].clone()
        got = weight.linear(x[:count]), weight.linear(x[:count], mine, mine), weight.gated(x[:count], Activation.SILU)
        for found, want in zip(got, wanted, strict=True):
            torch.testing.assert_close(found, want[:count], rtol=1e-5, atol=1e-3)
        assert got[1] is mine
        assert widened == [torch.float32] * (3 if count >= 8 else 0)
    assert weight.linear(x.view(2, 8, DEPTH)).shape == (2, 8, WIDTH)
    assert weight.gated(x.view(2, 8, DEPTH), Activation.SILU).shape == (2, 8, WIDTH // 2)


@pytest.mark.parametrize("how", ["deterministic", "integers", "large", "no gain", "no room"])
def test_other_products_are_by_tiles(monkeypatch, widened, how, caplog):
    weight, long = weight_of(inputs=Inputs() if how == "integers" else None, invariant=how == "deterministic")
    weight.linear(rows(16))
    if how == "large":
        monkeypatch.setattr(long_products, "MOST_BYTES", WIDTH * DEPTH)
    if how == "no room":
        monkeypatch.setattr(long_products, "widen_weight", no_room)
    with caplog.at_level(logging.WARNING):
        timed(monkeypatch, long, gains=1 << 20 if how == "no gain" else 1)
    assert ("cannot be dequantised as a whole" in caplog.text) == (how == "no room")
    widened.clear()
    weight.linear(rows(16))
    assert not widened


@pytest.mark.parametrize("activation", [None, Activation.SILU])
def test_the_start_launches_every_way_to_multiply_by_the_widened_weight(monkeypatch, activation):
    """The faked library has three kernels, by the number of rows; the start launches all of them."""
    seen, choice = set(), "linear_choice" if activation is None else "gated_choice"
    monkeypatch.setattr(long_products, choice, lambda rows, *_: rows % 3)
    weight, long = weight_of()
    weight.linear(rows(16)) if activation is None else weight.gated(rows(16), activation)
    whole = LongProducts._whole

    def noted(self, x, *given):
        seen.add(len(x))
        return whole(self, x, *given)

    monkeypatch.setattr(LongProducts, "_whole", noted)
    timed(monkeypatch, long, gains=8)
    assert {size % 3 for size in seen if size >= 8} == {0, 1, 2}


def no_room(weight, dtype):
    raise torch.OutOfMemoryError("none is left")


def test_shapes_are_timed_once_and_other_kinds_apart(monkeypatch, widened):
    """A weight of another shape that is loaded later uses tiles: nothing is timed after the start."""
    weight, long = weight_of()
    weight.linear(rows(16))
    timed(monkeypatch, long, gains=1)
    assert long.widens(weight.weight, 4, None)
    assert not long.widens(weight.weight, 4, Activation.SILU)
    assert not long.widens(weight.weight, 3, None)
    other = LongProducts()
    assert not other.widens(weight.weight, 16, None)
