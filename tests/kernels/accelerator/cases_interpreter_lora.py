"""Kernels of adapters in the interpreter against their references: lists of rows, both halves of the product, and
kernels that also compute the next layer's first half."""

from dataclasses import replace

import pytest
import torch
import triton  # noqa: F401  (must precede the import of any kernel file; TRITON_INTERPRET sets the mode)

from engine.kernels.activation import Activation, activate_reference
from engine.kernels.gemm.epilogue import Unscaled
from engine.kernels.lora import rows as lists
from engine.kernels.lora.expand import blocks_of, empty_after, expand_reference, launch_expand
from engine.kernels.lora.expand_gated import expand_gated_reference, launch_expand_gated
from engine.kernels.lora.expand_summed import expand_summed_reference, launch_expand_summed, sums_at_once
from engine.kernels.lora.matrices import SiteShape
from engine.kernels.lora.next_low import empty_next_low
from engine.kernels.lora.rows import launch_pair_list, launch_place_list, pair_list_reference, place_list_reference
from engine.kernels.lora.shrink import launch_shrink, shrink_reference
from engine.kernels.moe.combine import Summands
from engine.kernels.target import HAS_TRITON
from tests.kernels.adapters import EXPERTS, SHAPES, filled, numbers_of

assert HAS_TRITON


@pytest.mark.parametrize("kind", ["one", "runs", "drawn"])
@pytest.mark.parametrize("rows", [0, 1, 17, 100, 1300])
def test_lists_of_rows(rows, kind):
    numbers = numbers_of(rows, kind)
    for tile in (16, 64, 1) if rows <= 1000 else (16, 64):
        got, want = launch_place_list(numbers, 5, tile), place_list_reference(numbers, 5, tile)
        assert torch.equal(got.tiles[:, 0], want.tiles[:, 0])
        used = want.tiles[:, 2] > 0
        assert torch.equal(got.tiles[used], want.tiles[used])
        assert not got.tiles[~used][:, [0, 2]].any()
        assert torch.equal(got.order, want.order)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize(("rows", "kind"), [(1, "one"), (3, "drawn"), (33, "runs"), (90, "drawn")])
@pytest.mark.parametrize("site", [0, 1])
def test_products(site, rows, kind, invariant, dtype):
    """Values that no adapter has are NaN, so a kernel that read them would fail."""
    shape, matrices, torch_draw = SHAPES[site], filled(dtype), torch.Generator().manual_seed(rows)
    x = torch.randn(rows, shape.in_features + 8, generator=torch_draw).to(dtype)[:, : shape.in_features]
    y = torch.randn(rows, sum(shape.out_features), generator=torch_draw).to(dtype)
    listed = launch_place_list(numbers_of(rows, kind), 5, 1 if rows == 3 and not invariant else 16)
    blocks, got, want = blocks_of(shape, "cpu"), y.clone(), y.clone()
    launch_expand(got, launch_shrink(x, matrices, shape, listed, invariant), matrices, shape, listed, blocks)
    expand_reference(want, shrink_reference(x, matrices, shape, listed, invariant), matrices, shape, listed, blocks)
    torch.testing.assert_close(got, want, rtol=1e-4 if dtype is torch.float32 else 4e-3, atol=4e-3)
    assert torch.equal(got == y, want == y) or kind == "one"
    assert not torch.equal(got, y) or kind == "runs"


@pytest.mark.parametrize("rows", [3, 40])
def test_products_between_norms(rows):
    """x was prescaled for the norm before, and y is prescaled for the norm after."""
    matrices, draw = filled(torch.float32), torch.Generator().manual_seed(rows)
    shape = SHAPES[1]  # one piece
    x, y = (torch.randn(rows, width, generator=draw) for width in (shape.in_features, shape.width))
    squares = torch.stack([part.square().sum(1) for part in x.split(32, 1)])
    before = Unscaled(x * 1.5, squares, torch.full((shape.in_features,), 1.5), 1e-5)
    listed = launch_place_list(numbers_of(rows, "drawn"), 5, 1 if rows == 3 else 16)
    blocks, made = blocks_of(shape, "cpu"), []
    gain = torch.rand(shape.width, generator=draw)
    for down, up in ((launch_shrink, launch_expand), (shrink_reference, expand_reference)):
        own, after = y.clone(), empty_after(y, gain, 1e-5)
        assert after is not None
        up(own, down(before.rows, matrices, shape, listed, False), matrices, shape, listed, blocks, before, after)
        made.append((own, after.rows, after.squares.sum(0)))
    for got, want in zip(*made):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(made[0][2], made[0][0].square().sum(1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(made[0][1], made[0][0] * gain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [SiteShape(1, 96, (65, 65)), SHAPES[1]], ids=["two pieces", "joined"])
@pytest.mark.parametrize("prescaled", [True, False])
@pytest.mark.parametrize("tile", [1, 16])
def test_gated_products(tile, prescaled, shape):
    if shape.pieces == 2:
        matrices = filled(torch.float32, shapes=[SHAPES[0], shape, EXPERTS])
    else:
        matrices = filled(torch.float32)
    draw = torch.Generator().manual_seed(4)
    x, halves = (torch.randn(20, width, generator=draw) for width in (96, 130))
    before = Unscaled(x, x.square().sum(1)[None], torch.ones(96), 1e-5) if prescaled else None
    listed, act = launch_place_list(numbers_of(20, "drawn"), 5, tile), Activation.SILU
    got = launch_expand_gated(
        halves, launch_shrink(x, matrices, shape, listed, False), matrices, shape, listed, act, before
    )
    low = shrink_reference(x, matrices, shape, listed, False)
    want = expand_gated_reference(halves, low, matrices, shape, listed, act, before)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    plain = (numbers_of(20, "drawn") == 0) | (numbers_of(20, "drawn") == 2)
    torch.testing.assert_close(got[plain], activate_reference(halves[plain], act), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("few", [512, 8])
@pytest.mark.parametrize(("by_token", "during"), [(True, False), (True, True), (False, False)])
def test_products_of_experts(by_token, during, few, monkeypatch):
    """Pairs of tokens and experts, with padding pairs, as tiles of their own and sorted."""
    monkeypatch.setattr(lists, "FEW_PAIRS", few)
    matrices, draw, top_k, tokens = filled(torch.float32), torch.Generator().manual_seed(2), 3, 13
    chosen = torch.randint(0, 7, (tokens, top_k), generator=draw).int()  # 6: padding
    numbers = numbers_of(tokens, "drawn")
    got, want = launch_pair_list(numbers, chosen, 5, 6), pair_list_reference(numbers, chosen, 5, 6)
    assert got.settled == (few == 8)
    assert got.settled or got.each == top_k
    x = torch.randn(tokens if by_token else tokens * top_k, 64, generator=draw)
    y = torch.randn(tokens * top_k, 96, generator=draw)
    made, blocks = [], blocks_of(EXPERTS, "cpu")
    for listed, down, up in ((got, launch_shrink, launch_expand), (want, shrink_reference, expand_reference)):
        made.append(y.clone())
        low = down(x, matrices, EXPERTS, listed, False, top_k if by_token else 1, None, during)
        up(made[-1], low, matrices, EXPERTS, replace(listed, settled=True), blocks)
    torch.testing.assert_close(*made, rtol=1e-4, atol=1e-4)
    adapted = (numbers.repeat_interleave(top_k) > 0) & (numbers.repeat_interleave(top_k) != 2) & (chosen.flatten() < 6)
    assert torch.equal((made[0] != y).any(1), adapted)


def close_where_written(got, want, rank_of_row):
    """Sums over the blocks of `low`; rows without an adapter, and ranks behind an adapter's own, are not written."""
    for row, rank in enumerate(rank_of_row):
        torch.testing.assert_close(got[:, row, :, :rank].sum(0), want[:, row, :, :rank].sum(0), rtol=1e-4, atol=1e-4)


def ranks_of(numbers, site):
    """The rank at a site of each row's adapter, in a place."""
    return [{0: 0, 1: 16, 2: 0 if site else 16, 4: 48, 5: 16}[number] for number in numbers.tolist()]


@pytest.mark.parametrize("act", [Activation.SILU, Activation.CLAMPED_SWIGLU])
def test_a_gated_product_computes_the_next_layers_low(act):
    gated, after = SiteShape(1, 96, (70, 70)), SiteShape(2, 70, (50, 30))
    shapes = [SHAPES[0], gated, after]
    matrices, draw, numbers = (
        filled(torch.float32, shapes=shapes),
        torch.Generator().manual_seed(5),
        numbers_of(8, "drawn"),
    )
    x, halves = (torch.randn(8, width, generator=draw) for width in (96, 140))
    listed, made = launch_place_list(numbers, 5, 1), []
    for down, both in ((launch_shrink, launch_expand_gated), (shrink_reference, expand_gated_reference)):
        next_low = empty_next_low(after, listed, listed, matrices, 64)
        assert next_low is not None
        low = down(x, matrices, gated, listed, False)
        rows = both(halves, low, matrices, gated, listed, act, next_low=next_low)
        made.append((rows, next_low.low))
    torch.testing.assert_close(made[0][0], made[1][0], rtol=1e-4, atol=1e-4)
    close_where_written(made[0][1], made[1][1], ranks_of(numbers, 2))


def test_a_product_before_a_norm_computes_the_low_of_the_layer_behind():
    behind = SiteShape(0, 130, (72, 40, 40))
    shapes = [behind, SHAPES[1], EXPERTS]
    matrices, draw, numbers = (
        filled(torch.float32, shapes=shapes),
        torch.Generator().manual_seed(6),
        numbers_of(7, "drawn"),
    )
    x, y, gain = (
        torch.randn(7, 96, generator=draw),
        torch.randn(7, 130, generator=draw),
        torch.rand(130, generator=draw),
    )
    listed, blocks, made = launch_place_list(numbers, 5, 1), blocks_of(SHAPES[1], "cpu"), []
    for down, up in ((launch_shrink, launch_expand), (shrink_reference, expand_reference)):
        own, after, next_low = (
            y.clone(),
            empty_after(y, gain, 1e-5),
            empty_next_low(behind, listed, listed, matrices, 64),
        )
        assert next_low is not None
        low = down(x, matrices, SHAPES[1], listed, False)
        up(own, low, matrices, SHAPES[1], listed, blocks, None, after, next_low=next_low)
        made.append((own, next_low.low))
    torch.testing.assert_close(made[0][0], made[1][0], rtol=1e-4, atol=1e-4)
    close_where_written(made[0][1], made[1][1], ranks_of(numbers, 0))


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize(("tokens", "top_k"), [(1, 3), (6, 2)])
def test_the_second_product_of_experts_is_summed_at_once(tokens, top_k, plain):
    """As expand, then combine: with a shared expert, padding rows whose memory holds NaN, and the norm behind."""
    behind, down_site = SiteShape(1, 96, (72, 40)), SiteShape(2, 64, (96,), experts=6)
    matrices = filled(torch.float32, shapes=[SHAPES[0], behind, down_site])
    draw = torch.Generator().manual_seed(tokens)
    chosen, numbers = torch.randint(0, 7, (tokens, top_k), generator=draw).int(), numbers_of(tokens, "drawn")
    numbers[0] = 4
    x, made = torch.randn(tokens * top_k, 64, generator=draw), torch.randn(tokens, top_k, 96, generator=draw)
    weights, residual = torch.rand(tokens, top_k, generator=draw), torch.randn(tokens, 96, generator=draw)
    shared, gate, gain = torch.randn(tokens, 96), torch.randn(tokens, 1), torch.rand(96)
    count = torch.tensor([tokens - (tokens > 1)], dtype=torch.int32)
    made[count:] = float("nan")
    chosen[count:] = 6
    rows, found = launch_place_list(numbers, 5, 1), []
    got, want = launch_pair_list(numbers, chosen, 5, 6), pair_list_reference(numbers, chosen, 5, 6)
    for listed, down, both in (
        (got, launch_shrink, launch_expand_summed), (want, shrink_reference, expand_summed_reference),
    ):  # fmt: skip
        listed = replace(listed, settled=True)
        low = down(x, matrices, down_site, listed, False)
        assert sums_at_once(replace(listed, each=top_k), low)
        if plain:
            found.append((both(made, low, matrices, down_site, listed, Summands(None, None, None, None, count)),))
            continue
        after = empty_after(residual, gain, 1e-5)
        next_low = empty_next_low(behind, rows, listed, matrices, 64)
        assert after is not None
        assert next_low is not None
        sum_of = Summands(weights, shared, gate, residual.clone(), count)
        out = both(made, low, matrices, down_site, listed, sum_of, after, next_low)
        assert out is sum_of.residual
        found.append((out, after.rows, after.squares.sum(0), next_low.low))
    for one, other in zip(found[0][:3], found[1][:3]):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    if not plain:
        close_where_written(found[0][3], found[1][3], ranks_of(numbers, 1))
