"""Variants of attention over FP8 pages, which gpu_codes times in the same run as the kernels that are served.

Decode widens codes in the registers of the matrix units: some 700 instructions of a warp for 32 keys of e4m3, 590 for
64 keys of two warps. PARTS are other numbers of parts and programs for a unit, warps, stages and keys of a round,
blocks asked for before the kernel in front has ended, and registers of a thread where the compiler takes so many that
fewer programs fit: ten of one warp fit with 200 and spill none, five of two warps with 200 and spill 128 bytes. Six of
two warps and three stages do not, for shared memory. TILES are other tiles of prompts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from engine.kernels.attention import decode, prefill

TUNED = decode.tuned
# Name -> parts and programs of a unit, warps, stages, keys, blocks prefetched, registers.
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
# Form of pages -> the variants of it.
DECODES = {"fp8": list(PARTS), "fp8 e5m2": list(PARTS)[:2]}
PROMPTS = {"fp8": list(TILES), "fp8 e5m2": list(TILES)[:1]}


@contextlib.contextmanager
def parts_of(name: str) -> Iterator[int]:
    """Decode as PARTS[name] says; the parts of a unit."""
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
    """Prompts in tiles as TILES[name] says."""
    large, options = TILES[name]
    with (
        mock.patch.object(prefill, "takes_large", return_value=large),
        mock.patch.object(prefill, "tuned", return_value=(64, options)),
    ):
        yield
