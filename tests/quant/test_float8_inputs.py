"""FP8 inputs on a device with FP8 units: products of codes with codes, by our kernel or by the library."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

import engine.run.start
import engine.run.weights
from engine.kernels.gemm import scaled
from engine.kernels.gemm.codes import Codes, Inputs, Kind, joined
from engine.kernels.gemm.float8_weight import Float8Weight
from engine.kernels.gemm.group_weight import GroupWeight
from engine.kernels.gemm.groups import packed
from engine.kernels.gemm.pack import Placement, pack_pieces
from engine.kernels.gemm.scaled import ScaledProducts
from engine.kernels.norm import rms_norm_reference
from engine.layers.norm import Normed
from engine.models.registry import build_model, load_model_config
from engine.quant.online import requested
from engine.weights.files import open_checkpoint
from engine.weights.load import load_weights
from tests import tiny
from tests.engine.host_accelerator import HostAccelerator
from tests.engine_kit import answer, running, text_request
from tests.models.harness import Harness
from tests.quant import oracle
from tests.quant.written import VARIANTS, write

TOKENS = [5, 9, 200, 17, 33, 250, 61, 4, 90, 91, 92]
# Variant -> how its inputs are scaled: by a number, per token, per 128 columns, or per 128 columns by powers of two.
MEETING = {
    "fp8 tensor": "token", "fp8 tensor static": 0.5, "fp8 qscale_weight": 0.5, "fp8 blocks": 128,
    "fp8 blocks bf16": 128, "fp8 blocks u8": "powers", "ct float tensor": "token", "ct float channel": "token",
    "ct float static": 0.5, "ct float block": 128, "ct naive": "token", "modelopt fp8": 0.5,
    "modelopt fp8 rows": "token",
}  # fmt: skip
KEEPING = ["ct mxfp8", "modelopt fp8 blocks", "ct w4 32", "ct nvfp4", "gptq 8"]
UNITS = {"float8_units": True}
DOWN = "model.layers.0.mlp.down_proj.weight"
# Relative norm: sums in another order move a code by one, a sixteenth. Scales shared by rows give ten times that.
TURNED = 3e-3


def loaded(folder, dtype=torch.float32, config=None, **settings):
    """The model as an accelerator with FP8 units stores it, on the CPU; kernels fall back to their references."""
    config = config or load_model_config(folder)
    model = build_model(config, dtype, shards=open_checkpoint(folder))
    load_weights(model, str(folder), "auto", Placement(dtype, "cpu:0", **UNITS | settings))
    return model


def met(x: torch.Tensor, how: object) -> np.ndarray:
    """x quantised and dequantised, float64, with numpy's arithmetic and the oracle's decoding."""
    wide = x.float().numpy()
    size = 128 if how in (128, "powers") else wide.shape[1]
    found = np.zeros(wide.shape)
    for first in range(0, wide.shape[1], size):
        run = wide[:, first : first + size]
        most = np.abs(run).max(1, keepdims=True)
        scale = np.float32(how) if isinstance(how, float) else np.where(most > 0, most / np.float32(448), 1)
        if how == "powers":
            scale = 2.0 ** np.ceil(np.log2(scale))
        codes = torch.from_numpy(np.clip(run / scale.astype(np.float32), -448, 448)).to(torch.float8_e4m3fn)
        found[:, first : first + size] = oracle.numbers(codes) * scale
    return found


@pytest.mark.parametrize("name", MEETING)
def test_codes_meet_inputs_as_the_checkpoint_quantises_them(tmp_path, name):
    folder = write(tmp_path, VARIANTS[name])
    model = loaded(folder)
    layer = model.layers[0].mlp.down
    assert isinstance(layer.weight, Float8Weight)
    x = 3 * torch.randn(5, layer.in_features, generator=torch.Generator().manual_seed(0))
    x[2], x[3, 128:], x[4] = 0, 0, 300 * x[4]  # a static scale of 0.5 clips these values
    want = torch.from_numpy(met(x, MEETING[name]) @ oracle.dequantised(folder)[DOWN].T)
    torch.testing.assert_close(layer(x).double(), want, rtol=2e-5, atol=2e-5 * float(want.abs().max()))
    torch.testing.assert_close(layer(x[1:2]), layer(x)[1:2])


@pytest.mark.parametrize("name", KEEPING)
def test_other_inputs_stay_unquantised(tmp_path, name):
    assert isinstance(loaded(write(tmp_path, VARIANTS[name])).layers[0].mlp.down.weight, GroupWeight)


def test_a_device_without_units_keeps_inputs(tmp_path):
    folder = write(tmp_path, VARIANTS["fp8 tensor"])
    model = build_model(load_model_config(folder), torch.float32, shards=open_checkpoint(folder))
    load_weights(model, str(folder), "auto", Placement(torch.float32, "cpu:0", float8_units=False))
    assert isinstance(model.layers[0].mlp.down.weight, GroupWeight)


@pytest.mark.parametrize("name", ["fp8 tensor", "ct float channel", "fp8 blocks", "online"])
def test_logits_do_not_depend_on_chunks_and_hardly_on_the_library(tmp_path, monkeypatch, name):
    config = requested(load_model_config(tiny.checkpoint("llama")), "fp8") if name == "online" else None
    folder = tiny.checkpoint("llama") if name == "online" else write(tmp_path, VARIANTS[name])
    model = loaded(folder, config=config)
    harness = Harness(model)
    whole, chunked = harness.prefill(harness.add(TOKENS)), harness.prefill(harness.add(TOKENS), chunk=3)
    assert float((whole - chunked).norm() / whole.norm()) < TURNED
    calls = []
    product = scaled.library_product
    monkeypatch.setattr(
        "engine.kernels.gemm.dispatch_float8.library_product", lambda *given: calls.append(product(*given))
    )
    monkeypatch.setattr(ScaledProducts, "is_librarys", lambda self, rows, width, depth: name != "fp8 blocks")
    by_library = harness.prefill(harness.add(TOKENS))
    assert len(calls) == (0 if name == "fp8 blocks" else 4 * len(model.layers))
    assert float((by_library - whole).norm() / whole.norm()) < TURNED
    calls.clear()
    Harness(loaded(folder, config=config, invariant=True)).prefill(Harness(model).add(TOKENS))
    assert not calls  # --deterministic excludes the library, which orders its sums by the number of rows


@pytest.mark.parametrize("name", ["fp8 tensor static", "fp8 blocks"])
async def test_codes_meet_inputs_in_an_accelerators_steps(tmp_path, monkeypatch, name):
    def placed(dtype, device, *rest):
        return Placement(dtype, "cpu:0", *rest, float8_units=True)

    monkeypatch.setattr(engine.run.start, "open_accelerator", lambda _device: HostAccelerator())
    monkeypatch.setattr(engine.run.weights, "Placement", placed)
    folder = write(tmp_path, VARIANTS[name])
    async with running(folder, dtype="float32") as served:
        found = await answer(served, text_request(np.array(TOKENS), 8, ignore_eos=True))
    harness = Harness(loaded(folder))
    assert found == [harness.generate(harness.add(TOKENS), 8)]


def test_the_kernel_that_quantises_down_s_input_applies_the_activation_of_given_rows(tmp_path, monkeypatch):
    mlp = loaded(write(tmp_path, VARIANTS["fp8 blocks"])).layers[0].mlp
    x = torch.randn(5, mlp.gate_up.in_features, generator=torch.Generator().manual_seed(0))
    want = mlp.down(mlp.gate_up(x))
    monkeypatch.setattr("engine.kernels.gemm.weight.glu", None)  # the kernel of the activation alone
    assert torch.equal(mlp.of_rows(x), want)


def test_a_norm_in_front_changes_nothing():
    draw = torch.Generator().manual_seed(0)
    values = torch.randint(0, 0x7F, (64, 192), generator=draw).to(torch.uint8)
    codes = Codes(Kind.E4M3, values, torch.rand(64, 1, generator=draw), 192, inputs=Inputs(kind=Kind.E4M3))
    weight = pack_pieces([codes], None, Placement(torch.float32, "cpu:0", float8_units=True), gated=False)
    x, gain = torch.randn(7, 192, generator=draw), torch.rand(192, generator=draw)
    assert torch.equal(weight.of_normed(x, gain, 1e-6, None, None), weight.linear(rms_norm_reference(x, gain, 1e-6)))
    out = torch.randn(7, 64, generator=draw)
    want = weight.linear(x) + out
    assert weight.linear(x, out, out) is out
    torch.testing.assert_close(out, want)


@pytest.mark.parametrize("name", ["fp8 tensor static", "ct float channel", "fp8 blocks"])
def test_an_activation_in_front_changes_nothing(tmp_path, monkeypatch, name):
    model = loaded(write(tmp_path, VARIANTS[name]))
    mlp, norm = model.layers[0].mlp, model.layers[0].mlp_norm
    x = torch.randn(7, mlp.gate_up.in_features, generator=torch.Generator().manual_seed(0))
    want = mlp.down(mlp.gate_up.of_normed(Normed(norm, x)))
    monkeypatch.setattr("engine.kernels.gemm.float8_weight.glu", None)  # the unfused launch would fail
    found = mlp(Normed(norm, x))
    assert float((found.value() - want).norm() / want.norm()) < TURNED
    residual = x.clone()
    assert found.add_then(residual, norm).residual is residual
    assert float((residual - x - want).norm() / want.norm()) < TURNED


def test_joined_matrices_take_the_largest_scale_of_their_inputs(caplog):
    values, scale = torch.zeros(4, 8, dtype=torch.uint8), torch.ones(4, 1)
    inputs = [Inputs(torch.tensor(given), Kind.E4M3) for given in (0.25, 2.0, 1.0)]
    pieces = [Codes(Kind.E4M3, values, scale, 8, inputs=each) for each in inputs]
    with caplog.at_level(logging.INFO):
        assert joined(pieces).inputs.scale == 2.0
    assert "the largest is taken" in caplog.text
    placement = Placement(torch.float32, "cpu:0", float8_units=True)
    assert isinstance(pack_pieces(pieces, None, placement, gated=False), Float8Weight)


class TestTimedProducts:
    """The choice of products at the start, with a faked clock."""

    ROWS = (8, 32, 64)

    @pytest.fixture
    def weight(self, monkeypatch):
        monkeypatch.setattr(scaled, "LEAST_WEIGHT", 0)
        monkeypatch.setattr(scaled, "COLD", 0)
        draw = torch.Generator().manual_seed(0)
        values = torch.randint(0, 0x7F, (64, 192), generator=draw).to(torch.uint8)
        return packed(Codes(Kind.E4M3, values, torch.rand(64, 1, generator=draw), 192), words=False)

    def chosen(self, monkeypatch, weight, clock):
        products = ScaledProducts()
        products.record(weight)
        products.record(weight)
        monkeypatch.setattr(scaled, "_recorded", lambda launch: lambda _: launch())
        monkeypatch.setattr(scaled, "seconds", clock)
        products.autotune(self.ROWS, torch.float32)
        products.record(weight)  # forgotten after autotune
        return [products.is_librarys(rows, 64, 192) for rows in (1, 20, 32, 33, 64, 5000)]

    def test_the_faster_is_taken_from_the_next_size_that_was_timed(self, monkeypatch, weight):
        found, real = [], scaled._is_faster

        def clock(rivals, codes, times):
            for launch in rivals:
                launch(codes[0])
            return [2.0, 1.0 if found[-1] > 32 else 3.0][: len(rivals)]

        def noted(weights, rows, dtype):
            found.append(rows)
            return real(weights, rows, dtype)

        monkeypatch.setattr(scaled, "_is_faster", noted)
        assert self.chosen(monkeypatch, weight, clock) == [False, False, False, True, True, True]
        assert found == [8, 32, 64]

    def test_a_library_that_is_wrong_or_refuses_is_not_asked_again(self, monkeypatch, weight, caplog):
        product = scaled.library_product

        def wrong(x, x_scales, weight, bias, residual, out):
            product(x, 1.1 * x_scales, weight, bias, residual, out)

        monkeypatch.setattr(scaled, "library_product", wrong)
        assert not any(self.chosen(monkeypatch, weight, lambda rivals, codes, times: [2.0, 1.0][: len(rivals)]))
        assert "ours multiply" in caplog.text

        def refuses(*given):
            raise RuntimeError("no such product")

        monkeypatch.setattr(scaled, "library_product", refuses)
        assert not any(self.chosen(monkeypatch, weight, lambda rivals, codes, times: [2.0, 1.0][: len(rivals)]))
        assert "cannot be timed (no such product)" in caplog.text
