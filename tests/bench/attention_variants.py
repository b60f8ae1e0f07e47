"""Variants of attention over FP8 pages, for one run on a card to judge: gpu_codes times them beside the served.

Decode widens codes in the registers of the matrix units: some 700 instructions of a warp for 32 keys of e4m3, 590 for
64 keys of two warps. PARTS are other numbers of parts and programs for a unit, warps, stages and keys of a round, and
blocks asked for before the kernel in front has ended; TILES are other tiles of prompts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from engine.kernels.attention import decode, prefill

TUNED = decode.tuned
# Name -> parts and programs of a unit, warps, stages, keys, blocks ahead.
PARTS = {
    f"{parts} parts, {warps} warps, {stages} stages, {keys} keys{', ahead' * (ahead > 0)}": (
        parts, warps, stages, keys, ahead
    )
    for parts, warps, stages, keys, ahead in (
        (7, 1, 4, 32, 0), (5, 1, 3, 64, 0), (4, 1, 4, 64, 0), (4, 2, 3, 64, 0), (3, 4, 3, 64, 0), (2, 4, 4, 64, 0),
        (4, 2, 3, 64, 8),
    )
}  # fmt: skip
# Name -> whether tiles are large, launch options.
TILES = {
    "one tile": (False, {"num_warps": 8, "num_stages": 3}),
    "two tiles": (False, {"num_warps": 8, "num_stages": 2, "maxnreg": 128}),
    "256 lines": (True, {"num_warps": 16, "num_stages": 3}),
    "256 lines, 4 stages": (True, {"num_warps": 16, "num_stages": 4}),
}


@contextlib.contextmanager
def parts_of(name: str) -> Iterator[int]:
    """Decode as PARTS[name] says; the parts of a unit."""
    parts, warps, stages, keys, ahead = PARTS[name]

    def tuned(*given: object) -> tuple[int, int, dict[str, int]]:
        return parts, TUNED(*given)[1], {"num_warps": warps, "num_stages": stages}

    with (
        mock.patch.object(decode, "tuned", tuned),
        mock.patch.object(decode, "KEYS_OF_CODES", keys),
        mock.patch.object(decode, "blocks_ahead", return_value=ahead),
    ):
        yield parts


@contextlib.contextmanager
def tiles_of(name: str) -> Iterator[None]:
    """Prompts in tiles as TILES[name] says."""
    large, options = TILES[name]
    with (
        mock.patch.object(prefill, "takes_large", return_value=large),
        mock.patch.object(prefill, "tuned", return_value=(64, options)),
    ):
        yield
