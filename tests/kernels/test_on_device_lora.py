"""Kernels of adapters on a real GPU against their references."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.kernels.activation import Activation
from engine.kernels.gemm.codes import Codes, Kind
from engine.kernels.gemm.epilogue import Unscaled
from engine.kernels.gemm.pack import Placement
from engine.kernels.lora.expand import blocks_of, empty_after, expand_reference, launch_expand
from engine.kernels.lora.expand_gated import expand_gated_reference, launch_expand_gated
from engine.kernels.lora.expand_summed import expand_summed_reference, launch_expand_summed
from engine.kernels.lora.matrices import PlaceMatrices, SiteShape
from engine.kernels.lora.next_low import empty_next_low
from engine.kernels.lora.rows import (
    PlaceList,
    launch_pair_list,
    launch_place_list,
    pair_list_reference,
    place_list_reference,
    tile_of,
)
from engine.kernels.lora.shrink import launch_shrink, shrink_reference
from engine.kernels.moe.combine import Summands
from engine.kernels.moe.pack import pack_experts
from tests.kernels.adapters import EXPERTS, SHAPES, filled, numbers_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")]


@pytest.mark.parametrize("kind", ["one", "runs", "drawn"])
@pytest.mark.parametrize("rows", [1, 4, 17, 300, 2100])
def test_products(rows, kind):
    """Values that no adapter has are NaN, so a kernel that read them would fail. A second launch has equal bits."""
    matrices = filled(torch.bfloat16, "cuda")
    numbers = numbers_of(rows, kind, "cuda")
    for shape in SHAPES:
        x = torch.randn(rows, shape.in_features, device="cuda").bfloat16()
        y = torch.randn(rows, sum(shape.out_features), device="cuda").bfloat16()
        listed, blocks, made = launch_place_list(numbers, 5, tile_of(rows, 5)), blocks_of(shape, "cuda"), []
        for _ in range(2):
            made.append(y.clone())
            launch_expand(made[-1], launch_shrink(x, matrices, shape, listed, False), matrices, shape, listed, blocks)
        assert torch.equal(*made)
        here = PlaceMatrices(matrices.values.cpu(), matrices.words.cpu(), matrices.max_rank)
        rows_here: PlaceList = place_list_reference(numbers.cpu(), 5, tile_of(rows, 5))
        want = y.cpu()
        low = shrink_reference(x.cpu(), here, shape, rows_here, False)
        expand_reference(want, low, here, shape, rows_here, blocks.cpu())
        torch.testing.assert_close(made[0].cpu(), want, rtol=2e-2, atol=4e-2)


@pytest.mark.parametrize("tokens", [1, 30, 700])
def test_products_of_experts(tokens):
    matrices, top_k = filled(torch.bfloat16, "cuda"), 3
    here = PlaceMatrices(matrices.values.cpu(), matrices.words.cpu(), matrices.max_rank)
    chosen, numbers = torch.randint(0, 7, (tokens, top_k)).int(), numbers_of(tokens, "drawn")
    x, y = torch.randn(tokens, 64).bfloat16(), torch.randn(tokens * top_k, 96).bfloat16()
    listed, got = launch_pair_list(numbers.cuda(), chosen.cuda(), 5, 6), y.cuda()
    low = launch_shrink(x.cuda(), matrices, EXPERTS, listed, False, top_k)
    launch_expand(got, low, matrices, EXPERTS, replace(listed, settled=True), blocks_of(EXPERTS, "cuda"))
    rows_here, want = pair_list_reference(numbers, chosen, 5, 6), y.clone()
    low = shrink_reference(x, here, EXPERTS, rows_here, False, top_k)
    expand_reference(want, low, here, EXPERTS, rows_here, blocks_of(EXPERTS, "cpu"))
    torch.testing.assert_close(got.cpu(), want, rtol=2e-2, atol=4e-2)


@pytest.mark.parametrize("form", ["floats", "codes"])
@pytest.mark.parametrize("tokens", [1, 3, 40, 700])
def test_experts_return_gate_and_up_by_token(tokens, form):
    experts, width, depth, top_k = 8, 96, 128, 2
    floats = torch.randn(experts, 2 * width, depth, device="cuda").bfloat16() / depth**0.5
    matrices: list[torch.Tensor | Codes] = [each for whole in floats for each in whole.split(width)]
    if form == "codes":
        shape = (width, depth)
        values = torch.randint(0, 16, (2 * experts, *shape), dtype=torch.uint8, device="cuda")
        scales = torch.rand(2 * experts, width, depth // 32, device="cuda").bfloat16() / 32
        matrices = [Codes(Kind.INT4, value, scale, 32) for value, scale in zip(values, scales)]
    bias = torch.randn(experts, 2 * width, device="cuda")
    weight = pack_experts(matrices, bias, experts, Placement(torch.bfloat16, "cuda"), gated=True)
    chosen = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)]).int().cuda()
    x = torch.randn(tokens, depth, device="cuda").bfloat16()
    got = weight.halves(x, weight.pairs(chosen)).view(tokens, top_k, -1)
    dense = torch.stack([weight.dense(expert).float() for expert in range(experts)])[chosen.long()]
    want = torch.einsum("tknd,td->tkn", dense, x.float()) + bias[chosen.long()]
    torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=6e-2)


@pytest.mark.parametrize("rows", [1, 20, 64])
def test_products_between_norms_and_of_gated_layers(rows):
    """x was prescaled for the norm before; y is prescaled for the norm after, or halves are activated."""
    gated = SiteShape(1, 96, (65, 65))
    matrices = filled(torch.bfloat16, "cuda", shapes=[SHAPES[0], gated, EXPERTS])
    here = PlaceMatrices(matrices.values.cpu(), matrices.words.cpu(), matrices.max_rank)
    numbers, gain = numbers_of(rows, "drawn"), torch.rand(130)
    x, y = torch.randn(rows, 96).bfloat16(), torch.randn(rows, 130).bfloat16()
    squares = torch.stack([part.float().square().sum(1) for part in x.split(32, 1)])
    shape, made = SiteShape(1, 96, (130,)), []
    for device, own, make, down, up, both in (
        ("cuda", matrices, launch_place_list, launch_shrink, launch_expand, launch_expand_gated),
        ("cpu", here, place_list_reference, shrink_reference, expand_reference, expand_gated_reference),
    ):
        listed = make(numbers.to(device), 5, 16)
        before = Unscaled(x.to(device), squares.to(device), torch.ones(96, device=device), 1e-5)
        low, total = down(before.rows, own, gated, listed, False), y.to(device, copy=True)
        activated = both(total, low, own, gated, listed, Activation.SILU, before)
        after = empty_after(total, gain.to(device), 1e-5)
        assert after is not None
        low = low[:, :, :1].contiguous()  # a layer with one piece reads the first
        up(total, low, own, shape, listed, blocks_of(shape, device), before, after)
        made.append([each.float().cpu() for each in (activated, total, after.rows, after.squares.sum(0))])
    for got, want in zip(*made):
        torch.testing.assert_close(got, want, rtol=3e-2, atol=6e-2)


@pytest.mark.parametrize("tokens", [1, 6])
def test_the_second_product_of_experts_is_summed_and_computes_the_next_layers_low(tokens):
    behind, down_site, top_k = SiteShape(1, 96, (72, 40)), SiteShape(2, 64, (96,), experts=6), 4
    matrices = filled(torch.bfloat16, "cuda", shapes=[SHAPES[0], behind, down_site])
    here = PlaceMatrices(matrices.values.cpu(), matrices.words.cpu(), matrices.max_rank)
    chosen, numbers = torch.randint(0, 7, (tokens, top_k)).int(), torch.full((tokens,), 4).int()
    x, made = torch.randn(tokens * top_k, 64).bfloat16(), torch.randn(tokens, top_k, 96).bfloat16()
    weights, residual, gain = torch.rand(tokens, top_k), torch.randn(tokens, 96).bfloat16(), torch.rand(96)
    count, found = torch.tensor([tokens], dtype=torch.int32), []
    for device, own, pairs, make, down, both in (
        ("cuda", matrices, launch_pair_list, launch_place_list, launch_shrink, launch_expand_summed),
        ("cpu", here, pair_list_reference, place_list_reference, shrink_reference, expand_summed_reference),
    ):
        listed = pairs(numbers.to(device), chosen.to(device), 5, 6)
        low = down(x.to(device), own, down_site, listed, False)
        rows, total = make(numbers.to(device), 5, 1), residual.to(device, copy=True)
        after = empty_after(total, gain.to(device), 1e-5)
        listed = replace(listed, settled=True)
        next_low = empty_next_low(behind, rows, listed, own, 64)
        assert after is not None
        assert next_low is not None
        sum_of = Summands(weights.to(device), None, None, total, count.to(device))
        both(made.to(device), low, own, down_site, listed, sum_of, after, next_low)
        sums = next_low.low[:, :, :, :40].sum(0)
        found.append([each.float().cpu() for each in (total, after.rows, after.squares.sum(0), sums)])
    for got, want in zip(*found):
        torch.testing.assert_close(got, want, rtol=3e-2, atol=8e-2)
