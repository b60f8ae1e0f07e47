"""Products and the rotary table in the interpreter against their references.

Products run in float32 and float16: the interpreter stores bfloat16 as integers and cannot multiply bfloat16.
"""

import pytest
import torch
import triton  # noqa: F401  (must precede the import of any kernel file; TRITON_INTERPRET sets the mode)

from engine.kernels.activation import Activation
from engine.kernels.gemm import gated_one_wave, gated_persistent, invariant
from engine.kernels.gemm.dense_row import RowCut, dense_row_reference, launch_dense_row
from engine.kernels.gemm.descriptors import is_aligned
from engine.kernels.gemm.epilogue import empty_unscaled
from engine.kernels.gemm.gated_one_wave import launch_one_wave
from engine.kernels.gemm.gated_persistent import gated_reference, launch_gated
from engine.kernels.gemm.invariant import invariant_linear_reference, launch_invariant
from engine.kernels.gemm.split_k import (
    Split,
    arrivals,
    launch_split,
    split_linear_reference,
)
from engine.kernels.norm import rms_norm_reference
from engine.kernels.room import MAX_BLOCK, empty_rows, whole_tiles
from engine.kernels.rope import cos_sin_reference, launch_cos_sin
from engine.kernels.target import HAS_TRITON, Target

# NumPy's exp overflows to inf, and the sigmoid is then 0.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")
DTYPES = [torch.float32, torch.float16]
ACTIVATIONS = list(Activation)[:3]  # all activations share this epilogue; cases_interpreter.py tests the others


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-9))


def limit(dtype: torch.dtype) -> float:
    return 1e-6 if dtype == torch.float32 else 1e-3


@pytest.fixture(autouse=True)
def seed():
    assert HAS_TRITON
    torch.manual_seed(0)


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize(("rows", "width", "depth"), [(1, 64, 128), (5, 100, 200), (20, 130, 96), (64, 1, 64)])
def test_split_products(rows, width, depth, activation, splits, dtype):
    weight = (torch.randn(width * (1 + (activation is not None)), depth) / 8).to(dtype)
    x, bias, residual = torch.randn(rows, depth + 8).to(dtype)[:, :depth], torch.randn(len(weight)).to(dtype), None
    got, want = torch.empty(rows, width, dtype=dtype), torch.empty(rows, width, dtype=dtype)
    cut = Split(64, 32, splits, 2, 4)
    for added in (residual, torch.randn(rows, width).to(dtype)):
        launch_split(x, weight, bias, added, got, activation, cut)
        split_linear_reference(x, weight, bias, added, want, activation, cut)
        assert error(got, want) < limit(dtype)
    got.copy_(residual := torch.randn(rows, width).to(dtype))
    launch_split(x, weight, None, got, got, activation, cut)
    split_linear_reference(x, weight, None, residual, want, activation, cut)
    assert error(got, want) < limit(dtype)
    assert not arrivals(x.device).any()


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("width", "depth", "cut"), [(21, 96, RowCut(4, 32, 1)), (16, 200, RowCut(8, 128, 1))])
def test_one_row_between_two_norms(width, depth, cut, biased, activation, dtype):
    """A product that adds to the residual stream, followed by a product of the normed stream."""
    first, second = torch.randn(depth, width).to(dtype), torch.randn(width * (1 + (activation is not None)), depth)
    biases = [torch.randn(len(weight)).to(dtype) if biased else None for weight in (first, second)]
    second, gain = second.to(dtype), torch.randn(depth)
    x = torch.randn(1, -(-width // 8) * 8).to(dtype)
    first = torch.nn.functional.pad(first, (0, x.shape[1] - width))
    got = torch.randn(1, depth).to(dtype)
    want = got.clone()
    mine, theirs = empty_unscaled(got, cut.block_n, gain, 1e-5), empty_unscaled(want, cut.block_n, gain, 1e-5)
    launch_dense_row(x, first, biases[0], got, got, None, cut, after=mine)
    dense_row_reference(x, first, biases[0], want, want, None, cut, after=theirs)
    assert error(got, want) < limit(dtype)
    assert error(mine.rows, theirs.rows) < limit(dtype)
    assert error(mine.squares.sum(0), theirs.squares.sum(0)) < limit(dtype)
    out, want = torch.empty(1, width, dtype=dtype), torch.empty(1, width, dtype=torch.float64)
    normed = rms_norm_reference(got.double(), gain.double(), 1e-5)
    dense_row_reference(normed, second, biases[1], None, want, activation, cut)
    launch_dense_row(mine.rows, second, biases[1], None, out, activation, cut, before=mine)
    assert error(out, want) < limit(dtype)


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("rows", "width", "depth"), [(1, 64, 128), (5, 100, 200), (20, 130, 96), (64, 1, 330)])
def test_a_norm_between_two_products(rows, width, depth, biased, activation, splits, dtype):
    cut, gain = Split(64, 32, splits, 2, 4), torch.randn(depth)
    first, second = (
        torch.randn(depth, width).to(dtype),
        torch.randn(width * (1 + (activation is not None)), depth).to(dtype),
    )
    biases = [torch.randn(len(weight)).to(dtype) if biased else None for weight in (first, second)]
    x, residual = torch.randn(rows, width).to(dtype), torch.randn(rows, depth).to(dtype)
    got, want = residual.clone(), residual.clone()
    mine, theirs = empty_unscaled(got, cut.block_n, gain, 1e-5), empty_unscaled(want, cut.block_n, gain, 1e-5)
    launch_split(x, first, biases[0], got, got, None, cut, after=mine)
    split_linear_reference(x, first, biases[0], want, want, None, cut, after=theirs)
    assert error(got, want) < limit(dtype)
    assert error(mine.rows, theirs.rows) < limit(dtype)
    assert error(mine.squares.sum(0), theirs.squares.sum(0)) < limit(dtype)
    normed = rms_norm_reference(got.double(), gain.double(), 1e-5)
    out, want = torch.empty(rows, width, dtype=dtype), torch.empty(rows, width, dtype=torch.float64)
    split_linear_reference(normed, second, biases[1], None, want, activation, cut)
    launch_split(mine.rows, second, biases[1], None, out, activation, cut, before=mine)
    assert error(out, want) < limit(dtype)
    split_linear_reference(mine.rows, second, biases[1], None, out, activation, cut, before=mine)
    assert error(out, want) < limit(dtype)
    assert not arrivals(x.device).any()


@pytest.mark.covering(2)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(
    ("activation", "added"), [(None, False), (None, True), *((each, False) for each in ACTIVATIONS)]
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width", "depth"), [(1, 8, 8), (65, 72, 136), (130, 64, 200), (256, 8, 96)])
def test_products_in_tiles(rows, width, depth, dtype, activation, added, splits):
    cut = Split(32, 32, splits, 2, 4, 64)
    weight, bias = (
        (torch.randn(width * (1 + (activation is not None)), depth) / 8).to(dtype),
        torch.randn(width * (1 + (activation is not None))).to(dtype),
    )
    x, residual = torch.randn(rows, depth + 8).to(dtype)[:, :depth], torch.randn(rows, width).to(dtype)
    for given in (bias, None):
        got, want = (residual.clone() if added else torch.full_like(residual, torch.nan) for _ in range(2))
        launch_split(x, weight, given, got if added else None, got, activation, cut)
        split_linear_reference(x, weight, given, residual if added else None, want, activation, cut)
        assert error(got, want) < limit(dtype)
    assert not arrivals(x.device).any()


@pytest.mark.covering(2)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("rows", "before", "hidden", "width"), [(65, 96, 128, 72), (130, 136, 200, 64), (256, 64, 72, 8)]
)
def test_a_norm_between_two_products_in_tiles(rows, before, hidden, width, biased, activation, splits):
    """Rows and columns may end within a tile. A product in one tile reads the squares of a product in several tiles."""
    dtype, cut, gain = torch.float16, Split(32, 32, splits, 2, 4, 64), torch.randn(hidden)
    first, second = (
        (torch.randn(*size) / 8).to(dtype)
        for size in ((hidden, before), (width * (1 + (activation is not None)), hidden))
    )
    biases = [torch.randn(len(weight)).to(dtype) if biased else None for weight in (first, second)]
    x, residual = torch.randn(rows, before).to(dtype), torch.randn(rows, hidden).to(dtype)
    got, want = residual.clone(), residual.clone()
    mine, theirs = empty_unscaled(got, cut.block_n, gain, 1e-5), empty_unscaled(want, cut.block_n, gain, 1e-5)
    whole_tiles(mine.rows, MAX_BLOCK).fill_(torch.nan)
    mine.squares.fill_(torch.nan)
    launch_split(x, first, biases[0], got, got, None, cut, after=mine)
    split_linear_reference(x, first, biases[0], want, want, None, cut, after=theirs)
    assert error(got, want) < limit(dtype)
    assert error(mine.rows, theirs.rows) < limit(dtype)
    assert error(mine.squares.sum(0), theirs.squares.sum(0)) < limit(dtype)
    normed = rms_norm_reference(got.double(), gain.double(), 1e-5)
    out, want = torch.full((rows, width), torch.nan, dtype=dtype), torch.empty(rows, width, dtype=torch.float64)
    split_linear_reference(normed, second, biases[1], None, want, activation, cut)
    launch_split(mine.rows, second, biases[1], None, out, activation, cut, before=mine)
    assert error(out, want) < limit(dtype)
    assert not arrivals(x.device).any()


@pytest.mark.covering(2)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize("rows", [65, 96, 130, 200])
def test_what_lies_behind_the_rows_changes_no_bit(rows, activation, splits):
    """Rows of a tile beyond the input are NaN here, from the first product to the product after the norm."""
    dtype, before, hidden, width, gain = torch.float16, 72, 96, 40, torch.randn(96)
    cut = Split(32, 32, splits, 2, 4, 64)
    first, second = (
        (torch.randn(*size) / 8).to(dtype)
        for size in ((hidden, before), (width * (1 + (activation is not None)), hidden))
    )
    rows_in, start = torch.randn(rows, before).to(dtype), torch.randn(rows, hidden).to(dtype)

    def run(x):
        residual, out = start.clone(), torch.full((256, width), 7.0, dtype=dtype)
        after = empty_unscaled(residual, cut.block_n, gain, 1e-5)
        whole_tiles(after.rows, MAX_BLOCK).fill_(torch.nan)
        if x is rows_in:  # as without allocated rows beyond the input
            after = after._replace(rows=torch.empty_like(after.rows))
        launch_split(x, first, None, residual, residual, None, cut, after=after)
        launch_split(after.rows, second, None, None, out[:rows], activation, cut, before=after)
        assert (out[rows:] == 7).all()
        return residual, after.rows, after.squares, out

    room = empty_rows(rows_in, before)
    whole_tiles(room, MAX_BLOCK).fill_(torch.nan)
    want, got = run(rows_in), run(room.copy_(rows_in))
    assert all(torch.equal(mine, theirs) and mine.isfinite().all() for mine, theirs in zip(got, want))
    assert not arrivals(room.device).any()


def test_room_is_for_whole_tiles_and_no_more_is_read_than_is_there():
    for rows, held in ((1, 1), (2, 32), (33, 64), (64, 64), (65, 128), (128, 128), (129, 256), (256, 256)):
        assert len(whole_tiles(empty_rows(torch.empty(rows, 8), 24), MAX_BLOCK)) == held
    room = torch.empty(100, 24)
    for x, rows in (
        (room[:70], 100), (room[:70, 8:], 100), (room[:30], 64), (room[:64], 64), (room[80:], 20), (room[99:, 8:], 1),
        (room[:1].expand(70, 24), 70), (room.half()[:70], 100),
    ):  # fmt: skip
        tiles = whole_tiles(x, 64)
        assert tiles.shape == (rows, x.shape[1])
        assert tiles.data_ptr() == x.data_ptr()
        assert tiles.stride() == x.stride()


def test_rows_are_left_unscaled_only_where_few_squares_are_to_be_added():
    gain = torch.ones(4096)
    for block_n, rows, has_room in ((64, 64, True), (16, 32, True), (16, 33, False), (16, 1, True), (64, 256, True)):
        room = empty_unscaled(torch.empty(rows, 4096), block_n, gain, 1e-6)
        assert (room is not None) == has_room
        assert room is None or room.squares.shape == (4096 // block_n, rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "depth"), [(130, 200), (64, 64), (70, 1100)])
def test_invariant_products_have_the_same_bits_in_any_company(width, depth, dtype, monkeypatch, ordered_sums):
    x, weight, bias = torch.randn(130, depth).to(dtype), torch.randn(width, depth).to(dtype), torch.randn(width)
    monkeypatch.setattr(invariant, "UNITS", 5)  # the number of rows then decides whether parts run separately
    whole, want, residual = (torch.randn(130, width).to(dtype) for _ in range(3))
    launch_invariant(x, weight, bias.to(dtype), residual, whole)
    invariant_linear_reference(x, weight, bias.to(dtype), residual, want)
    assert error(whole, want) < limit(dtype)
    for rows in (1, 3, 17, 130):
        for first in {0, 130 - rows, 70 % (131 - rows)}:
            got = residual[first : first + rows].clone()
            launch_invariant(x[first : first + rows], weight, bias.to(dtype), got, got)
            assert torch.equal(got, whole[first : first + rows])


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("described", [False, True])
@pytest.mark.parametrize(
    ("rows", "width", "depth"), [(1, 8, 8), (130, 136, 72), (300, 264, 200), (257, 129, 65), (2200, 8, 16)]
)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("biased", [False, True])
def test_gated_products(rows, width, depth, described, biased, activation, dtype, monkeypatch):
    """Two programs process all tiles; descriptors are used only if every row begins at a multiple of 16 bytes."""
    monkeypatch.setattr(gated_persistent, "target", lambda: Target("cuda", "sm_90", 2, 32, 0))
    monkeypatch.setattr(gated_persistent, "has_descriptors", lambda: described)
    weight, bias = (torch.randn(2 * width, depth) / 8).to(dtype), torch.randn(2 * width).to(dtype)
    x = torch.randn(rows, depth + 8).to(dtype)[:, :depth]
    assert is_aligned(weight) == (depth != 65)
    added, got = bias if biased else None, torch.full((rows, width), torch.nan, dtype=dtype)
    launch_gated(x, weight, added, got, activation)
    assert error(got, gated_reference(x.double(), weight, added, None, activation)) < limit(dtype)


def test_gated_products_of_no_rows():
    launch_gated(torch.empty(0, 16), torch.randn(16, 16), None, torch.empty(0, 8), Activation.SILU)


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "width", "depth"),
    [
        (1, 8, 8),
        (96, 136, 72),
        (128, 192, 200),
        (65, 264, 200),
        (33, 72, 128),
        (100, 584, 72),
        (128, 712, 64),
    ],
)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_products_in_one_wave(rows, width, depth, activation, dtype, monkeypatch):
    """Widths that end within either block of a tile, or at a tile's end."""
    # The columns of six multiprocessors: those of a card's 132 take 10 s in the interpreter.
    monkeypatch.setattr(gated_one_wave, "MOST_NARROW", 576)
    weight, bias = (torch.randn(2 * width, depth) / 8).to(dtype), torch.randn(2 * width).to(dtype)
    x = torch.randn(rows, depth + 8).to(dtype)[:, :depth]
    for added in (bias, None):
        got = torch.full((rows, width), torch.nan, dtype=dtype)
        launch_one_wave(x, weight, added, got, activation)
        assert error(got, gated_reference(x.double(), weight, added, None, activation)) < limit(dtype)


@pytest.mark.parametrize("several", [True, False])
@pytest.mark.parametrize(
    ("sections", "turns"),
    [
        (None, ""),
        (None, "all"),
        ((8, 8, 8), ""),
        ((8, 8, 8), "all"),
        ((4, 10, 10), "all"),
        ((6, 6, 6, 6), ""),
        ((3, 5, 0, 16), ""),
        ((7, 7, 10), "sides"),
    ],
)
def test_rotary_table(sections, turns, several):
    positions = torch.randint(0, 200000, (len(sections or "abc"), 40))[:, :11]
    positions = positions if several else positions[0]
    inv_freq = 1.0 / 10000 ** (torch.arange(24) / 24)
    got = launch_cos_sin(positions, inv_freq, sections, 1.5, turns)
    for mine, theirs in zip(got, cos_sin_reference(positions, inv_freq, sections, 1.5, turns)):
        assert mine.shape == (11, 24)
        assert float((mine - theirs).abs().max()) < 1e-6
