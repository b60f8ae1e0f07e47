"""Variants of decode attention over FP8 pages, for one run on a card to judge: gpu_codes times them beside the served.

Decode is one warp to a program, of some 1,600 instructions for 32 keys, so what they wait for is hidden by other
programs of the unit alone. LAUNCHES are other numbers of parts and programs for a unit, and of stages.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.kernels.attention import decode as served

TUNED = served.tuned
# Name -> parts and programs of a unit, stages.
LAUNCHES = {"2 parts": (2, 4, 4), "4 parts": (4, 4, 4), "8 parts, 2 stages": (8, 8, 2), "12 parts": (12, 12, 2)}


def launched(name: str) -> Callable[..., object]:
    """`tuned` of the decode kernel with the launch LAUNCHES[name]."""
    _, share, stages = LAUNCHES[name]

    def tuned(*given: object) -> tuple[int, int, dict[str, int]]:
        _, lead, options = TUNED(*given)
        return share, lead, {**options, "num_stages": stages}

    return tuned
