"""Sums of the weights that were read: not a number anywhere in what is summed makes a sum that is not finite.

Owner: the thread that builds the model. In: each tensor as it arrives. Out: a ConfigError that names the tensors whose
sum is not finite. An accelerator sums whole tensors, which costs nothing next to the copies; a CPU sums RUNS runs of
RUN values, evenly spaced, of those that are larger. Sums stay where the tensors are until the last has come.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.base.errors import ConfigError
from engine.weights.names import compact

RUNS, RUN = 256, 1024


class FiniteSums:
    """One sum per tensor of floats."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor | float] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """A tensor as it was saved."""
        if tensor.is_floating_point() and tensor.numel():
            total = _sampled(tensor).sum(dtype=torch.float32)
            # On a CPU a number: a small tensor behind each freed copy keeps the copy's room from being found again.
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
    if tensor.itemsize == 1:  # FP8 has no sums of its own
        return flat[:: max(1, flat.numel() // (RUNS * RUN))].float()
    if tensor.device.type == "cpu" and flat.numel() > 2 * RUNS * RUN:
        return flat.unfold(0, RUN, flat.numel() // RUNS)
    return flat
