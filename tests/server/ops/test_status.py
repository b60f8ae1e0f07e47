"""The status line: one for every ten seconds with work, with consistent numbers; and the lines at the start."""

from __future__ import annotations

import dataclasses
import logging
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.base.config import EngineConfig
from engine.cache.tokens import FullSpec
from engine.run import summary as start_summary
from engine.step.sizes import Sizes
from server.ops.logs import log_startup
from server.ops.status import StatusLine, Totals, line
from tests.server.asgi import LENGTH

SIZES = Sizes(
    max_rows=256, max_tokens=2048, max_slots=1280, max_model_len=4096, max_chunk=2048, block_size=16, encoder_rows=16384
)
LAYOUT: Any = SimpleNamespace(specs=[], block_bytes=1 << 20, blocks_for=lambda length, chunk: length // 16)


@pytest.mark.asyncio(loop_scope="session")
async def test_a_line_is_written_where_there_was_work_and_only_there(client, caplog):
    state = client.state
    state.engine.on_step = state.metrics.step
    status = StatusLine(state)
    with caplog.at_level(logging.INFO, "omniloop.status"):
        await client.chat("one two", **LENGTH)
        status.write()
        status.write()
    (record,) = (record for record in caplog.records if record.name == "omniloop.status")  # asyncio logs slow callbacks
    form = r"running \d+, waiting 0; [\d,]+ tokens/s, prompts [\d,]+ tokens/s; step \d+\.\d ms; KV cache \d+\.\d %"
    assert re.match(form, record.getMessage())


@pytest.mark.asyncio(loop_scope="session")
async def test_the_timer_goes_on_until_it_is_stopped(client, monkeypatch):
    monkeypatch.setattr("server.ops.status.INTERVAL_S", 0.0)
    status = StatusLine(client.state)
    written = []
    monkeypatch.setattr(StatusLine, "write", lambda self: written.append(self))
    status.tick()
    first = status.timer
    assert written == [status]
    status.stop()
    assert first is not None
    assert first.cancelled()


def test_the_line_has_rates_over_the_time_between():
    stats = SimpleNamespace(running=12, waiting=3, kv_usage=0.31)
    state: Any = SimpleNamespace(engine=SimpleNamespace(stats=stats))
    before = Totals(at=0, steps=0, generated=0, prompts=0, queries=0, hits=0, preemptions=0, step_s=0)
    now = Totals(at=10, steps=1000, generated=8120, prompts=12400, queries=100, hits=42, preemptions=2, step_s=9.4)
    assert line(state, before, now) == (
        "running 12, waiting 3; 812 tokens/s, prompts 1,240 tokens/s; step 9.4 ms; "
        "KV cache 31.0 %, prefix cache hits 42.0 %; 2 preempted"
    )
    assert line(state, now, dataclasses.replace(now, at=20)) == (
        "running 12, waiting 3; 0 tokens/s, prompts 0 tokens/s; KV cache 31.0 %"
    )


def summary(monkeypatch: pytest.MonkeyPatch, device: str, computed: torch.dtype, **chosen: Any) -> list[str]:
    monkeypatch.setattr(start_summary, "weight_bytes", lambda model: 16 << 30)
    monkeypatch.setattr(start_summary, "target", lambda: SimpleNamespace(arch="sm_90"))
    told = SimpleNamespace(architecture="LlamaForCausalLM", torch_dtype=torch.bfloat16, max_position=8192)
    model: Any = SimpleNamespace(config=told, dtype=computed, device=device)
    return list(start_summary.summary(EngineConfig(model="x", **chosen), model, SIZES, LAYOUT, 1024))


def test_the_start_logs_what_was_chosen_by_rule(monkeypatch):
    model, steps, cache, graphs = summary(monkeypatch, "cuda:0", torch.bfloat16)
    assert model == "model: LlamaForCausalLM in bfloat16 (as saved) on cuda:0 (sm_90), weights of 16.00 GiB"
    assert steps == "steps: up to 256 rows (the default on accelerators) and 2,048 tokens (the default on accelerators)"
    assert cache == (
        "KV cache: 1,024 blocks of 16 tokens, 1.00 GiB (from free memory and what rows can need), "
        "4.0 contexts of 4,096 tokens (the KV cache's memory); prefix caching on"
    )
    assert re.match(r"graphs: \d+ of decode steps to 256 rows \(1, 2, 4 and eights\), \d+ with prompts to ", graphs)


def test_the_start_names_the_flags_that_chose(monkeypatch):
    chosen = {"dtype": "float32", "max_num_seqs": 256, "max_model_len": 4096, "num_gpu_blocks_override": 1024}
    model, steps, cache, _ = summary(monkeypatch, "cpu", torch.float32, **chosen, num_threads=2)
    assert "in float32 (--dtype) on the CPU" in model
    assert model.endswith("(--num-threads)")
    assert "256 rows (--max-num-seqs)" in steps
    assert "(--num-gpu-blocks-override)" in cache
    assert "(--max-model-len)" in cache
    *_, graphs = summary(monkeypatch, "cuda:0", torch.float32, enforce_eager=True)
    assert "--enforce-eager" in graphs


def test_the_start_logs_the_number_formats_of_keys_and_values(monkeypatch):
    codes = [FullSpec(2, 64, torch.float8_e4m3fn)] * 3 + [FullSpec(2, 64, torch.bfloat16)]
    monkeypatch.setattr(LAYOUT, "specs", codes)
    _, _, cache, _ = summary(monkeypatch, "cuda:0", torch.bfloat16, kv_cache_dtype="fp8")
    told = "prefix caching on; fp8_e4m3 with a scale per token and head (3 layers), bfloat16 (1 layers)"
    assert cache.endswith(told + " (--kv-cache-dtype)")
    _, _, cache, _ = summary(monkeypatch, "cuda:0", torch.bfloat16)
    assert cache.endswith(told + " (the checkpoint was made for it)")


def test_the_last_line_of_the_start_has_its_longest_phases(caplog):
    with caplog.at_level(logging.INFO, "omniloop"):
        log_startup({"engine": 3.0, "weights": 1.5, "config": 0.1, "imports": 1.25, "tokenizer": 0.5, "bind": 0}, 3.2)
    (record,) = caplog.records
    told = "start: ready after 3.20 s; weights 1.50 s, imports 1.25 s, tokenizer 0.50 s, config 0.10 s"
    assert record.getMessage() == told
