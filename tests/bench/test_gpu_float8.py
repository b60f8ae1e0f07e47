"""gpu_float8, and gpu_kernels' text about a case, without a card: on small shapes, with made-up times."""

import pytest
import torch

from engine.kernels.gemm.quantise_floats import quantise_floats
from engine.kernels.gemm.scaled import ScaledProducts
from tests.bench import gpu_float8, gpu_kernels


@pytest.fixture
def on_cpu(monkeypatch):
    """Replaces the library's products by float64 products, and disables timing at the start."""

    def product(x, scales, weight, _bias, _residual, out):
        wide = scales.double().T.repeat_interleave(x.shape[1] // len(scales), 1)
        out.copy_((x.view(torch.float8_e4m3fn).double() * wide) @ weight.dense().double().T)

    monkeypatch.setattr(gpu_float8, "library_product", product)
    monkeypatch.setattr(ScaledProducts, "autotune", lambda *_: None)
    monkeypatch.setattr(gpu_float8, "PRODUCTS", {"q|k|v": (384, 256), "down": (256, 512)})
    monkeypatch.setattr(gpu_float8, "CACHE", 1 << 10)


@pytest.mark.parametrize("form", gpu_float8.FORMS)
def test_rates_of_a_form(form, on_cpu):
    made = []

    def time_of(calls):
        for call in calls:
            made.append(call())
        return 1e-6, 1e-6, 1e-6

    rate = gpu_float8.Rate()
    (square,) = gpu_float8.square_case(time_of, form, rate, 256, "cpu")
    assert rate.best == 2 * 256**3 / 1e-6
    assert square["said"] == "34 TFLOP/s"
    whole = gpu_float8.product_cases(time_of, form, 17, rate, "cpu")
    assert [case["name"].removeprefix(f"FP8 {form} ") for case in whole] == [
        "q|k|v 17 library", "q|k|v 17 served", "down 17 library", "down 17 served", "layer 17 library",
        "layer 17 served",
    ]  # fmt: skip
    few = gpu_float8.product_cases(time_of, form, 16, rate, "cpu", {"o": (128, 256)})
    assert [case["name"].rpartition(" ")[2] for case in few] == ["library", "served", "tiles"] * 2
    assert whole[0]["said"] == "3 TFLOP/s, 10.0% of the FP8 rate >= 60% MISSED"
    assert whole[4]["flops"] == whole[0]["flops"] + whole[2]["flops"]


def test_both_ways_have_the_product_of_the_codes(on_cpu):
    weight = gpu_float8.weight("blocks", 256, 384, ScaledProducts(), "cpu")
    x = torch.randn(5, 384, dtype=torch.bfloat16)
    codes, scales = quantise_floats(x, weight.inputs)
    library, served = (torch.empty(5, 256, dtype=torch.bfloat16) for _ in range(2))
    gpu_float8.library_product(codes, scales, weight.weight, None, None, library)
    gpu_float8.served_product(weight, codes, scales, served)
    want = x.double() @ weight.dense().double().T
    for got in (library, served):
        assert float((got.double() - want).norm() / want.norm()) < 0.05  # error of inputs converted to FP8


def test_what_is_said_of_a_case(capsys):
    case = {"name": "experts gpt-oss-20b 2048", "times": (1e-3,) * 3, "bytes": 10**9, "flops": 6 * 10**11}
    gpu_kernels.complete(case, 2e12, 1e15)
    assert case["expected"] == ">= 70 % bound, 60.0 % MISSED"
    assert gpu_kernels.expected("experts Qwen3-30B-A3B FP8 32") == ("of_copy", 0.75)
    assert gpu_kernels.expected("experts Mixtral-8x7B 32") == ("", 0.0)
    case = {
        "name": "experts gpt-oss-20b 2048 skewed",
        "times": (1e-3,) * 3,
        "bytes": 10**9,
        "said": "as the bench says",
    }
    gpu_kernels.complete(case, 2e12, 1e15)
    assert case["expected"] == "as the bench says"
    assert capsys.readouterr().out.count("\n") == 2
