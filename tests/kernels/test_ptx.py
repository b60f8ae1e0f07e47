"""The kernels' inline assembly computes the right values, for every code."""

import numpy as np
import pytest
import torch

from engine.kernels.float8 import BYTES, IN_ORDER, UNITS
from engine.kernels.gemm import float8_row, widen
from engine.kernels.gemm.codes import VALUES, Kind
from engine.kernels.gemm.diagonals import DIAGONAL
from engine.kernels.moe import pairs_float8
from engine.kernels.moe.mxfp4 import TIMES
from engine.kernels.moe.pairs import FACTOR, OF_WORDS
from tests.kernels.ptx import halves, joined, run

FLOATS = np.arange(256, dtype=np.uint32)
E4M3 = np.where(FLOATS & 0x80, -1.0, 1.0) * np.where(
    FLOATS & 0x78, (8.0 + (FLOATS & 7)) * 2.0 ** ((FLOATS >> 3 & 15).astype(float) - 10), (FLOATS & 7) * 2.0**-9
)
OF_KIND = {
    "INT4": (4, VALUES[Kind.INT4].numpy()),
    "E2M1": (4, VALUES[Kind.E2M1].numpy()),
    "NF4": (4, VALUES[Kind.NF4].bfloat16().double().numpy()),
    "INT8": (8, FLOATS.astype(np.uint8).view(np.int8).astype(float)),
    "E4M3": (8, E4M3),
}


def text(program) -> str:
    return getattr(program, "value", program)


@pytest.mark.parametrize("kind", OF_KIND)
def test_two_words_become_two_numbers(kind):
    """All words of 16 bits, each paired with its complement; for e4m3 all codes but NaN, 0x7f and 0xff."""
    bits, values = OF_KIND[kind]
    low = np.arange(1 << 16, dtype=np.uint32)
    words = low | (low ^ 0xFFFF) << 16
    for place in range(16 // bits):
        held = run(text(getattr(widen, f"{kind}_{place}")), {"$1": words})
        codes = np.stack([words, words >> 16]) >> bits * place & (1 << bits) - 1
        known = np.isfinite(values[codes]) & ((kind != "E4M3") | (codes & 0x7F != 0x7F))
        assert np.array_equal(halves(held["$0"])[known], values[codes][known])


@pytest.mark.parametrize("zero", range(-8, 8))
def test_four_bits_less_a_zero_point_are_one_operation_from_their_code(zero):
    """The constant of the last instruction holds the zero point: bits as `minus_zero` makes them."""
    low = np.arange(1 << 16, dtype=np.uint32)
    words = low | (low ^ 0xFFFF) << 16
    offset = (zero & 15) ^ 0xC308
    assert np.array_equal(halves(np.array([offset * 0x10001], np.uint32)), np.full((2, 1), -136.0 - zero))
    for place in range(4):
        program = text(getattr(widen, f"INT4_{place}_LESS"))
        held = run(program, {"$1": words, "$2": np.full_like(words, offset * 0x10001)})
        codes = np.stack([words, words >> 16]) >> 4 * place & 15
        assert np.array_equal(halves(held["$0"]), codes.astype(float) - 8 - zero)


@pytest.mark.parametrize("scale", [1.0, 2.0**-7, 2.0**-120, 2.0**100])
def test_values_of_mxfp4_times_their_scale(scale):
    values = VALUES[Kind.E2M1].numpy()
    pairs = np.stack([values, values[::-1]])
    held = run(text(TIMES), {"$1": joined(pairs), "$2": joined(np.full((2, 1), scale))})
    assert np.array_equal(halves(held["$0"]), pairs * scale)


@pytest.mark.parametrize(
    ("program", "dtype", "order"),
    [
        (UNITS, torch.float8_e4m3fn, (0, 2, 1, 3)),
        (BYTES, torch.float8_e5m2, (0, 2, 1, 3)),
        (IN_ORDER, torch.float8_e5m2, (0, 1, 2, 3)),
    ],
)
def test_four_codes_of_a_cache_become_four_numbers(program, dtype, order):
    """All pairs of codes in either half of the word."""
    pairs = np.arange(1 << 16, dtype=np.uint32)
    words = pairs | (pairs ^ 0xFFFF) << 16
    held = run(text(program), {"$2": words})
    codes = np.stack([words >> 8 * place & 0xFF for place in order])
    exact = torch.arange(256, dtype=torch.uint8).view(dtype).half().numpy()
    got = np.concatenate([made.view(np.float16).reshape(-1, 2).T for made in (held["$0"], held["$1"])])
    assert np.array_equal(got, exact[codes], equal_nan=True)


def test_a_warp_multiplies_words_of_two_rows_by_its_matrix_unit():
    """Four words of each of two rows in each of 32 threads, all with different columns and scales."""
    rng = np.random.default_rng(0)
    values, columns = VALUES[Kind.E2M1].numpy(), rng.integers(-8, 8, (4, 4, 32, 2)).astype(float)  # by word and place
    codes, scales = rng.integers(0, 16, (2, 4, 32, 8)), 2.0 ** rng.integers(-6, 4, (2, 4, 32, 2))  # by row and word
    words = (codes.astype(np.uint32) << np.arange(8, dtype=np.uint32) * np.uint32(4)).sum(-1, dtype=np.uint32)
    held, want = {f"${4 + number}": np.zeros(32) for number in range(4)}, np.zeros(2)
    for word, place in np.ndindex(4, 4):
        held[f"${16 + 4 * place + word}"] = joined(columns[word, place].T)
    for row, word in np.ndindex(2, 4):
        held[f"${8 + 4 * row + word}"] = words[row, word]
        for upper, selector in enumerate((0x1010, 0x3232)):
            made = run(text(FACTOR), {"$1": joined(scales[row, word].T), "$2": np.array([selector], np.uint32)})
            held[f"${32 + 8 * row + 4 * upper + word}"] = made["$0"]
        for place in range(4):
            products = values[codes[row, word, :, place::4]] * columns[word, place]
            want[row] += products.sum(1) @ scales[row, word, :, place // 2]
    sums = run(text(OF_WORDS), held)
    lanes = {"%laneid": np.arange(32, dtype=np.uint32)}
    found = run(text(DIAGONAL), lanes | {f"${8 + at}": sums[f"${at}"] for at in range(4)})
    got = [sum(np.broadcast_to(found[f"${4 * row + at}"], 32).sum() for at in range(4)) for row in range(2)]
    assert np.allclose(np.array(got) * 2.0**30, want, rtol=1e-12)


def test_a_warp_multiplies_words_of_fp8_of_two_rows_by_its_matrix_unit():
    """All codes but NaN; powers of two scale the result and the columns."""
    rng = np.random.default_rng(0)
    columns = rng.integers(-8, 8, (4, 2, 32, 2)).astype(float)  # by word, place, thread and half
    codes = rng.integers(0, 0x7F, (2, 4, 32, 4)) + 0x80 * rng.integers(0, 2, (2, 4, 32, 4))  # by row and word
    words = (codes.astype(np.uint32) << np.arange(4, dtype=np.uint32) * np.uint32(8)).sum(-1, dtype=np.uint32)
    held, want = {}, np.zeros(2)
    for word, place in np.ndindex(4, 2):
        made = run(text(pairs_float8.FURTHER), {"$1": joined(columns[word, place].T)})
        held[f"${12 + 4 * place + word}"] = made["$0"]
        want += (E4M3[codes[:, word, :, place::2]] * columns[word, place]).sum((1, 2))
    for row, word in np.ndindex(2, 4):
        held[f"${4 + 4 * row + word}"] = words[row, word]
    sums = run(text(pairs_float8.OF_WORDS), held)
    lanes = {"%laneid": np.arange(32, dtype=np.uint32)}
    found = run(text(DIAGONAL), lanes | {f"${8 + at}": sums[f"${at}"] for at in range(4)})
    got = [sum(np.broadcast_to(found[f"${4 * row + at}"], 32).sum() for at in range(4)) for row in range(2)]
    assert np.allclose(np.array(got) * 2.0**60, want, rtol=1e-12)


def test_a_warp_multiplies_codes_of_two_rows_by_those_of_x():
    """e4m3 on both sides, unconverted: all codes but NaN."""
    rng = np.random.default_rng(0)
    # The codes of both rows and of x.
    codes = rng.integers(0, 0x7F, (3, 4, 32, 4)) + 0x80 * rng.integers(0, 2, (3, 4, 32, 4))
    words = (codes.astype(np.uint32) << np.arange(4, dtype=np.uint32) * np.uint32(8)).sum(-1, dtype=np.uint32)
    held = {f"${4 + 4 * which + word}": words[which, word] for which, word in np.ndindex(3, 4)}
    sums = run(text(float8_row.OF_WORDS), held)
    lanes = {"%laneid": np.arange(32, dtype=np.uint32)}
    found = run(text(DIAGONAL), lanes | {f"${8 + at}": sums[f"${at}"] for at in range(4)})
    got = [sum(np.broadcast_to(found[f"${4 * row + at}"], 32).sum() for at in range(4)) for row in range(2)]
    want = [(E4M3[codes[row]] * E4M3[codes[2]]).sum() for row in range(2)]
    assert np.allclose(got, want, rtol=1e-12)
