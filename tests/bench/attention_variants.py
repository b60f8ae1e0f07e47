"""Variants of attention over FP8 pages, timed by gpu_codes in the same run as the served kernels.

Decode converts FP8 codes in registers: about 700 instructions of a warp for 32 keys of e4m3, or 590 for 64 keys with
two warps. PARTS vary the parts and programs per multiprocessor, warps, stages, keys per iteration, blocks prefetched
before the previous kernel has ended, and the registers per thread. The last limits a compiler whose choice would let
fewer programs fit: with 200 registers ten programs of one warp fit and spill nothing, and five programs of two warps
fit and spill 128 bytes. Six programs of two warps and three stages exceed the shared memory. TILES vary the tiles of
prompts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from engine.kernels.attention import decode, prefill

TUNED = decode.tuned
# Name -> parts and programs per multiprocessor, warps, stages, keys, blocks prefetched, registers.
PARTS = {
    f"{parts} parts, {warps} warps, {stages} stages, {keys} keys{', ahead' * (ahead > 0)}"
    f"{f', {registers} registers' * (registers > 0)}": (parts, warps, stages, keys, ahead, registers)
    for parts, warps, stages, keys, ahead, registers in (
        (8, 1, 3, 32, 8, 0),
        (10, 1, 3, 32, 8, 200),
        (8, 1, 3, 32, 0, 0),
        (5, 2, 3, 64, 8, 200),
        (4, 2, 4, 64, 8, 0),
    )
}
# Name -> whether tiles are large, launch options.
TILES = {
    "two tiles": (False, {"num_warps": 8, "num_stages": 2, "maxnreg": 128}),
    "256 lines, 4 stages": (True, {"num_warps": 16, "num_stages": 4}),
}
# Form of pages -> names of its variants.
DECODES = {"fp8": list(PARTS), "fp8 e5m2": list(PARTS)[:2]}
PROMPTS = {"fp8": list(TILES), "fp8 e5m2": list(TILES)[:1]}


@contextlib.contextmanager
def parts_of(name: str) -> Iterator[int]:
    """Decode kernels use the settings PARTS[name]; yields the parts per multiprocessor."""
    parts, warps, stages, keys, ahead, registers = PARTS[name]
    options = {"num_warps": warps, "num_stages": stages} | ({"maxnreg": registers} if registers else {})

    def tuned(*given: object) -> tuple[int, int, dict[str, int]]:
        return parts, TUNED(*given)[1], options

    with (
        mock.patch.object(decode, "tuned", tuned),
        mock.patch.object(decode, "KEYS_OF_CODES", keys),
        mock.patch.object(decode, "blocks_ahead", return_value=ahead),
    ):
        yield parts


@contextlib.contextmanager
def tiles_of(name: str) -> Iterator[None]:
    """Prompt kernels use the tiles TILES[name]."""
    large, options = TILES[name]
    with (
        mock.patch.object(prefill, "takes_large", return_value=large),
        mock.patch.object(prefill, "tuned", return_value=(64, options)),
    ):
        yield
