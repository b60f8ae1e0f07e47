"""Checks of codes and scales: on an accelerator they are looked at when the whole part has been read."""

import pytest
import torch

from engine.base.errors import ConfigError
from engine.kernels.gemm.pack import Placement
from engine.quant.base import Quantised
from engine.quant.checks import Checks
from engine.quant.compressed_integers import Integers8, PackedIntegers
from engine.quant.floats8 import Floats8

DEVICES = ("cpu", "cuda:0")  # of the checks; the tensors are on the CPU
FORM = Floats8("weight_scale", (torch.float32,), "row")


def tensors(code=0x38, scale=1.0):
    codes = torch.full((4, 8), code, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": torch.tensor([[1.0], [scale], [scale], [0.0]])}


def read(device, *matrices):
    with Checks(device) as checks:
        for number, given in enumerate(matrices):
            with checks.of(f"experts.{number}"):
                FORM.read(given, checks)


SCALES = r"experts\.1: 2 of 4 values of weight_scale are negative, NaN or infinite; scales must be finite"
NO_NUMBER = r"experts\.1: weight holds codes that are not numbers"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ({"scale": float("nan")}, SCALES),
        ({"scale": float("inf")}, SCALES),
        ({"scale": -1.0}, SCALES),
        ({"code": 0x7F}, NO_NUMBER),
        ({"code": 0xFF, "scale": -1.0}, NO_NUMBER),
    ],
)
def test_the_first_error_is_reported_with_its_module(device, broken, said):
    read(device, tensors(), tensors(scale=0.0))
    with pytest.raises(ConfigError, match=f"^{said}"):
        read(device, tensors(), tensors(**broken), tensors(), tensors(code=0x7F))


@pytest.mark.parametrize("device", DEVICES)
def test_an_error_before_one_that_is_raised_at_once_is_reported(device):
    empty = {**tensors(), "weight_scale": torch.ones(0)}
    with pytest.raises(ConfigError, match=f"^{SCALES}"):
        read(device, tensors(), tensors(scale=-1.0), empty)
    with pytest.raises(ConfigError, match=r"^experts\.1: weight_scale holds no value"):
        read(device, tensors(), empty, tensors(scale=-1.0))


@pytest.mark.parametrize("device", DEVICES)
def test_another_error_is_not_hidden(device):
    with pytest.raises(KeyError):
        read(device, tensors(scale=-1.0) if device != "cpu" else tensors(), {})


@pytest.mark.parametrize("device", DEVICES)
def test_other_storages_are_checked(device):
    zeros = {
        "weight_packed": torch.zeros(2, 4, dtype=torch.int32),
        "weight_scale": torch.ones(2, 1),
        "weight_zero_point": torch.tensor([[7], [9]], dtype=torch.int8),
    }
    said = r"^m: 1 of 2 values of weight_zero_point lie outside of -8 \.\. 7, the range of 4 bits: quantise"
    with pytest.raises(ConfigError, match=said), Checks(device) as checks, checks.of("m"):
        PackedIntegers(4, 32, packed_zeros=False).read(zeros, checks)
    whole = {"weight": torch.zeros(2, 4, dtype=torch.int8), "weight_scale": torch.tensor([[1.0], [-1.0]])}
    said = "^m: 1 of 2 values of weight_scale are negative"
    with pytest.raises(ConfigError, match=said), Checks(device) as checks, checks.of("m"):
        Integers8(False).read(whole, checks)


def test_a_part_waits_for_an_accelerator_once(monkeypatch):
    looks, stack = [], torch.stack
    monkeypatch.setattr(Checks, "__init__", lambda self, _device, make=Checks.__init__: make(self, "cuda:0"))
    monkeypatch.setattr(torch, "stack", lambda counts: (looks.append(len(counts)), stack(counts))[1])
    names = tuple(f"experts.{number}" for number in range(9))
    given = {kind: [tensors()[kind]] * len(names) for kind in tensors()}
    Quantised((FORM,) * len(names), names).matrices(given, Placement(torch.float32, "cpu"))
    assert looks == [2 * len(names)]
