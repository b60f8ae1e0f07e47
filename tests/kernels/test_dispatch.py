"""The dispatch tables of gemm: which kernel multiplies, for simulated cards and without launches."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from engine.kernels import tune
from engine.kernels.activation import Activation
from engine.kernels.gemm import dispatch, dispatch_codes, dispatch_float8
from engine.kernels.gemm.codes import Inputs, Kind
from engine.kernels.gemm.groups import Packed
from tests.kernels.cards import AMD, NVIDIA, on_card, tensor

BF16, HALF, FLOAT = torch.bfloat16, torch.float16, torch.float32
ROWS = (1, 2, 32, 64, 65, 95, 96, 128, 129, 512, 768)


@pytest.fixture(params=[*NVIDIA, *AMD])
def card(request: pytest.FixtureRequest) -> Iterator[str]:
    """The card for which kernels are chosen."""
    with on_card(request.param) as name:
        yield name


def floats(table: str, rows: int, width: int, depth: int, dtype: torch.dtype = BF16, aligned: bool = True) -> str:
    """The name of the kernel for these rows; "" is the vendor's library."""
    gated = table == "GATED"
    x = tensor(rows, depth if aligned else depth + 2, dtype=dtype)
    matrix = tensor(width * (1 + gated), depth, dtype=dtype)
    choice = dispatch.choose(getattr(dispatch, table), dispatch.Product(rows, width, depth, gated, x, matrix))
    return "" if choice is None else choice[0].name.removeprefix("gemm/")


def test_products_of_floats(card):
    """One card has measured kernels for an 8B's layer; on all others the vendor's library multiplies."""
    few, one_wave, many = ["split_k"] * 3, ["gated_one_wave"] * 2, "gated_persistent"
    wanted = {
        ("GATED", 12288, 4096): ["dense_row", *few, "", "", *one_wave, "", many, ""],
        ("LINEAR", 4096, 12288): ["split_k", *few, *[""] * 7],
        ("LINEAR", 1024, 2048): ["dense_row", *["split_k"] * 8, "", ""],
        ("NORMED", 1024, 2048): ["dense_row", *["split_k"] * 8, "", ""],
        ("LINEAR", 1000, 520): ["dense_row", *[""] * 10],
    }
    for (table, width, depth), names in wanted.items():
        found = [floats(table, rows, width, depth) for rows in ROWS]
        assert found == (names if card == "sm_90" else [""] * len(ROWS)), (table, width)


def test_products_of_other_floats_and_of_unaligned_rows(card):
    if card != "sm_90":
        assert {floats("LINEAR", rows, 1024, 2048, HALF) for rows in ROWS} == {""}
        return
    some = (1, 32, 96, 512)
    assert [floats("LINEAR", rows, 1024, 2048, HALF) for rows in some] == ["split_k", "split_k", "split_k", ""]
    # The norm's gain could exceed float16's range.
    assert [floats("NORMED", rows, 1024, 2048, HALF) for rows in some] == [""] * 4
    assert [floats("LINEAR", rows, 1024, 2048, FLOAT) for rows in some] == [""] * 4
    assert [floats("LINEAR", rows, 1024, 2048, aligned=False) for rows in some] == ["split_k", "split_k", "", ""]


@pytest.mark.parametrize("card", ["sm_90"], indirect=True)
@pytest.mark.parametrize("shape", [*tune.ONE_WAVE["sm_90"], *tune.LEAST_FILL["sm_90"], (11008, 2048)])
def test_at_most_one_kernel_takes_a_gated_product(card, shape):
    """Unaligned rows, which gemm/split_k does not take, therefore go to the vendor's library."""
    for rows in (1, 32, 33, 64, 65, 96, 128, 129, 256, 257, 512, 1024, 4096):
        product = dispatch.Product(rows, shape[0], shape[1], gated=True)
        assert sum(bool(kernel.cut(product)) for kernel in dispatch.GATED) <= 1


@pytest.mark.parametrize("card", ["sm_90"], indirect=True)
def test_the_start_asks_with_sizes_alone(card):
    """gemm/dense_row multiplies one row of an 8B's gate and up; unaligned rows go to gemm/split_k."""
    choice = dispatch.gated_choice(1, 12288, 4096)
    assert choice is not None
    assert choice[0].name == "gemm/split_k"


class Widens:
    """A choice that dequantises weights from 300 rows on."""

    def widens(self, _weight: Packed, rows: int, _activation: Activation | None) -> bool:
        return rows >= 300

    def widened(self, *_: object) -> dispatch_codes.Weight:
        raise AssertionError


def codes(
    rows: int, kind: Kind, group: int, dtype: torch.dtype = BF16, inputs: Inputs | None = None, invariant: bool = False
) -> str:  # fmt: skip
    width = 4096
    scales = tensor(width, width // group) if group else None
    line = tensor(width, width // (4 if kind in (Kind.INT4, Kind.E2M1, Kind.NF4) else 2), dtype=torch.int16)
    weight = Packed(kind, line, inputs is None, scales, None, None, group or width, width)
    x = tensor(rows, width, dtype=dtype)
    product = dispatch_codes.Product(x, weight, None, None, inputs, Widens(), invariant)
    name = dispatch_codes.choose(dispatch_codes.table_of(invariant), product).name
    return name.removeprefix("gemm/")


def test_products_of_codes(card):
    """Kernels for one row and scaled values are for NVIDIA only; from 300 rows on `Widens` dequantises the weight."""
    one_row = "one_row" if card in NVIDIA else "groups"
    values = "scaled_values" if card == "sm_90" else "groups"
    some = (1, 2, 64, 256, 512)
    assert [codes(rows, Kind.INT4, 128) for rows in some] == [one_row, *[values] * 3, "widen_weight"]
    assert [codes(rows, Kind.E2M1, 32) for rows in some] == ["groups", *[values] * 3, "widen_weight"]
    assert [codes(rows, Kind.INT8, 0) for rows in some] == [*["groups"] * 4, "widen_weight"]
    assert [codes(rows, Kind.INT4, 128, FLOAT) for rows in some] == [*["groups"] * 4, "widen_weight"]
    assert {codes(rows, Kind.INT8, 0, inputs=Inputs()) for rows in some} == {"groups"}
    assert {codes(rows, Kind.INT4, 128, invariant=True) for rows in some} == {"groups"}


def float8(
    rows: int, per_row: bool, invariant: bool = False, by_library: bool = False, blocks: bool = False, width: int = 4096
) -> str:
    scales = None if per_row else tensor(width, width // 128, dtype=FLOAT)
    of_blocks = tensor(width // 128, width // 128, dtype=FLOAT) if blocks else None
    codes = tensor(width, width, dtype=torch.uint8)
    weight = Packed(Kind.E4M3, codes, False, scales, None, None, 128, width, of_blocks)
    x, given = tensor(rows, width, dtype=torch.uint8), tensor(1 if per_row else width // 128, rows, dtype=FLOAT)
    product = dispatch_float8.Product(x, given, weight, is_librarys=lambda *_: by_library)
    table = dispatch_float8.INVARIANT if invariant else dispatch_float8.FLOAT8
    return dispatch_float8.choose(table, product).name.removeprefix("gemm/")


def test_products_of_fp8_by_fp8(card):
    some, one_row = (1, 2, 64, 65), "float8_row" if card in NVIDIA else "float8"
    few = "float8_few" if card == "sm_90" else "float8"
    rows = "float8_rows" if card in ("sm_90", "sm_100") else "float8"
    assert [float8(rows, per_row=True) for rows in some] == [one_row, few, few, "float8"]
    assert [float8(count, per_row=False, blocks=True) for count in some] == [one_row, few, few, "float8"]
    assert [float8(count, per_row=False) for count in some] == [one_row, "float8", "float8", "float8"]
    assert [float8(count, False, blocks=True, width=2048) for count in (8, 9)] == [rows, few]
    alone = few if card == "sm_90" else one_row
    assert [float8(1, False, blocks=True, width=width) for width in (4096, 8192)] == [one_row, alone]
    assert {float8(rows, per_row=True, by_library=True) for rows in some[1:]} == {"float8_library"}
    assert float8(64, per_row=False, by_library=True) == "float8", "the library reads scales of whole blocks alone"
    assert {float8(rows, per_row=True, invariant=True, by_library=True) for rows in some} == {"float8"}
