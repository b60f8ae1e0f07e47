"""Few rows times the weights of known models on this card: the vendor's product beside cuts of gemm/split_k.

Prints a line per weight and row class for SHAPES of kernels/tune: the best cut, or None where the vendor is faster.
Then a layer without its attention (products, norms, rotation and store) by the vendor's products and as it is served.
Graphs of 20 calls over weights beyond the cache. About two minutes, most of it compiling.
"""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import torch

from engine.kernels.activation import silu_mul
from engine.kernels.gemm import dense
from engine.kernels.gemm.dense import gated_linear, linear, pack, pack_gated
from engine.kernels.gemm.split_k import Split, arrivals, launch_split
from engine.kernels.norm import rms_norm
from engine.kernels.qkv import qkv_rope_store
from engine.kernels.tune import CLASSES
from tests.bench.gpu_kernels import draw, time_of

MODELS = {  # hidden, inner, heads, kv heads of 128
    "Qwen3-0.6B": (1024, 3072, 16, 8),
    "Qwen3-8B": (4096, 12288, 32, 8),
    "Qwen2.5-7B": (3584, 18944, 28, 4),
}
CUTS = [(64, 256, 3, 4), (64, 256, 2, 4), (64, 128, 4, 4), (32, 128, 6, 4), (16, 256, 4, 4), (128, 128, 3, 8)]
GATED_CUTS = [(32, 128, 4, 4), (32, 128, 3, 4), (16, 256, 3, 4), (16, 128, 4, 4), (64, 128, 3, 4)]


def candidates(width: int, depth: int, gated: bool) -> list[Split]:
    """Cuts whose programs come to one, two, three or four for each of 132 units."""
    found = set()
    for block_n, block_k, stages, warps in GATED_CUTS if gated else CUTS:
        tiles = -(-width // block_n)
        for programs in (132, 264, 396, 528):
            splits = max(1, min(round(programs / tiles), depth // (2 * block_k)))
            found.add(Split(block_n, block_k, splits, stages, warps))
    return sorted(found)


def microseconds(calls: list) -> float:
    return time_of(calls)[0] * 1e6


def choose(width: int, depth: int, gated: bool, rows: int) -> tuple[float, float, Split]:
    """(vendor's microseconds, ours, the cut that gave them)."""
    size = width * depth * (1 + gated) * 2
    weights = [draw(width * (1 + gated), depth) for _ in range(max(2, min(20, (120 << 20) // size + 1)))]
    x, out = draw(rows, depth), draw(rows, width)

    def vendor(weight: torch.Tensor) -> None:
        y = torch.mm(x, weight.t())
        if gated:
            silu_mul(y)

    theirs = microseconds([lambda w=w: vendor(w) for w in weights])
    found = []
    for cut in candidates(width, depth, gated):
        calls = [lambda w=w, cut=cut: launch_split(x, w, None, None, out, gated, cut) for w in weights]
        found.append((microseconds(calls), cut))
    return theirs, *min(found)


def layer(model: str, rows: int) -> list[Callable[[], object]]:
    """Calls that run one of several layers; only their weights differ."""
    hidden, inner, heads, kv_heads = MODELS[model]
    width = (heads + 2 * kv_heads) * 128
    residual, angle = draw(rows, hidden), torch.randn(rows, 64, device="cuda")
    norm, head_norm = torch.randn(hidden, device="cuda"), torch.randn(128, device="cuda")
    k_cache, v_cache = draw(512, kv_heads, 16, 128), draw(512, kv_heads, 16, 128)
    slots = torch.randperm(512 * 16, device="cuda")[:rows]
    count = max(2, (200 << 20) // (2 * hidden * (width + hidden + 3 * inner)))
    weights = [
        (pack(draw(width, hidden)), pack(draw(hidden, heads * 128)),
         pack_gated(draw(inner, hidden), draw(inner, hidden)), pack(draw(hidden, inner)))
        for _ in range(count)
    ]  # fmt: skip

    def run(
        qkv: dense.PackedLinear, o: dense.PackedLinear, gate_up: dense.PackedLinear, down: dense.PackedLinear
    ) -> None:
        heads_of = linear(rms_norm(residual, norm, 1e-6), qkv)
        q = qkv_rope_store(
            heads_of, angle, angle, head_norm, head_norm, 1e-6, heads, kv_heads, 128, k_cache, v_cache, slots
        )
        linear(q.view(rows, -1), o, residual, residual)
        linear(gated_linear(rms_norm(residual, norm, 1e-6), gate_up), down, residual, residual)

    return [lambda w=w: run(*w) for w in weights]


def main() -> None:
    torch.manual_seed(0)
    arrivals(torch.device("cuda", torch.cuda.current_device()))
    for model, (hidden, inner, heads, kv_heads) in MODELS.items():
        shapes = {
            "q|k|v": ((heads + 2 * kv_heads) * 128, hidden, False),
            "o": (hidden, heads * 128, False),
            "gate|up": (inner, hidden, True),
            "down": (hidden, inner, False),
        }
        for name, shape in shapes.items():
            for rows in CLASSES:
                theirs, ours, cut = choose(*shape, rows)
                print(f"{model} {name:<8}{shape!s:<24}{rows:3d} rows: {theirs:6.1f} us, ours {ours:6.1f} us: "
                      f"{tuple(cut) if ours < theirs else None}", flush=True)  # fmt: skip
    for model in MODELS:
        for rows in (1, 8, 32, 64, 256):
            calls = layer(model, rows)
            served = microseconds(calls)
            with mock.patch.object(dense, "few_rows", return_value=None):
                vendor = microseconds(calls)
            print(
                f"{model} layer, {rows:3d} rows: vendor's products {vendor:6.1f} us, as served {served:6.1f} us",
                flush=True,
            )


if __name__ == "__main__":
    main()
