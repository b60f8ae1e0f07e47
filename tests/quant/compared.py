"""Compares loaded weights with the oracle of the same file."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.models.base.model import Model
from engine.quant.base import Quantised
from engine.weights.table import parts_of
from tests.quant import oracle


def check_weights(model: Model, folder: Path) -> int:
    """Every linear layer equals the oracle's matrix to a relative 1e-6; returns the number of quantised layers."""
    wanted, quantised = oracle.dequantised(folder), 0
    for _, modules, part in parts_of(model.weight_table(), model):
        if hasattr(part, "scheme"):
            names = [module if module == "lm_head" else f"model.{module}" for module in modules]
            expected = torch.cat([torch.from_numpy(wanted[f"{name}.weight"]) for name in names])
            torch.testing.assert_close(part.weight.dense().double(), expected, rtol=1e-6, atol=0)
            quantised += isinstance(part.scheme, Quantised)
    return quantised
