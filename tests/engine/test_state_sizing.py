"""How many rows with states fit into a cache: two states and a tail for each row; refusals at start."""

import re

import pytest
import torch

from engine.base.config import EngineConfig
from engine.base.errors import ConfigError
from engine.cache.layout import CacheLayout
from engine.cache.sizing import device_blocks, fit_context, host_blocks, states_of
from engine.cache.state import StateSpec
from engine.cache.tokens import FullSpec
from engine.device.memory import GIB, DeviceMemory
from engine.kernels.state.places import Part
from engine.models.text.llama import Llama
from server import cli
from tests import tiny

F32 = torch.float32
STATE = StateSpec((Part(256, 128, F32), Part(3, 1024, F32)), (Part(4, 128, F32), Part(1, 1024, F32)), 16, 20)
LAYOUT = CacheLayout([FullSpec(2, 64, F32), STATE, STATE, STATE], 16)
CHUNK = 64
LEAST = LAYOUT.blocks_for(256, CHUNK)


def config(**settings):
    return EngineConfig(model="x", **settings)


def test_a_context_takes_its_tokens_and_what_a_row_takes_besides():
    runs = LAYOUT.runs
    fixed = 2 * runs.state_blocks + runs.tail_blocks
    assert 16 + fixed == LEAST
    assert fit_context(config(), LAYOUT, 8192, CHUNK, 1 + fixed + 100) == 1600
    assert LAYOUT.rows_in(3 * LEAST + 1, 256, CHUNK) == 3


def test_a_cache_on_a_cpu_has_room_for_a_state_more_of_each_row():
    longest = LAYOUT.blocks_for(1024, CHUNK)
    plenty = config(kv_cache_memory_bytes=1 << 40)
    assert host_blocks(plenty, LAYOUT, longest, 8) == 1 + 8 * (longest + LAYOUT.runs.state_blocks)
    plain = CacheLayout([FullSpec(2, 64, F32)] * 4, 16)
    assert host_blocks(plenty, plain, 64, 8) == 1 + 8 * 64


@pytest.mark.parametrize("flag", ["num_gpu_blocks_override", "kv_cache_memory_bytes", ""])
def test_room_for_no_row_is_refused_with_what_fits(flag):
    """The refusals on a CPU and on a GPU."""
    missing = LEAST - 1
    asked = {"num_gpu_blocks_override": missing, "kv_cache_memory_bytes": (missing + 1) * LAYOUT.block_bytes}
    settings = {flag: asked[flag]} if flag else {}
    said = f"--{flag.replace('_', '-')} {asked[flag]}: " if flag else ""
    holds = rf"^{said}the KV cache holds {missing} blocks, and a row of 256 tokens takes {LEAST}: two states of"
    with pytest.raises(ConfigError, match=holds) as error:
        fit_context(config(**settings), LAYOUT, 8192, CHUNK, 1 + missing)
    fitting = int(re.findall(r"(\d+) fits?$", str(error.value))[0])
    count = fitting if "override" in flag else fitting // LAYOUT.block_bytes - 1
    assert fit_context(config(), LAYOUT, 8192, CHUNK, 1 + count) == 256


def test_an_accelerators_share_too_small_for_a_row_names_one_that_fits():
    memory = DeviceMemory(total=GIB // 64, free=GIB // 64)
    small = config(gpu_memory_utilization=0.02, device_reserve_bytes=0)
    with pytest.raises(ConfigError, match=r"leaves no room for a KV cache: .* the smallest value that fits is 0\.\d+"):
        device_blocks(small, LAYOUT, 512, CHUNK, 8, 0, 0, memory)
    large = config(gpu_memory_utilization=1.0, device_reserve_bytes=0)
    assert device_blocks(large, LAYOUT, 512, CHUNK, 8, 0, 0, memory) > LEAST


def test_models_without_states_have_no_line():
    assert states_of(CacheLayout([FullSpec(2, 64, F32)], 16), 100, 1024, CHUNK) is None


def test_check_says_how_many_rows_fit(monkeypatch, capsys):
    """A tiny model; two of its three layers are declared to have states."""
    folder = str(tiny.checkpoint("llama"))
    full = FullSpec(2, 64, F32)
    monkeypatch.setattr(Llama, "cache_specs", lambda model: [STATE, full, STATE])
    layout = CacheLayout([STATE, full, STATE], 16)
    rows = ["--max-model-len", "256", "--device", "cpu"]
    assert cli.main(["check", folder, *rows, "--num-gpu-blocks-override", str(3 * layout.blocks_for(256, 256))]) == 0
    out = capsys.readouterr().out
    (line,) = re.findall(r"^states: .*$", out, re.MULTILINE)
    assert line.endswith("a row computes with two; 3 rows of 256 tokens fit at one time")
    assert f"states: {layout.runs.state_blocks * layout.block_bytes / 1e6:.1f} MB each" in line
    assert cli.main(["check", folder, *rows, "--num-gpu-blocks-override", "5"]) == 1
    *_, last = capsys.readouterr().out.splitlines()
    assert last.startswith("refused: --num-gpu-blocks-override 5: the KV cache holds 5 blocks, and a row of 256 tokens")
