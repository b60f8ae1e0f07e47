"""Detects NaN and infinity in loaded weights by their sums, which are then not finite.

Owner: the thread that builds the model. In: each tensor as it arrives. Out: a ConfigError that names the tensors whose
sum is not finite. An accelerator sums whole tensors, whose cost is small compared to the copies. A CPU sums RUNS evenly
spaced runs of RUN values of larger tensors. Sums stay on the tensors' device until the last tensor has arrived.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.base.errors import ConfigError
from engine.weights.names import compact

RUNS, RUN = 256, 1024


class FiniteSums:
    """The sums, one per float tensor."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor | float] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Adds a tensor, in its saved dtype."""
        if tensor.is_floating_point() and tensor.numel():
            total = _sampled(tensor).sum(dtype=torch.float32)
            # A Python number on a CPU: a small tensor after each freed copy would fragment the heap.
            self._sums[name] = total if total.is_cuda else total.item()

    def check(self, folder: str) -> None:
        """Raises ConfigError with every name whose sum is not finite."""
        if not self._sums:
            return
        found = list(self._sums.values())
        whole = [total for total in found if isinstance(total, Tensor)]
        finite = (torch.stack(whole) if whole else torch.tensor(found)).isfinite().tolist()
        broken = [name for name, is_finite in zip(self._sums, finite) if not is_finite]
        if broken:
            raise ConfigError(
                f"{folder}: {compact(broken)}: the weights hold NaN or infinity; the files are damaged, or were saved "
                "so: fetch them again, or use another checkpoint"
            )


def _sampled(tensor: Tensor) -> Tensor:
    flat = tensor.reshape(-1)
    if tensor.itemsize == 1:  # torch cannot sum FP8
        return flat[:: max(1, flat.numel() // (RUNS * RUN))].float()
    if tensor.device.type == "cpu" and flat.numel() > 2 * RUNS * RUN:
        return flat.unfold(0, RUN, flat.numel() // RUNS)
    return flat
