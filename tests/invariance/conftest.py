"""Every case runs on the CPU and, marked `gpu`, on a GPU."""

from __future__ import annotations

import pytest

from tests.invariance.devices import Device


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Device:
    if request.param == "cuda":
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no accelerator")
    return Device(request.param)
