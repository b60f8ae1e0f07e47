"""A start's walk launches every kernel that the model will need; simulated on an absent H100."""

import asyncio
import random
import re
from collections import Counter
from dataclasses import replace

import pytest
import torch
import triton  # noqa: F401  (must precede the import of any kernel file)

import engine.quant.blocks
from engine.base.config import EngineConfig, LoraConfig
from engine.explain.explained import explain
from engine.layers.moe import Experts
from engine.lora.adapter import Adapter, PackedExperts, PackedSite
from engine.lora.sites import changed
from tests.bench.shapes import few_layers, write_folder
from tests.engine.absent_device import met  # noqa: F401  (a fixture)
from tests.engine.kinds import every_kind
from tests.engine_kit import answer, running, text_request

REAL = {"load_format": "dummy", "num_gpu_blocks_override": 4096, "max_num_seqs": 0, "max_num_batched_tokens": 0}
LONG = {**REAL, "max_num_batched_tokens": 4096}
CASES = {
    "8b": REAL,
    "0.6b": REAL,
    "vl-7b": REAL,
    "30b-a3b in long steps": LONG,
    "gpt-oss-20b": REAL,
    "8b in long steps": {**LONG, "max_logprobs": -1},
    "0.6b in long steps": {**LONG, "logprobs_mode": "processed_logprobs"},
    "8b with the same bits": {**LONG, "deterministic": True},
    "0.6b without graphs": {**LONG, "enforce_eager": True},
    "vl-7b of few sizes": {**REAL, "cudagraph_capture_sizes": (4, 16)},
    "0.6b with codes in its cache": {**REAL, "kv_cache_dtype": "fp8", "kv_cache_skip_layers": ("0",)},
    "0.6b of few rows": {**REAL, "max_num_seqs": 20, "max_num_batched_tokens": 100},
}


SHORT = ("8b in long steps", "0.6b of few rows", "8b with the same bits")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in SHORT else pytest.mark.full) for case in CASES]
)
async def test_kernels_of_every_kind_of_request_are_met_in_the_walk(case, met, tmp_path, monkeypatch):  # noqa: F811
    # Scales on the meta device have no values to check.
    monkeypatch.setattr(engine.quant.blocks, "scale_of", lambda _kind, powers, _checks: powers.to(torch.bfloat16))
    folder = write_folder(tmp_path, few_layers(case.split()[0]))
    async with running(folder, device="cuda", max_model_len=16384, **CASES[case]) as served:
        met.ready()
        await every_kind(served)
    assert len(met.at_start) > 20
    assert len(met.kinds) <= 1.5 * len(met.at_start | met.later)  # a walk asks Triton once per kind
    assert not met.later
    assert not met.since
    if CASES[case]["max_num_batched_tokens"] >= 2048:  # steps as large as those that explain prints
        config = EngineConfig(model=str(folder), max_model_len=16384, **CASES[case])
        kernels = set(re.findall(r"\w+\.(\w+_kernel)", "\n".join(explain(config, "cuda:0"))))
        assert len(kernels) > 5
        assert kernels <= {name for name, *_ in met.at_start}


async def test_kernels_of_pictures_of_any_size_are_met_in_the_walk(met, tmp_path):  # noqa: F811
    """Products of few patches, and the kernels that shrink pictures, depend on the number of patches."""
    draw, grids = random.Random(3), [(t, h, w) for t in (1, 2) for h in range(1, 6) for w in range(h, 8)]
    async with running(write_folder(tmp_path, few_layers("vl-7b")), device="cuda", **REAL) as engine:
        runtime = engine.inspect().runtime
        vision, side = runtime.model.vision, int(runtime.sizes.encoder_rows**0.5)
        grids += [(draw.choice((1, 1, 4)), draw.randint(1, side // 2), draw.randint(1, side // 2)) for _ in range(20)]
        met.ready()
        with torch.inference_mode():
            for number, (t, h, w) in enumerate(grids):
                features = vision.black((t, 2 * h, 2 * w), shrunk=number % 2 == 1)
                vision.encode(features)
                patches = torch.zeros(4 * t * h * w, vision.patch_embed.in_features, device="meta")
                vision.encode({"pixel_values": patches, "grid_thw": features["grid_thw"]})
    assert not met.since


@pytest.mark.parametrize(
    "case", ["8b", *(pytest.param(case, marks=pytest.mark.full) for case in ("30b-a3b", "gpt-oss-20b"))]
)
async def test_kernels_of_steps_with_adapters_are_met_in_the_walk(case, met, tmp_path, monkeypatch):  # noqa: F811
    """Steps of few and of many tokens, in graphs and without, with and without rows of the base."""
    # Scales on the meta device have no values to check.
    monkeypatch.setattr(engine.quant.blocks, "scale_of", lambda _kind, powers, _checks: powers.to(torch.bfloat16))
    folder = write_folder(tmp_path, few_layers(case))
    async with running(folder, device="cuda", max_model_len=16384, **LONG, lora=LoraConfig(max_loras=4)) as served:
        sites: dict[str, PackedSite | PackedExperts] = {}
        for path, layer in await served.on_device(lambda runtime: changed(runtime.model, LoraConfig())):
            pieces = layer.pieces if isinstance(layer, Experts) else layer.out_features
            first = (layer.num_experts,) if isinstance(layer, Experts) else ()
            a = torch.zeros(*first, 16 * len(pieces), layer.in_features, dtype=torch.bfloat16)
            b = tuple(torch.zeros(*first, rows, 16, dtype=torch.bfloat16) for rows in pieces)
            sites[path] = PackedExperts(a, b) if first else PackedSite(a, b)
        adapters = [Adapter(str(k), bytes([k]) * 32, 16, sites, 0) for k in range(3)]
        met.ready()
        for rows, length in ((1, 3), (3, 40), (40, 30), (5, 700), (1, 5000)):
            asked = [text_request([5] * length, 3, ignore_eos=True) for _ in range(rows)]
            asked = [replace(each, lora=adapters[k % 3] if k % 4 else None) for k, each in enumerate(asked)]
            asked.append(replace(text_request([5] * length, 3, ignore_eos=True), lora=adapters[0]))
            await asyncio.gather(*(answer(served, each) for each in asked))
    kind = "expand_gated_kernel" if case == "8b" else "expand_summed_kernel"
    counts = Counter(name for name, *_ in met.at_start)
    assert {"shrink_kernel", "expand_kernel", kind} <= set(counts)
    if case == "8b":  # each takes a start about 10 ms, from a full cache too
        of_adapters = ("place_list_kernel", "shrink_kernel", "expand_kernel", "expand_gated_kernel")
        assert sum(counts[name] for name in of_adapters) <= 20
    assert not met.later
    assert not met.since
