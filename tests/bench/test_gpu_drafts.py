"""gpu_drafts on a tiny model: every engine starts and is measured; requirements are compared with the numbers."""

import json

import pytest

from tests.bench import gpu_drafts
from tests.bench.drafted_engines import KINDS, cases_of, inside
from tests.bench.gpu_drafts import asked


def test_requirements_are_compared_with_the_numbers():
    found = {
        "bf16": {"one": {"tokens/s": 100.0, "usual step, ms": 10.0, "usual step, tokens": 1}},
        "bf16 eagle3": {
            "one": {"tokens/s": 220.0, "usual step, ms": 12.0, "usual step, tokens": 4},
            "most": {"host, us": 90.0},
        },
        "bf16 replay": {"4 tokens": {"usual step, ms": 10.5, "usual step, tokens": 4}},
        "bf16 again": {"ready, s": 8.0, "reading the drafter, s": 0.0},
        "bf16 eagle3 again": {"ready, s": 11.5, "reading the drafter, s": 1.0},
    }
    lines = {one.what: one.line for one in asked(found)}
    assert lines["bf16, verify step of 4 tokens over a plain step"].endswith("1.050, asked at most 1.06: met")
    assert lines["bf16, one stream, EAGLE-3, over none"].endswith("2.200, asked at least 2.1: met")
    assert lines["host's work for a step of 256 rows, us"].endswith("90.000, asked at most 80: MISSED")
    assert lines["seconds to ready beyond those without"].endswith("2.500, asked at most 2: MISSED")
    assert lines["EAGLE-3 drafting, 3 drafts of one row, ms"].endswith("1.500, asked at most 1.1: MISSED")
    assert lines["FP8, one stream, DFlash, ms a token"].endswith("NOT MEASURED")
    assert {one.case for one in asked(found)} == set("12345678")


def test_every_requirement_has_its_engines():
    cases = {case for kind in KINDS.values() for case in cases_of(kind)}
    assert cases == set("12345678")


def smoke(tmp_path, monkeypatch, cases):
    def child(name, folders, args, path, _longest):
        assert inside(name, folders, args, path) == 0

    monkeypatch.setattr(gpu_drafts, "child", child)
    flags = ["--shape", "tiny", "--device", "cpu", "--cases", cases, "--every", "--out", str(tmp_path)]
    assert gpu_drafts.main(flags) == 0
    kept = json.loads((tmp_path / gpu_drafts.FILE).read_text())
    assert len(kept["asked"]) > 0
    assert not [line for line in kept["asked"] if "NOT MEASURED" in line]
    return kept["found"]


def test_one_case_runs_on_a_tiny_model(tmp_path, monkeypatch):
    found = smoke(tmp_path, monkeypatch, "8")
    assert all(of["ready, s"] > 0 for of in found.values())
    assert list(found) == [name for name in KINDS if "8" in KINDS[name].starts]


@pytest.mark.full
def test_all_cases_run_on_a_tiny_model(tmp_path, monkeypatch):
    found = smoke(tmp_path, monkeypatch, "1,2,3,4,5,6,7,8")
    assert list(found) == list(KINDS)
    assert found["bf16 eagle3"]["one"]["tokens a step"] > 2
    assert found["fp8 dflash"]["one"]["tokens a step"] > 3
    assert found["bf16 eagle3"]["most never right"]["tokens a step"] == 1
    assert found["fp8 replay"]["4 tokens"]["usual step, tokens"] == 4
