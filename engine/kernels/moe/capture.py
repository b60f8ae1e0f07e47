"""Routed-expert capture: the experts that a step's tokens choose, in pages like those of the KV cache.

Owner: the part engine/step/parts/routed.py, on the device thread. In: pages, and the place of each token. A step has
one capture, which every layer with experts gets; moe/route.py writes into it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Capture:
    """The places of all layers with experts, or of one of them."""

    ids: Tensor  # [places, layers, top_k] uint8 or int16; of one layer [places, top_k], a view
    mapping: Tensor  # [T] int64: the place of each token of the step; negative: it has none

    def layer(self, number: int) -> Capture:
        """Those of one layer; `number` counts layers with experts."""
        return Capture(self.ids[:, number], self.mapping)

    def write(self, chosen: Tensor) -> None:
        """chosen [T, top_k], without Triton: what the kernel of moe/route does on the way."""
        places = self.mapping.clamp(min=0)  # what has no place goes into the dummy block, which is the first
        self.ids[places] = chosen.to(self.ids.dtype)
