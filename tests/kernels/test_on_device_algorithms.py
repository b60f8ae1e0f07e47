"""cublasLt with chosen algorithms on a GPU: the results of every algorithm, and a choice from start to launch."""

import pytest
import torch

from engine.kernels.gemm import algorithms
from engine.kernels.gemm.algorithms import TORCHS, Algorithms, Kind
from engine.kernels.gemm.cublaslt import Shape, open_library
from engine.kernels.target import target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or target().kind != "cuda", reason="no such library"),
]

SHAPES = ((72, 4096, 12288), (130, 1024, 3072), (256, 4096, 4096), (320, 6144, 4096), (1000, 2560, 1024))


def operands(rows: int, width: int, depth: int, dtype: torch.dtype):
    made = torch.Generator("cuda").manual_seed(rows + width)
    x = torch.randn(rows, depth, generator=made, device="cuda").to(dtype)
    weight = (torch.randn(width, depth, generator=made, device="cuda") / depth**0.5).to(dtype)
    return x, weight, torch.randn(rows, width, generator=made, device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize(("rows", "width", "depth"), SHAPES)
def test_every_algorithm_multiplies(rows, width, depth, added, dtype):
    library = open_library()
    assert library is not None
    shape = Shape(rows, width, depth, added, dtype)
    x, weight, before = operands(rows, width, depth, dtype)
    wanted = x.double() @ weight.double().t() + (before.double() if added else 0)
    algorithms = library.algorithms(shape)
    assert len(algorithms) >= 2
    assert len(set(algorithms)) == len(algorithms)
    step = torch.finfo(dtype).eps * wanted.abs().max()
    for algorithm in algorithms:
        product = library.product(shape, algorithm)
        assert product is not None
        out = before.clone() if added else torch.full_like(before, float("nan"))
        product(x, weight, out if added else None, out)
        assert (out.double() - wanted).abs().max() <= step
        beside = torch.full_like(before, float("nan"))
        product(x, weight, before if added else None, beside)  # `before` is not the output
        assert (beside.double() - wanted).abs().max() <= step


def test_a_choice_from_start_to_launch(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    chosen = Algorithms()
    monkeypatch.setattr(algorithms, "GAIN", 9.0)  # the fastest algorithm always wins, so that one is chosen
    x, weight, residual = operands(4096, 4096, 1024, torch.bfloat16)
    kind = Kind(4096, 1024, True, False, torch.bfloat16)
    chosen.autotune({kind: [weight]}, lambda kind: [256, 4096])
    found = dict(chosen.chosen[kind])
    assert set(found) == {256, 4096}
    for rows in (256, 3000, 4096):
        out = residual[:rows].clone()
        wanted = out.double() + x[:rows].double() @ weight.double().t()
        taken = chosen.run_chosen(x[:rows], weight, False, out, out)
        assert taken == (found[256 if rows == 256 else 4096] != TORCHS)
        if taken:
            assert (out.double() - wanted).abs().max() <= torch.finfo(torch.bfloat16).eps * wanted.abs().max()
    monkeypatch.setattr(algorithms, "_fastest", None)  # a second start finds all of its choices saved
    again = Algorithms()
    again.autotune({kind: [weight]}, lambda kind: [256, 4096])
    assert again.chosen[kind] == found


def test_a_product_can_be_captured():
    library = open_library()
    assert library is not None
    shape = Shape(256, 4096, 4096, False, torch.bfloat16)
    x, weight, out = operands(256, 4096, 4096, torch.bfloat16)
    product = library.product(shape, library.algorithms(shape)[0])
    assert product is not None
    product(x, weight, None, out)
    first = out.clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        product(x, weight, None, out)
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, first)
