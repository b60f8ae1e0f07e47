"""Routed-expert capture: the experts that a step's tokens choose, in pages like those of the KV cache.

Owner: engine/step/parts/routed.py, on the device thread. In: pages, and the place of each token. A step has one
capture, which is passed to every layer with experts; moe/route.py writes into it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Capture:
    """The buffer of all layers with experts, or of one layer."""

    ids: Tensor  # [places, layers, top_k] uint8 or int16; of one layer [places, top_k], a view
    mapping: Tensor  # [T] int64: the place of each token of the step; negative: no place

    def layer(self, number: int, others: Tensor | None = None) -> Capture:
        """The view for one layer; `number` counts layers with experts. others: bool [T, 1], tokens without a place."""
        mapping = self.mapping if others is None else self.mapping.masked_fill(others[:, 0], -1)
        return Capture(self.ids[:, number], mapping)

    def write(self, chosen: Tensor) -> None:
        """Writes chosen [T, top_k] without Triton; on an accelerator the kernel of moe/route writes."""
        places = self.mapping.clamp(min=0)  # tokens without a place go to the dummy block, which is the first
        self.ids[places] = chosen.to(self.ids.dtype)
