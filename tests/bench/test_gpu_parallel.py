"""gpu_parallel: what must hold is compared with what was measured, and a case that fails leaves the others' lines."""

import json

import pytest

import engine.run.start
from tests.bench import gpu_parallel
from tests.bench.gpu_parallel import Case, compared, judged
from tests.bench.rank_engine import RankEngine
from tests.bench.shapes import SHAPES, write_folder
from tests.engine.stand_in_accelerator import StandInAccelerator

ONE = [{"what": "1 rows at 576", "ms": 6.0}, {"what": "idle between steps", "us": 2.0}, {"what": "start", "s": 20.0}]
TWO = [{"what": "1 rows at 576", "ms": 3.6}, {"what": "idle between steps", "us": 5.5}]


def test_two_ranks_are_compared_with_one():
    found = compared({"8b on 1": ONE, "8b on 2": TWO, "exchange": [{"kilobytes": 8, "microseconds": 2.5}]})
    assert [(line["what"], line.get("ratio", line.get("us")), line.get("met")) for line in found] == [
        ("8b, 1 rows at 576, 2 to 1", 0.6, True),
        ("8b, idle between steps, further rank", 3.5, False),
        ("8b, 1 row: the exchanges' share of a step", 0.05, None),
    ]


def test_a_line_is_compared_with_its_must():
    assert judged("llama-70b fp8 on 2", {"what": "1 rows at 576", "ms": 14.9})["met"] is False
    assert "must" not in judged("8b on 2", {"what": "1 rows at 576", "ms": 3.0})


def test_names_of_cases():
    assert Case.of("llama-70b fp8 on 2") == Case("llama-70b", "fp8", False, 2)
    assert Case.of("30b-a3b experts on 2").settings["ranks"].whole_experts
    for name in ("8b", "9b on 2", "8b on two"):
        with pytest.raises(SystemExit, match="SHAPE"):
            Case.of(name)
    assert all(Case.of(name) for name in f"{gpu_parallel.CASES},{gpu_parallel.FURTHER}".split(",")[1:])


@pytest.mark.full
async def test_launches_and_gaps_of_ranks_are_measured(monkeypatch, tmp_path):
    opened = []

    def open_accelerator(_device):
        opened.append(StandInAccelerator(opened[0] if opened else None))
        return opened[-1]

    monkeypatch.setattr(engine.run.start, "open_accelerator", open_accelerator)
    folder, settings = write_folder(tmp_path, SHAPES["tiny"]), Case("tiny", "", False, 2).settings
    found = [line async for line in RankEngine(str(folder), "cpu", **settings).measure(["host", "1x96"], 8)]
    assert [line["what"] for line in found] == [
        "start", "launch of a graph on all ranks", "idle between steps", "1 rows at 96",
    ]  # fmt: skip
    assert all(line["us"] > 0 for line in found if "us" in line and line["us"] is not None)


@pytest.mark.full
def test_a_failing_case_leaves_the_lines_of_others(tmp_path):
    flags = ["--cases", "exchange,tiny on 2", "--device", "cpu", "--gpus", "9", "--out", str(tmp_path)]
    assert gpu_parallel.main(flags) == 1
    seen = json.loads((tmp_path / gpu_parallel.FILE).read_text())
    assert seen["exchange"]["lines"][0]["what"] == "failed"
    assert [line["what"] for line in seen["tiny on 2"]["lines"] if "ms" in line] == [
        "1 rows at 96", "prompt of 200", "4 rows at 96",
    ]  # fmt: skip
