"""bench throughput, latency, startup and sweep run on a tiny model, count their work and resume."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch
from PIL import Image

from engine.kernels.activation import Activation
from engine.kernels.gemm.pack import Placement
from engine.kernels.moe.pack import pack_experts
from mm.cache import ProcessorCache
from server import cli
from server.bench import attention, linear, moe, sample, startup, summary, sweep, timing
from server.bench.command import main, parse
from server.bench.options import ServeOptions
from server.bench.output import words_of
from server.bench.processes import Outcome
from server.bench.reply import Reply
from server.cli import build
from tests import tiny

FLAGS = ["--model", str(tiny.checkpoint("qwen3")), "--num-threads", "1", "--num-gpu-blocks-override", "256"]
FLAGS += ["--max-num-seqs", "4"]


def run(*words: str) -> int:
    return main(words, print, build)


def test_throughput_counts_tokens_and_steps(tmp_path, capsys):
    file = tmp_path / "out.json"
    asked = ["--num-prompts", "6", "--input-len", "8", "--output-len", "5", "--runs", "1", "--json", str(file)]
    assert run("throughput", *asked, *FLAGS) == 0
    found = json.loads(file.read_text())
    assert found["total_tokens_per_s"] == pytest.approx(found["output_tokens_per_s"] * 13 / 5)
    assert found["requests_per_s"] == pytest.approx(found["output_tokens_per_s"] / 5)
    assert 1 < found["rows_per_step"] <= 4, "four rows at a time"
    assert found["host_us_per_step"] > 0
    assert "output_tokens_per_s" in capsys.readouterr().out


def test_latency_has_times_for_each_batch_size(tmp_path):
    file = tmp_path / "out.json"
    asked = ["--batch-sizes", "1,3", "--input-len", "8", "--output-len", "4", "--runs", "2", "--warm-runs", "0"]
    assert run("latency", *asked, "--json", str(file), *FLAGS) == 0
    found = json.loads(file.read_text())
    for size in (1, 3):
        assert 0 < found[f"batch_{size}_ttft_ms_p50"] < found[f"batch_{size}_ms_p50"] <= found[f"batch_{size}_ms_p99"]
        assert found[f"batch_{size}_tpot_ms_p50"] * 3 < found[f"batch_{size}_ms_p99"]


def test_an_engine_that_cannot_start_is_reported_in_a_line(capsys):
    assert run("throughput", "--model", "/no/folder") == 1
    assert "/no/folder" in capsys.readouterr().err


def test_startup_reads_phases_from_the_log(monkeypatch):
    said = "... debug omniloop start: weights                  1.250 s\n... debug omniloop start: warm up   0.5 s\n"
    assert startup.PHASE.findall(said) == [("weights", "1.250"), ("warm up", "0.5")]
    starts = iter([{"ready": 9.0, "weights": 1.0}, {"ready": 3.0, "weights": 1.5}, {"ready": 5.0, "weights": 0.5}])
    monkeypatch.setattr(startup, "start", lambda words, cache, timeout: next(starts))
    found = startup.measure(startup.StartupOptions(runs=2), [])
    assert found == {"cold_ready_s": 9, "warm_ready_s": 4, "cold_weights_s": 1, "warm_weights_s": 1}


class Starting:
    """A double of a server's process; reading its output raises KeyboardInterrupt, as Ctrl-C at the start does."""

    killed = 0

    def __init__(self, *_: object, **__: object) -> None:
        self.stdout = self

    def __enter__(self) -> Starting:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __iter__(self) -> Starting:
        return self

    def __next__(self) -> str:
        raise KeyboardInterrupt

    def kill(self) -> None:
        Starting.killed += 1


def test_ctrl_c_during_a_start_leaves_no_server_and_no_timer(monkeypatch, capsys):
    monkeypatch.setattr(startup.subprocess, "Popen", Starting)
    assert cli.main(["bench", "startup", "--num-threads", "1"]) == 130
    assert capsys.readouterr().err == "omniloop: interrupted\n"
    assert Starting.killed == 1
    for timer in threading.enumerate():
        assert not isinstance(timer, threading.Timer) or timer.finished.is_set()


def test_media_has_times_for_what_the_model_takes(tmp_path, monkeypatch):
    caches = []

    class Counted(ProcessorCache):
        def __init__(self, capacity: int) -> None:
            super().__init__(capacity)
            caches.append(self)

    monkeypatch.setattr("mm.load.ProcessorCache", Counted)
    file = tmp_path / "out.json"
    asked = ["--image-size", "64x48", "--sound-seconds", "0.5", "--film-seconds", "0.5", "--film-size", "64x48"]
    flags = ["--num-threads", "1", "--num-gpu-blocks-override", "256", "--max-num-seqs", "2", "--runs", "1"]
    assert run("media", *asked, *flags, "--json", str(file)) == 0
    found = json.loads(file.read_text())
    for kind in ("image", "audio", "video"):
        assert found[f"{kind}_tokens"] > 0
        parts = ("render", "load", "load_again", "encoder", "first_token", "first_token_again")
        assert min(found[f"{kind}_{part}_ms"] for part in parts) > 0
        assert found[f"{kind}_encoder_ms"] < found[f"{kind}_first_token_ms"]
    assert sum(cache.hits for cache in caches) == 6, "two items of three kinds, each found once again"


def test_media_of_a_model_that_reads_text_only_is_refused(capsys):
    assert run("media", *FLAGS) == 1
    assert "takes text only" in capsys.readouterr().err


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Times a few calls only: tests need no steady median."""
    monkeypatch.setattr("server.bench.timing.ENOUGH_S", 0.0)
    monkeypatch.setattr("server.bench.timing.COPIED", {"cpu": 1 << 20})


def test_attention_is_compared_with_the_machines_rates(tmp_path):
    file = tmp_path / "out.json"
    asked = ["--batch", "2x1@64+1x24", "--heads", "4", "--kv-heads", "2", "--head-dim", "32"]
    asked += ["--device", "cpu", "--dtype", "float32"]
    assert run("attention", *asked, "--json", str(file)) == 0
    found = json.loads(file.read_text())
    assert (found["rows"], found["queries"]) == (3, 26)
    assert found["of_floor"] == pytest.approx(found["floor_us"] / found["us"])
    assert found["torch_over_ours"] == pytest.approx(found["torch_us"] / found["us"])


def test_sample_has_times_of_ours_and_of_torch_for_each_kind(tmp_path):
    file = tmp_path / "out.json"
    assert run("sample", "--rows", "2", "--vocab", "320", "--device", "cpu", "--json", str(file)) == 0
    found = json.loads(file.read_text())
    for name in sample.KINDS:
        assert found[f"2_{name}_us"] > 0
        assert found[f"2_{name}_torch_us"] > 0
    logits = sample.logits_of(3, 320, "cpu", torch.float32)
    for kind in sample.KINDS.values():
        assert sample.reference(kind, logits).flatten().tolist()
        sample.chooser(kind, logits)()  # the reference on a CPU runs
    assert (sample.reference(sample.Kind(1.0, top_k=1), logits).flatten() == logits.argmax(dim=-1)).all()


def test_linear_compares_every_form_with_the_floats(tmp_path, monkeypatch):
    monkeypatch.setattr(linear, "COLD", 1 << 18)
    monkeypatch.setattr(timing, "ENOUGH_S", 0.0)
    file = tmp_path / "out.json"
    sizes = ["--width", "64", "--depth", "256", "--device", "cpu"]
    assert run("linear", "--rows", "1,3", *sizes, "--json", str(file)) == 0
    found = json.loads(file.read_text())
    for name in ("bfloat16", "float32", *linear.CODES):
        assert found[f"3_{name}_gain"] == pytest.approx(found["3_bfloat16_us"] / found[f"3_{name}_us"])
        assert found[f"1_{name}_fraction"] > 0
    options = linear.LinearOptions(width=64, depth=256)
    for make in linear.forms(options, "cpu").values():
        weight = make(Placement(torch.bfloat16, "cpu"))
        assert torch.equal(linear.another(weight).dense(), weight.dense())


def test_moe_times_a_layers_parts_and_its_reference_computes_the_same(tmp_path):
    file = tmp_path / "out.json"
    sizes = ["--hidden", "64", "--width", "32", "--experts", "4", "--top-k", "2"]
    assert run("moe", "--rows", "1,6", *sizes, "--device", "cpu", "--json", str(file)) == 0
    found = json.loads(file.read_text())
    assert found["1_experts_touched"] == 2
    for rows in (1, 6):
        assert min(found[f"{rows}_{part}_us"] for part in ("route", "products", "sum", "torch_products")) > 0
    draw = torch.Generator().manual_seed(0)
    gate_up, down = ([torch.randn(*side, generator=draw) / 8 for _ in range(4)] for side in ((64, 64), (64, 32)))
    x, chosen = torch.randn(5, 64, generator=draw), torch.tensor([[0, 1], [2, 3], [1, 0], [3, 2], [0, 3]])
    first = pack_experts(gate_up, None, 4, Placement(torch.float32, "cpu"), gated=True)
    second = pack_experts(down, None, 4, Placement(torch.float32, "cpu"), gated=False)
    pairs = first.pairs(chosen)
    ours = second.of_pairs(first.of_tokens(x, pairs, Activation.SILU), pairs)
    torch.testing.assert_close(ours.view(5, 2, 64), moe.reference(x, chosen, gate_up, down), atol=1e-4, rtol=1e-4)
    assert run("moe", "--experts", "4", "--top-k", "5") == 2
    assert run("moe", "--form", "mxfp4", "--hidden", "64", "--width", "48") == 2


@pytest.mark.parametrize("form", get_args(get_type_hints(moe.MoeOptions)["form"])[1:])
def test_moe_times_experts_in_every_form(form, tmp_path):
    """The floor counts the bytes of codes and scales as the form stores them."""
    file = tmp_path / "out.json"
    sizes = ["--hidden", "128", "--width", "256", "--experts", "3", "--top-k", "2", "--rows", "2", "--form", form]
    assert run("moe", *sizes, "--device", "cpu", "--json", str(file)) == 0
    found = json.loads(file.read_text())
    held = found["2_products_us"] * found["2_products_of_floor"] * found["copy_gigabytes_per_s"] * 1e3
    bits = {"int4_128": 4, "e2m1_16": 4, "mxfp4": 4}.get(form, 8)
    codes = 3 * 128 * 256 * bits / 8 * found["2_experts_touched"]
    operations = 2 * 3 * 128 * 256 * 4 / found["product_gigaflops_per_s"] * found["copy_gigabytes_per_s"]
    assert codes <= held <= max(1.5 * codes, operations * 1.01)


def test_the_grammar_of_a_batch():
    assert attention.read_batch("2x1@64+24") == [attention.Row(1, 64)] * 2 + [attention.Row(24, 24)]
    for wrong in ("", "2x", "0x1", "1x8@4", "x"):
        with pytest.raises(ValueError, match="--batch"):
            attention.read_batch(wrong)


@pytest.mark.full
def test_startup_starts_a_server(tmp_path):
    file = tmp_path / "out.json"
    assert run("startup", "--runs", "1", "--json", str(file), *FLAGS) == 0
    found = json.loads(file.read_text())
    assert 0 < found["warm_imports_s"] < found["warm_ready_s"]


def test_a_sweep_runs_what_is_missing_and_draws_all(tmp_path, monkeypatch, capsys):
    plan = tmp_path / "plan.yaml"
    plan.write_text(
        "command: throughput\nflags: {runs: 1, num-threads: 1}\ngrid: {num-prompts: [1, 2], input-len: [8, 9]}\n"
    )
    ran = []

    def measure(plan, out, combination) -> bool:
        ran.append(combination)
        if combination == {"num-prompts": 2, "input-len": 9}:
            return False
        rate = {"output_tokens_per_s": 10.0 * combination["num-prompts"], "total_tokens_per_s": 7.0}
        sweep.file_of(out, combination).write_text(json.dumps(rate))
        return True

    monkeypatch.setattr(sweep, "measure", measure)
    words = ("sweep", "--plan", str(plan), "--out", str(tmp_path / "out"))
    assert run(*words) == 1
    said = capsys.readouterr()
    assert len(ran) == 4
    assert "failed: --num-prompts=2 --input-len=9" in said.err
    assert said.out.splitlines()[1].split() == ["1", "8", "10", "7", "-"]
    with Image.open(tmp_path / "out" / "sweep.png") as drawn:
        assert drawn.size == (1120, 680)
    ran.clear()
    assert run(*words) == 1
    assert ran == [{"num-prompts": 2, "input-len": 9}], "what has been measured is kept"
    last = tmp_path / "out" / "num-prompts=2 input-len=9.json"
    last.write_text('{"interrupted": true}')
    assert run(*words) == 1
    last.write_text("{}")
    assert run(*words) == 0


def test_the_plan_of_the_examples_names_flags_and_metrics_that_are_there():
    plan = sweep.read(str(Path(__file__).parents[3] / "examples" / "sweep.yaml"))
    words = words_of(plan.flags | plan.combinations[0])
    assert len(plan.combinations) == 8
    assert callable(parse([plan.command, *words], print, build))
    answer = Reply(0, 0, sent=1.0, first=2.0, last=4.0, end=5.0, gaps=[2.0], events=2, finish="stop")
    assert set(plan.metrics) <= summary.numbers(Outcome(1.0, [answer]), ServeOptions(), {}).keys()


def test_a_sweep_runs_the_command_in_a_process(tmp_path):
    plan = sweep.Plan("nothing", {"a": True}, {"b": [[1, 2]]}, ["m"])
    assert not sweep.measure(plan, Path(tmp_path), plan.combinations[0])
    assert words_of({"a": True, "b": [1, 2], "c": {"d": 1}}) == ["--a=true", "--b=[1, 2]", '--c={"d": 1}']


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("grid: {}", "must have command and grid"),
        ("command: serve\ngrid: {a: 1}", "grid must name flags, each with a list of values"),
        ("command: startup\ngrid: {a: [1]}", "name the metrics to show; startup has no usual ones"),
    ],
)
def test_a_wrong_plan_is_refused(tmp_path, capsys, text, said):
    plan = tmp_path / "plan.yaml"
    plan.write_text(text)
    assert run("sweep", "--plan", str(plan)) == 2
    assert said in capsys.readouterr().err
