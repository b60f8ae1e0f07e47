"""gpu_rank_answers: which answers differ, and what is allowed; on a CPU no answer depends on the rows of a step."""

import argparse
import json

import pytest

from tests.bench import gpu_rank_answers
from tests.bench.gpu_rank_answers import FILE, answers, compared
from tests.bench.shapes import SHAPES, write_folder

SAME = [[1, 2], [3, 4], [5, 6], [7, 8]]


def changed(count):
    """Answers of which the first `count` differ."""
    return [[9, 9]] * count + SAME[count:]


@pytest.mark.parametrize(("rows", "ranks", "met"), [(2, 3, True), (2, 4, False), (0, 0, True), (0, 1, False)])
def test_ranks_may_change_half_as_many_answers_again_as_rows(rows, ranks, met):
    line = compared(2, {"one": {"alone": SAME, "together": changed(rows)}, "several": {"alone": changed(ranks)}})
    assert (line["differ between 1 and 4 rows"], line["differ between 1 and 2 ranks"]) == (rows, ranks)
    assert line["met"] == met


def test_deterministic_ranks_change_none():
    found = {"one": {"alone": SAME, "together": changed(2)}, "several": {"alone": changed(1)}}
    exact = {"alone": changed(3), "together": changed(3), "cached": changed(3)}
    assert compared(2, {**found, "deterministic": exact})["met"]
    line = compared(2, {**found, "deterministic": {**exact, "cached": changed(2)}})
    assert (line["deterministic answers that differ"], line["met"]) == (1, False)


async def test_answers_of_two_simulated_ranks(tmp_path):
    args = argparse.Namespace(shape="tiny", answers=6, tokens=5, device="cpu")
    folder = str(write_folder(tmp_path, SHAPES["tiny"]))
    found = await answers(folder, args, ranks=2, deterministic=True)
    assert set(found) == {"alone", "together", "cached"}
    assert found["alone"] == found["together"] == found["cached"]
    assert [len(each) for each in found["alone"]] == [5] * 6
    assert len(set(map(tuple, found["alone"]))) > 1


@pytest.mark.full
def test_each_engine_is_a_process(tmp_path):
    flags = ["--shape", "tiny", "--device", "cpu", "--answers", "4", "--tokens", "4", "--deterministic"]
    assert gpu_rank_answers.main([*flags, "--out", str(tmp_path)]) == 0
    (line,) = json.loads((tmp_path / FILE).read_text()).values()
    assert (line["answers"], line["met"], line["deterministic answers that differ"]) == (4, True, 0)
