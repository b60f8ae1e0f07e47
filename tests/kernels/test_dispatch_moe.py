"""The dispatch tables of moe: which kernel multiplies pairs by experts, for simulated cards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from engine.kernels.activation import Activation
from engine.kernels.gemm.codes import Inputs, Kind
from engine.kernels.gemm.groups import Packed
from engine.kernels.moe import dispatch, dispatch_codes, dispatch_float8
from engine.kernels.moe.sort import Pairs
from tests.kernels.cards import AMD, NVIDIA, on_card, tensor

BF16, FLOAT = torch.bfloat16, torch.float32
EXPERTS, TOP_K, WIDTH, DEPTH = 128, 8, 768, 2048
TOKENS = (1, 4, 16, 300, 4000)


@pytest.fixture(params=[*NVIDIA, *AMD])
def card(request: pytest.FixtureRequest) -> Iterator[str]:
    """The card for which kernels are chosen."""
    with on_card(request.param) as name:
        yield name


def pairs_for(tokens: int, invariant: bool = False) -> Pairs:
    chosen = tensor(tokens, TOP_K, dtype=torch.int32)
    if tokens * TOP_K <= 32 and not invariant:
        return Pairs(TOP_K, chosen, None, None)
    return Pairs(TOP_K, chosen, tensor(tokens * TOP_K, dtype=torch.int32), tensor(EXPERTS, dtype=torch.int32))


def floats(tokens: int, dtype: torch.dtype = BF16, invariant: bool = False, depth: int = DEPTH) -> str:
    weight = tensor(EXPERTS, 2 * WIDTH, depth, dtype=dtype)
    pairs = pairs_for(tokens, invariant)
    x = tensor(tokens, depth, dtype=dtype)
    product = dispatch.Product(x, weight, None, pairs, Activation.SILU, invariant=invariant)
    return dispatch.choose(product)[0].name.removeprefix("moe/")


def test_experts_in_floats(card):
    many = "grouped_persistent" if card == "sm_90" else "grouped"
    assert [floats(tokens) for tokens in TOKENS] == [*["grouped"] * 4, many]
    assert {floats(tokens, FLOAT) for tokens in TOKENS} == {"grouped"}
    assert {floats(tokens, invariant=True) for tokens in TOKENS} == {"grouped"}
    assert floats(4000, depth=DEPTH + 2) == "grouped", "its rows are not aligned for descriptors"


def codes(tokens: int, kind: Kind, group: int, dtype: torch.dtype = BF16, invariant: bool = False) -> str:
    rows, four = EXPERTS * 2 * WIDTH, kind in (Kind.INT4, Kind.E2M1)
    line = tensor(rows, DEPTH // (4 if four else 2), dtype=torch.int16)
    weight = Packed(kind, line, True, tensor(rows, DEPTH // group), None, None, group, DEPTH)
    pairs, x = pairs_for(tokens, invariant), tensor(tokens, DEPTH, dtype=dtype)
    product = dispatch_codes.Product(x, weight, EXPERTS, None, pairs, Activation.SILU, None, invariant)
    return dispatch_codes.choose(product)[0].name.removeprefix("moe/")


@pytest.mark.parametrize("kind", [Kind.INT4, Kind.E4M3, Kind.E2M1])
def test_experts_in_codes(card, kind):
    """Few pairs have separate kernels on NVIDIA's cards; only one card has the tiles of moe/values."""
    group = 32 if kind is Kind.E2M1 else 128
    other = "mxfp4" if kind is Kind.E2M1 else "coded"
    one, few = {Kind.INT4: (other, other), Kind.E4M3: ("pairs_float8",) * 2, Kind.E2M1: ("pairs", other)}[kind]
    if card in AMD:
        one = few = other
    many = "values" if card == "sm_90" else other
    some = other if kind is Kind.E4M3 else many
    assert [codes(tokens, kind, group) for tokens in TOKENS] == [one, few, some, some, many]
    assert {codes(tokens, kind, group, FLOAT) for tokens in TOKENS} == {other}
    assert len({codes(tokens, kind, group, invariant=True) for tokens in TOKENS}) == 1


def float8(tokens: int) -> str:
    rows = EXPERTS * 2 * WIDTH
    held = tensor(rows, DEPTH, dtype=torch.uint8)
    weight = Packed(Kind.E4M3, held, False, tensor(rows, DEPTH // 128, dtype=FLOAT), None, None, 128, DEPTH)
    inputs, x = Inputs(kind=Kind.E4M3, group=128), tensor(tokens, DEPTH)
    product = dispatch_float8.Product(
        x, weight, EXPERTS, None, pairs_for(tokens), Activation.SILU, inputs, torch.bfloat16
    )
    return dispatch_float8.choose(product).name.removeprefix("moe/")


def test_experts_in_fp8_by_fp8():
    assert [float8(tokens) for tokens in TOKENS] == ["pairs_float8", "pairs_float8", *["float8"] * 3]
