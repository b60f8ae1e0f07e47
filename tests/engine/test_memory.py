"""The cache's share of a GPU's memory, and the one-line error for sizes that do not fit."""

import logging
import re
from dataclasses import fields, replace

import pytest
import torch

import engine.run.start
import engine.run.weights
import engine.step.backend.device.backends
import engine.step.parts.drafter_load
from engine.base.config import EngineConfig
from engine.base.errors import ConfigError
from engine.cache.layout import CacheLayout
from engine.cache.sizing import check_weights, device_blocks, fit_context
from engine.cache.tokens import FullSpec
from engine.device.host import choose_device
from engine.device.memory import GIB, REMEDIES, DeviceMemory, enough_for
from engine.kernels import target
from engine.kernels.sampling.choose import choose_room
from engine.kernels.sampling.rules import rule_tables
from engine.models.registry import load_model_config
from engine.run.estimate import step_bytes
from engine.step.backend.device.startup import Startup
from engine.step.plain import Executor
from engine.step.sizes import Sizes
from server import cli
from tests import tiny
from tests.engine.host_accelerator import HostAccelerator
from tests.engine_kit import running

LAYOUT = CacheLayout([FullSpec(8, 128, torch.bfloat16)] * 32, 16)  # an 8B model: 2 MiB for 16 tokens
MEMORY = DeviceMemory(total=80 * GIB, free=60 * GIB, allocated=15 * GIB, reserved=19 * GIB)


def config(**settings):
    return EngineConfig(model="x", **settings)


def blocks(memory=MEMORY, max_model_len=8192, rows=256, peak=2 * GIB, graphs=GIB, **settings):
    return device_blocks(config(**settings), LAYOUT, max_model_len, 2048, rows, peak, graphs, memory)


def test_memory_that_torch_caches_is_not_used():
    assert MEMORY.used == 16 * GIB


def test_blocks_take_what_is_left_of_the_share(caplog):
    assert LAYOUT.block_bytes == 2 << 20
    with caplog.at_level(logging.INFO, "omniloop.engine"):
        count = blocks(gpu_memory_utilization=0.9)
    assert count == (72 - 16 - 2 - 1 - 1) * 512
    assert "80.00 GiB in all, 16.00 GiB used now, 2.00 GiB for a step, 1.00 GiB for graphs" in caplog.text
    assert "KV cache 52.00 GiB" in caplog.text
    assert blocks(gpu_memory_utilization=0.9, device_reserve_bytes=0) == count + 512


def test_a_tiny_model_does_not_take_all():
    layout = CacheLayout([FullSpec(1, 16, torch.float32)], 16)
    count = device_blocks(config(), layout, 512, 2048, 64, 0, 0, MEMORY)
    assert count == (1 << 20) + 1


def test_explicit_sizes_go_first_and_are_checked():
    assert blocks(num_gpu_blocks_override=100) == 101
    assert blocks(kv_cache_memory_bytes=GIB) == 512
    with pytest.raises(ConfigError, match=r"--num-gpu-blocks-override 40000: at most 31231 fit beside the weights"):
        blocks(num_gpu_blocks_override=40000)
    with pytest.raises(ConfigError, match=rf"--kv-cache-memory-bytes {70 * GIB}: at most {61 * GIB} fit"):
        blocks(kv_cache_memory_bytes=70 * GIB)
    with pytest.raises(ConfigError, match=r"--kv-cache-memory-bytes 5: one context takes (\d+) bytes") as error:
        blocks(kv_cache_memory_bytes=5)
    enough = int(re.findall(r"takes (\d+) bytes", str(error.value))[0])
    assert blocks(kv_cache_memory_bytes=enough) == 8192 // 16 + 1


@pytest.mark.parametrize("share", [0, -0.5, 1.5, float("nan")])
def test_an_invalid_share_is_refused(share):
    with pytest.raises(ConfigError, match="must be more than 0 and at most 1"):
        blocks(gpu_memory_utilization=share)
    with pytest.raises(ConfigError, match="must be more than 0 and at most 1"):
        check_weights(config(gpu_memory_utilization=share), GIB, MEMORY)


def test_a_share_too_small_names_one_that_fits():
    with pytest.raises(ConfigError, match=r"the smallest value that fits is 0\.(\d+)") as error:
        blocks(gpu_memory_utilization=0.2)
    smallest = float(re.findall(r"fits is (0\.\d+)", str(error.value))[0])
    assert (blocks(gpu_memory_utilization=smallest) - 1) * 16 >= 8192
    with pytest.raises(ConfigError, match=r"no value fits: lower --max-model-len or --max-num-batched-tokens"):
        blocks(peak=64 * GIB)


@pytest.mark.parametrize("most", [0, 3])
def test_the_estimate_counts_logits_and_their_rules_for_drafted_places(most):
    """The difference between two vocabularies is the memory of logits, and of the tables and the room of rules."""
    sizes = Sizes(64, 512, 100, 256, 512, 16, 512, width=most + 2 if most else 1)
    read = load_model_config(tiny.checkpoint("qwen3"))
    wide, narrow = 151_936, 30_016

    def estimated(vocab):
        return step_bytes(replace(read, text=replace(read.text, vocab_size=vocab)), sizes, torch.float32)

    def allocated(vocab):
        tables, room = rule_tables(sizes.max_rows, vocab, "meta"), choose_room(sizes.max_lines, vocab, "meta")
        tensors = [getattr(held, field.name) for held in (tables, room) for field in fields(held)]
        return 4 * vocab * sizes.max_lines + sum(tensor.nbytes for tensor in tensors)

    assert sizes.max_lines == 64 * (1 + most)
    assert estimated(wide) - estimated(narrow) == pytest.approx(allocated(wide) - allocated(narrow), rel=0.08)


def test_weights_are_measured_before_they_are_read():
    empty = DeviceMemory(total=80 * GIB, free=79 * GIB)
    check_weights(config(), 15 * GIB, empty)
    with pytest.raises(ConfigError, match=r"the weights take 15.00 GiB, 1.00 GiB are used already .* is 0.22") as error:
        check_weights(config(gpu_memory_utilization=0.1), 15 * GIB, empty)
    assert "\n" not in str(error.value)
    check_weights(config(gpu_memory_utilization=0.22), 15 * GIB, empty)
    with pytest.raises(ConfigError, match="no value fits: serve a smaller model"):
        check_weights(config(), 140 * GIB, empty)


def test_an_error_says_when_weights_would_fit_in_bfloat16():
    empty = DeviceMemory(total=40 * GIB, free=39 * GIB)
    with pytest.raises(ConfigError, match=r"no value fits: .*; --dtype bfloat16 takes 30.00 GiB and fits") as error:
        check_weights(config(dtype="float32"), 60 * GIB, empty, torch.float32)
    assert "\n" not in str(error.value)
    for taken, dtype in ((60 * GIB, torch.bfloat16), (100 * GIB, torch.float32)):
        with pytest.raises(ConfigError) as error:
            check_weights(config(), taken, empty, dtype)
        assert "--dtype" not in str(error.value)


def test_a_context_that_does_not_fit_is_shortened_or_refused(caplog):
    assert fit_context(config(), LAYOUT, 8192, 2048, 513) == 8192
    assert not caplog.records
    assert fit_context(config(), LAYOUT, 8192, 2048, 101) == 1600
    assert "limited to 1600 of 8192 tokens" in caplog.text
    with pytest.raises(ConfigError, match="--max-model-len 8192: the KV cache holds 1600 tokens; ask for at most 1600"):
        fit_context(config(max_model_len=8192), LAYOUT, 8192, 2048, 101)


@pytest.mark.parametrize(
    ("phase", "flag"),
    [
        ("buffers", "--max-num-seqs"),
        ("profiling", "--max-num-batched-tokens"),
        ("cache", "--gpu-memory-utilization"),
        ("graphs", "--enforce-eager"),
        ("warmup", "--gpu-memory-utilization"),
    ],
)
def test_out_of_memory_at_start_is_one_line(phase, flag):
    with pytest.raises(ConfigError) as error, enough_for(phase, lambda: MEMORY):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity")
    text = str(error.value)
    assert f"during {phase}: 2.50 GiB more were asked for, 60.00 GiB of 80.00 GiB are free" in text
    assert "(19.00 GiB held here, 1.00 GiB by the driver and other processes)" in text
    assert flag in text
    assert "\n" not in text


NO_ROOM = {
    "weights": (engine.run.weights, "load_weights"),
    "drafter": (engine.step.parts.drafter_load, "load_weights"),
    "buffers": (engine.step.backend.device.backends, "StepBuffers"),
    "profiling": (Startup, "profile"),
    "cache": (Startup, "allocate"),
    "graphs": (Startup, "capture"),
    "warmup": (Executor, "launch_forward"),
}


@pytest.mark.parametrize("phase", NO_ROOM)
async def test_each_phase_of_the_start_says_what_did_not_fit(phase, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity")

    assert REMEDIES.keys() == NO_ROOM.keys()
    folder = tiny.checkpoint("qwen3")
    drafts = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 2}
    monkeypatch.setattr(engine.run.start, "open_accelerator", lambda _device: HostAccelerator())
    monkeypatch.setattr(*NO_ROOM[phase], full)
    with pytest.raises(ConfigError, match=f"during {phase}: 2.50 GiB more were asked for, 1024.00 GiB of") as error:
        async with running(folder, speculative=drafts if phase == "drafter" else {}):
            pass
    assert str(error.value).endswith(REMEDIES[phase])


def test_other_faults_of_a_phase_stay_what_they_are():
    with pytest.raises(ValueError, match="mine"), enough_for("graphs", lambda: MEMORY):
        raise ValueError("mine")


def put_in(monkeypatch, name: str, capability: tuple[int, int]) -> None:
    """A card as torch reports it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(target, "HAS_TRITON", True)


@pytest.mark.parametrize(("name", "capability"), [("Tesla T4", (7, 5)), ("Tesla V100", (7, 0))])
def test_a_card_without_bfloat16_units_is_refused_with_those_that_have_them(monkeypatch, capsys, name, capability):
    put_in(monkeypatch, name, capability)
    for asked in ("auto", "cuda"):
        with pytest.raises(
            ConfigError, match=rf"{name} has compute capability {capability[0]}\.{capability[1]} and no"
        ):
            choose_device(asked)
    assert choose_device("cpu") == "cpu"
    assert cli.main(["check", str(tiny.checkpoint("qwen3"))]) == 1
    *_, last = capsys.readouterr().out.splitlines()
    assert last.startswith(f"refused: --device auto: {name} has")
    assert "cards of 8.0 and above have them (A100," in last
    assert last.endswith("see /docs/hardware")


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (12, 0)])
def test_cards_with_bfloat16_units_are_taken(monkeypatch, capability):
    put_in(monkeypatch, "a card", capability)
    assert choose_device("auto") == "cuda:0"


def test_the_device_is_chosen_by_what_torch_sees(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == choose_device("cpu") == "cpu"
    with pytest.raises(ConfigError, match=r"--device cuda: torch .* sees no accelerator \(.+\); use --device cpu"):
        choose_device("cuda")
    with pytest.raises(ConfigError, match="--device tpu: must be auto, cpu or cuda"):
        choose_device("tpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(target, "HAS_TRITON", True)
    put_in(monkeypatch, "NVIDIA H100", (9, 0))
    assert choose_device("auto") == choose_device("cuda") == "cuda:0"
    assert choose_device("cpu") == "cpu"
    monkeypatch.setattr(target, "HAS_TRITON", False)
    with pytest.raises(ConfigError, match="need Triton"):
        choose_device("auto")
