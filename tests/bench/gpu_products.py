"""Up to 256 rows times the weights of known models on this card: the vendor's product and those of kernels/gemm.

cuts: a line per weight and row class for SHAPES of kernels/tune: the best cut, or None where the vendor is faster.
normed: the same with the norm before (q|k|v, gate|up) or after (o, down) fused into the product, compared with the
served product and a separate norm kernel, for SHAPES too; --missing runs only the entries that are None in SHAPES.
wave: gate|up at 65 to 128 rows by the vendor's product and silu·mul, and by gemm/gated_one_wave, for ONE_WAVE. layers:
a layer without its attention (products, norms, rotation and store): by the vendor's products, by ours with separate
norms, and as served; with the number of kernels of each. Graphs have 20 calls over weights that exceed the cache. Run:
python -m tests.bench.gpu_products [--only cuts,normed,wave,layers] [--missing] [--models Qwen3-0.6B,...] All of it
takes ten minutes, most of them for compiling.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile

from engine.kernels.activation import Activation, glu
from engine.kernels.gemm import dense, dispatch
from engine.kernels.gemm.algorithms import Algorithms
from engine.kernels.gemm.dense import DenseWeight
from engine.kernels.gemm.epilogue import Unscaled, empty_unscaled
from engine.kernels.gemm.gated_one_wave import launch_one_wave
from engine.kernels.gemm.split_k import Split, arrivals, launch_split
from engine.kernels.norm import rms_norm
from engine.kernels.room import MAX_ROWS
from engine.kernels.rotate import qkv_rope_store
from engine.kernels.tune import CLASSES, few_rows, one_wave_gated
from tests.bench.gpu_kernels import draw, time_of

SILU = Activation.SILU
MODELS = {  # hidden, inner, query heads, KV heads; heads have 128 dimensions
    "Qwen3-0.6B": (1024, 3072, 16, 8),
    "Qwen3-8B": (4096, 12288, 32, 8),
    "Qwen2.5-7B": (3584, 18944, 28, 4),
}
CUTS = [(64, 256, 3, 4), (64, 256, 2, 4), (64, 128, 4, 4), (32, 128, 6, 4), (16, 256, 4, 4), (128, 128, 3, 8)]
GATED_CUTS = [(32, 128, 4, 4), (32, 128, 3, 4), (16, 256, 3, 4), (16, 128, 4, 4), (64, 128, 3, 4)]
# The last number is the rows of a tile.
TILED_CUTS = [
    (64, 128, 4, 4, 64), (64, 128, 4, 4, 128), (64, 64, 6, 4, 64), (64, 64, 4, 4, 64), (64, 64, 6, 4, 128),
    (128, 64, 4, 8, 128),
]  # fmt: skip
TILED_GATED_CUTS = [
    (32, 64, 6, 4, 128), (64, 64, 6, 4, 64), (64, 64, 4, 4, 64), (64, 64, 5, 8, 128), (32, 128, 4, 4, 64),
]  # fmt: skip


def candidates(width: int, depth: int, gated: bool, rows: int) -> list[Split]:
    """Cuts with one, two, three or four programs per multiprocessor (132); cuts with tiles of rows also a half."""
    found = set()
    cuts = [(*cut, 0) for cut in (GATED_CUTS if gated else CUTS)]
    if rows > MAX_ROWS:
        cuts = TILED_GATED_CUTS if gated else TILED_CUTS
    for block_n, block_k, stages, warps, block_m in cuts:
        tiles = -(-width // block_n) * (-(-rows // block_m) if block_m else 1)
        for programs in (132, 264, 396, 528, *(66,) * (block_m > 0)):
            splits = max(1, min(round(programs / tiles), depth // (2 * block_k)))
            found.add(Split(block_n, block_k, splits, stages, warps, block_m))
    return sorted(found)


def weight_of(width: int, depth: int) -> DenseWeight:
    return DenseWeight(draw(width, depth), None, Algorithms())


def microseconds(calls: list) -> float:
    return time_of(calls)[0] * 1e6


def choose(width: int, depth: int, gated: bool, rows: int) -> tuple[float, float, Split]:
    """(vendor's microseconds, our microseconds, the cut with that time)."""
    size = width * depth * (1 + gated) * 2
    weights = [draw(width * (1 + gated), depth) for _ in range(max(2, min(20, (120 << 20) // size + 1)))]
    x, out = draw(rows, depth), draw(rows, width)

    def vendor(weight: torch.Tensor) -> None:
        y = torch.mm(x, weight.t())
        if gated:
            glu(y, SILU)

    theirs = microseconds([lambda w=w: vendor(w) for w in weights])
    found = []
    for cut in candidates(width, depth, gated, rows):
        calls = [
            lambda w=w, cut=cut: launch_split(x, w, None, None, out, SILU if gated else None, cut) for w in weights
        ]
        found.append((microseconds(calls), cut))
    return theirs, *min(found)


def choose_normed(width: int, depth: int, gated: bool, rows: int, before: bool) -> tuple[float, float, Split]:
    """(microseconds of the product and its separate norm kernel; microseconds of the fused product; its cut)."""
    size = width * depth * (1 + gated) * 2
    packed = [weight_of(width * (1 + gated), depth) for _ in range(max(2, min(20, (120 << 20) // size + 1)))]
    x, y = draw(rows, depth), draw(rows, width)
    gain = torch.randn(depth if before else width, device="cuda")

    def apart(weight: DenseWeight) -> None:
        if before:
            weight.of_normed(x, gain, 1e-6, None, SILU if gated else None)
        else:
            weight.linear(x, y, y)
            rms_norm(y, gain, 1e-6)

    def ours(weight: DenseWeight, cut: Split, ahead: Unscaled | None, after: Unscaled | None) -> None:
        residual, out = (y, y) if after is not None else (None, torch.empty_like(y))
        launch_split(x, weight.weight, None, residual, out, SILU if gated else None, cut, ahead, after)

    theirs = microseconds([lambda w=w: apart(w) for w in packed])
    ahead = empty_unscaled(x, 64, gain, 1e-6) if before else None
    if ahead is not None:
        ahead.squares.fill_(1.0)
    found = []
    for cut in candidates(width, depth, gated, rows):
        after = None if before else empty_unscaled(y, cut.block_n, gain, 1e-6)
        if (ahead or after) is not None:
            calls = [lambda w=w, cut=cut, after=after: ours(w, cut, ahead, after) for w in packed]
            found.append((microseconds(calls), cut))
    return theirs, *min(found)


def layer(model: str, rows: int) -> list[Callable[[], object]]:
    """One call for each of several layers; only their weights differ."""
    hidden, inner, heads, kv_heads = MODELS[model]
    width = (heads + 2 * kv_heads) * 128
    residual, angle = draw(rows, hidden), torch.randn(rows, 64, device="cuda")
    norm, head_norm = torch.randn(hidden, device="cuda"), torch.randn(128, device="cuda")
    k_cache, v_cache = draw(512, kv_heads, 16, 128), draw(512, kv_heads, 16, 128)
    slots = torch.randperm(512 * 16, device="cuda")[:rows]
    count = max(2, (200 << 20) // (2 * hidden * (width + hidden + 3 * inner)))
    weights = [
        tuple(
            weight_of(*size) for size in ((width, hidden), (hidden, heads * 128), (2 * inner, hidden), (hidden, inner))
        )
        for _ in range(count)
    ]

    ahead: list[Unscaled | None] = [None]  # squares that the previous layer passes on

    def run(qkv: DenseWeight, o: DenseWeight, gate_up: DenseWeight, down: DenseWeight) -> None:
        fused = qkv.of_normed(residual, norm, 1e-6, ahead[0], None)
        q = qkv_rope_store(
            fused, angle, angle, head_norm, head_norm, 1e-6, heads, kv_heads, 128, k_cache, v_cache, slots
        )
        between = o.add_then_norm(residual, q.view(rows, -1), norm, 1e-6)
        gated = gate_up.of_normed(residual, norm, 1e-6, between, SILU)
        ahead[0] = down.add_then_norm(residual, gated, norm, 1e-6)

    return [lambda w=w: run(*w) for w in weights]


def kernels_of(call: Callable[[], object]) -> int:
    """Number of kernels that one call launches."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize()
    kinds = (event for event in found.events() if event.device_type == torch.autograd.DeviceType.CUDA)
    return sum(not event.name.startswith(("Memcpy", "Memset")) for event in kinds)


def show_cuts(model: str, normed: bool, missing: bool) -> None:
    hidden, inner, heads, kv_heads = MODELS[model]
    shapes = {
        "q|k|v": ((heads + 2 * kv_heads) * 128, hidden, False),
        "o": (hidden, heads * 128, False),
        "gate|up": (inner, hidden, True),
        "down": (hidden, inner, False),
    }
    for name, shape in shapes.items():
        for rows in CLASSES:
            if missing and few_rows(rows, *shape) is not None:
                continue
            if normed:
                theirs, ours, cut = choose_normed(*shape, rows, name in ("q|k|v", "gate|up"))
            else:
                theirs, ours, cut = choose(*shape, rows)
            print(
                f"{model} {name:<8}{shape!s:<24}{rows:3d} rows{' and a norm' * normed}: {theirs:6.1f} us, "
                f"ours {ours:6.1f} us: {tuple(cut)}{' (slower)' * (ours >= theirs)}",
                flush=True,
            )


def show_wave(model: str) -> None:
    hidden, inner, *_ = MODELS[model]
    weights = [draw(2 * inner, hidden) for _ in range(max(2, (120 << 20) // (4 * inner * hidden) + 1))]

    def vendor(x: torch.Tensor, weight: torch.Tensor) -> None:
        glu(torch.mm(x, weight.t()), SILU)

    for rows in (65, 80, 96, 112, 128):
        x, out = draw(rows, hidden), draw(rows, inner)
        theirs = microseconds([lambda w=w, x=x: vendor(x, w) for w in weights])
        ours = microseconds([lambda w=w, x=x, out=out: launch_one_wave(x, w, None, out, SILU) for w in weights])
        taken = "taken" if one_wave_gated(rows, inner, hidden) else "not taken"
        print(f"{model} gate|up {rows:3d} rows: {theirs:6.1f} us, in one tile {ours:6.1f} us, {taken}", flush=True)


def show_layers(model: str) -> None:
    for rows in (1, 8, 32, 64, 72, 96, 128, 160, 192, 256):
        calls = layer(model, rows)
        served, count = microseconds(calls), kernels_of(calls[0])
        with mock.patch.object(dense, "empty_unscaled", return_value=None):
            apart = microseconds(calls)
        with (
            mock.patch.object(dispatch, "few_rows", return_value=None),
            mock.patch.object(dispatch, "one_wave_gated", return_value=False),
        ):
            vendor = microseconds(calls)
        print(
            f"{model} layer, {rows:3d} rows: vendor's products {vendor:6.1f} us, norms of their own {apart:6.1f} us, "
            f"as served {served:6.1f} us in {count} kernels, attention not counted",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="cuts,normed,wave,layers", help="which parts")
    parser.add_argument("--missing", action="store_true", help="of the cuts, those that SHAPES has as None")
    parser.add_argument("--models", default=",".join(MODELS), help="of those that this file lists")
    options = parser.parse_args()
    torch.manual_seed(0)
    arrivals(torch.device("cuda", torch.cuda.current_device()))
    for part in options.only.split(","):
        for model in options.models.split(","):
            if part == "layers":
                show_layers(model)
            elif part == "wave":
                show_wave(model)
            else:
                show_cuts(model, part == "normed", options.missing)


if __name__ == "__main__":
    main()
