"""gpu_parallel: what must hold is compared with what was measured, and a case that fails leaves the others' lines."""

import json
import threading

import pytest

import engine.run.start
from tests.bench import gpu_exchange, gpu_parallel
from tests.bench.cards import Cards
from tests.bench.rank_cases import FURTHER, TABLES, Case, compared, judged
from tests.bench.rank_engine import RankEngine
from tests.bench.shapes import SHAPES, write_folder
from tests.engine.stand_in_accelerator import StandInAccelerator

ONE = [{"what": "1 rows at 576", "ms": 6.0}, {"what": "idle between steps", "us": 2.0}, {"what": "start", "s": 20.0}]
TWO = [{"what": "1 rows at 576", "ms": 3.6}, {"what": "idle between steps", "us": 5.5}]
FOUR = [{"what": "1 rows at 576", "ms": 2.4}, {"what": "launch of a graph on all ranks", "us": 30.0}]


def test_several_ranks_are_compared_with_one():
    launch = {"what": "launch of a graph on all ranks", "us": 6.0}
    seen = {"8b on 1": [*ONE, launch], "8b on 2": TWO, "8b on 4": FOUR}
    found = compared({**seen, "exchange on 2": [{"kilobytes": 8, "microseconds": 2.5}]})
    assert [(line["what"], line.get("ratio", line.get("us")), line.get("met")) for line in found] == [
        ("8b, 1 rows at 576, 2 to 1", 0.6, True),
        ("8b, idle between steps, 2 ranks, further rank", 3.5, False),
        ("8b, 1 row on 2: the exchanges' share of a step", 0.05, None),
        ("8b, 1 rows at 576, 4 to 1", 0.4, True),
        ("8b, launch of a graph on all ranks, 4 ranks, further rank", 8.0, True),
    ]


def test_answers_of_ranks_are_compared_with_those_of_rows():
    one = {"what": "answers", "alone": ["a", "b", "c", "d"], "together": ["a", "b", "c", "x"]}
    found = compared({"answers on 1": [one], "answers on 4": [{**one, "alone": ["y", "z", "c", "d"]}]})
    assert [(line["count"], line.get("must"), line.get("met")) for line in found] == [(1, None, None), (2, 1.5, False)]


def test_a_line_is_compared_with_its_must():
    assert judged("llama-70b fp8 on 2", {"what": "1 rows at 576", "ms": 14.9})["met"] is False
    assert judged("235b fp8-blocks on 4", {"what": "1 rows at 576", "ms": 5.1})["met"] is True
    assert "must" not in judged("8b on 2", {"what": "1 rows at 576", "ms": 3.0})


def test_limits_of_an_exchange_are_those_of_its_gpus():
    line = {"kilobytes": 64, "microseconds": 5.0, "right": True}
    assert gpu_exchange.judged({**line, "gpus": 2})["met"] is False
    assert gpu_exchange.judged({**line, "gpus": 4})["must"] is None
    assert gpu_exchange.judged({**line, "gpus": 4, "kilobytes": 32})["met"] is True
    assert gpu_exchange.judged({**line, "gpus": 8, "right": False})["met"] is False


def test_names_of_cases():
    assert Case.of("llama-70b fp8 on 2") == Case("llama-70b", "fp8", False, 2)
    assert Case.of("30b-a3b experts on 2").settings["ranks"].whole_experts
    for name in ("8b", "9b on 2", "8b on two"):
        with pytest.raises(SystemExit, match="SHAPE"):
            Case.of(name)
    with pytest.raises(SystemExit, match="--gpus is 2"):
        gpu_parallel.main(["--cases", "8b on 4"])
    for gpus, table in TABLES.items():
        assert all(Case.of(name).ranks <= gpus for name in f"{table},{FURTHER}".split(","))


def test_a_case_waits_for_enough_free_gpus():
    cards = Cards(4)
    one, two = cards.take(1), cards.take(2)
    assert (one, two) == ([0], [1, 2])
    with pytest.raises(ValueError, match="there are 4"):
        cards.take(5)
    later: list[list[int]] = []
    waiting = threading.Thread(target=lambda: later.append(cards.take(3)))
    waiting.start()
    with cards.giving_back(one):
        assert not later
    with cards.giving_back(two) as environment:
        assert environment["CUDA_VISIBLE_DEVICES"] == "1,2"
    waiting.join()
    assert later == [[0, 1, 2]]


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
    cases = "exchange on 2,tiny on 2,answers on 1,answers on 2,chaos on 2,tiny files on 2"
    assert gpu_parallel.main(["--cases", cases, "--device", "cpu", "--gpus", "4", "--out", str(tmp_path)]) == 1
    seen = json.loads((tmp_path / gpu_parallel.FILE).read_text())
    assert seen["exchange on 2"]["lines"][0]["what"] == "failed"
    assert [line["what"] for line in seen["tiny on 2"]["lines"] if "ms" in line] == [
        "1 rows at 96", "prompt of 200", "4 rows at 96",
    ]  # fmt: skip
    assert [line["count"] for line in seen["compared"]["lines"] if "count" in line] == [0, 0]
    assert seen["chaos on 2"]["lines"][0]["met"]
    assert any(line["what"] == "load" for line in seen["tiny files on 2"]["lines"])
