"""Bounds on the cost of a plain step: calls of the driver, kernels per layer, steps without a graph.

Calls are counted at the addresses that the launcher gets, kernels by torch's profiler (PERFORMANCE section 9).
"""

import asyncio
import ctypes
import time
from collections import Counter

import numpy as np
import pytest
import torch

import engine.kernels.target as target
from engine.step.backend.device.forward import DeviceForward
from tests import tiny
from tests.bench.crowd import Steps, decode
from tests.engine.test_on_device_steady import plain_load
from tests.engine_kit import answer, prompts, text_request
from tests.invariance.devices import Device

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")]
CUDA = Device("cuda")
PROMPTS = prompts(16, tiny.FIRST_SPECIAL, seed=8, longest=60)
POINTER = ctypes.c_void_p
COUNTED = {
    "GraphLaunch": (POINTER, POINTER),
    "MemcpyAsync": (POINTER, POINTER, ctypes.c_size_t, ctypes.c_int, POINTER),
    "EventSynchronize": (POINTER,),
    "EventRecord": (POINTER, POINTER),
}
KERNELS_PER_LAYER = 9


@pytest.fixture
def calls(monkeypatch):
    """Number of the launcher's calls by name; a copy's name ends with its kind."""
    seen: Counter[str] = Counter()
    real, kept = target.runtime_calls(), []

    def counting(name, arguments):
        inner = ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(real[name])

        def call(*args):
            seen[name if name != "MemcpyAsync" else f"{name} {args[3]}"] += 1
            return inner(*args)

        kept.append(ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(call))
        return ctypes.cast(kept[-1], POINTER).value

    wrapped = real | {name: counting(name, arguments) for name, arguments in COUNTED.items()}
    monkeypatch.setattr(target, "runtime_calls", lambda: wrapped)
    yield seen
    kept.clear()


async def test_a_plain_decode_step_is_one_launch_and_one_wait(calls):
    async with CUDA.running(tiny.checkpoint("qwen3")) as served:
        steps = []
        served.on_step = steps.append
        calls.clear()
        await asyncio.gather(*[answer(served, text_request(ids, 80, ignore_eos=True)) for ids in PROMPTS])
        count = len(steps)
        seen = dict(calls)
        in_parts = sum(stats.num_tokens > stats.num_rows for stats in steps) + count // 64 + 1
    assert count >= 80
    assert count <= seen["GraphLaunch"] <= count + 2 * in_parts
    assert in_parts < count / 4
    assert seen["EventSynchronize"] == count
    assert seen.get("MemcpyAsync 1", 0) <= 1, "whose turn it is goes to the device once"
    assert "MemcpyAsync 2" not in seen, "tokens go home without one"
    # One for the copy to the host, and two for each measured gap.
    assert count <= seen["EventRecord"] <= count + 2 * (count // 64 + 1)


async def test_gaps_between_steps_are_measured_by_the_devices_clock():
    """Checks the shortest gap: in some gaps, but not in all, the card runs other processes' kernels for milliseconds.

    A gap on the device's clock takes about 11 us. Milliseconds or microseconds mistaken for seconds exceed the limit.
    So does any interval of the host's clock between two steps: an iteration of the host takes longer than 50 us.
    """
    async with CUDA.running(tiny.checkpoint("qwen3")) as served:
        Steps(served)  # measures every eighth gap
        seen = []
        served.on_step = seen.append
        await answer(served, text_request(PROMPTS[0], 100, ignore_eos=True))
    gaps = [stats.gap_s for stats in seen if stats.gap_s]
    assert 8 <= len(gaps) <= 14
    assert 1e-6 < min(gaps) < 5e-5


async def kernels_per_step(folder, rows: int) -> float:
    """Kernels per decode step of `rows` rows, by the profiler: between the `home` kernels of consecutive steps.

    Takes the median, as a step after a measured gap is launched in parts, with one more kernel.
    """
    from torch.profiler import ProfilerActivity, profile

    async with CUDA.running(folder, dtype="bfloat16", max_num_seqs=rows, enable_prefix_caching=False) as served:
        steps = Steps(served)
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True):  # the profiler's first start takes seconds
            torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as found:
            seen = await decode(served, steps, rows, 64, np.random.default_rng(0))
            torch.cuda.synchronize()
    skew = time.time() - time.perf_counter()  # the profiler uses the wall clock
    begun, ended = ((at + skew) * 1e9 for at in seen.window)
    kernels = sorted(
        (event.start_ns(), event.name())
        for event in found.profiler.kineto_results.events()
        if str(event.device_type()).endswith("CUDA") and not event.name().startswith(("Memcpy", "Memset"))
    )
    ends = [at for at, (time_ns, name) in enumerate(kernels) if "home_kernel" in name and begun <= time_ns <= ended]
    assert len(ends) >= seen.steps / 2
    return float(np.median(np.diff(ends)))


@pytest.mark.parametrize("rows", [1, 32])
async def test_a_layer_of_a_decode_step_is_a_few_kernels(rows, tmp_path):
    """From the difference between six layers and two: work that a step does once cancels out."""
    counts = []
    for layers in (2, 6):
        model = tiny.qwen3(
            num_hidden_layers=layers, hidden_size=512, intermediate_size=1408, num_attention_heads=8,
            num_key_value_heads=2, head_dim=128, vocab_size=2048, max_position_embeddings=1024,
        )  # fmt: skip
        folder = tiny.save(model, tmp_path / str(layers), dtype="bfloat16")
        counts.append(await kernels_per_step(folder, rows))
    per_layer = (counts[1] - counts[0]) / 4
    print(f"{rows} rows: {per_layer:.2f} kernels per layer, {counts[0] - 2 * per_layer:.1f} once per step")
    assert 2 < per_layer <= KERNELS_PER_LAYER


@pytest.mark.parametrize("name", ["qwen3", "omni"])
async def test_nearly_every_step_of_a_mixed_load_has_a_graph(name, monkeypatch):
    eager = 0
    real = DeviceForward._run_eagerly

    def counted(self, *args):
        nonlocal eager
        eager += 1
        real(self, *args)

    monkeypatch.setattr(DeviceForward, "_run_eagerly", counted)
    async with CUDA.running(tiny.checkpoint(name)) as served:
        steps = []
        served.on_step = steps.append
        for _ in range(2):
            await plain_load(served)
    mixed = sum(stats.num_tokens > stats.num_rows for stats in steps)
    assert mixed > 10
    assert eager <= 0.02 * len(steps), f"{eager} of {len(steps)} steps, {mixed} of them with prompts, had no graph"
