"""gpu_drafts_more on small shapes: every engine starts and is measured, and is compared with the one without drafts."""

import json

import pytest
import torch

import engine.step.parts.draft_model
import engine.weights.load
from tests.bench import gpu_drafts_more
from tests.bench.drafted_more import LANES, config_of, equal_tokens, inside, resembling
from tests.bench.gpu_drafts_more import CASES, ratios


def test_every_engine_follows_the_one_that_it_is_compared_with():
    earlier = dict[str, str]()
    for name, lane in LANES.items():
        assert not lane.base or earlier[lane.base] == lane.case
        earlier[name] = lane.case
    assert CASES == ["9", "10", "11", "12", "13", "13b", "14", "14b"]


def test_rates_and_verify_steps_are_compared_with_those_without_drafts():
    base = {"tokens/s": 100.0, "usual step, ms": 10.0, "usual step, tokens": 1}
    found = {
        "qwen-27b-fp8": {"1 stream": base},
        "qwen-27b-fp8 replay": {"step of 4 tokens": {"usual step, ms": 12.0, "usual step, tokens": 4}},
        "qwen-27b-fp8 mtp 3": {"1 stream": {"tokens/s": 250.0}, "16 streams": {"tokens/s": 900.0}},
    }
    assert ratios(found) == [
        "case 14b: qwen-27b-fp8 replay, step of 4 tokens, over a plain step: 1.200",
        "case 14b: qwen-27b-fp8 mtp 3, 1 stream, tokens/s over none: 2.500",
    ]


def test_tokens_are_equal_up_to_the_first_difference():
    assert [equal_tokens([1, 2, 3], other) for other in ([1, 2, 3], [1, 5, 3], [4, 2, 3])] == [3, 1, 0]


def test_the_draft_model_has_the_weights_of_the_target_with_noise(monkeypatch):
    drawn = dict[str, torch.Tensor]()

    def load(kind):
        for name in ("layers.0.mlp.down_proj.weight", "norm.weight"):
            drawn[f"{kind} {name}"] = engine.weights.load.draw(name, torch.empty(64, 64 if "mlp" in name else 1), 0)

    monkeypatch.setattr(engine.step.parts.draft_model, "load_drafter", load)
    with resembling(0.2, config_of("0.6b", tiny=True)):
        load("target")
        engine.step.parts.draft_model.load_drafter("drafter")
    target, drafter = (drawn[f"{kind} layers.0.mlp.down_proj.weight"] for kind in ("target", "drafter"))
    assert torch.corrcoef(torch.stack([target.flatten(), drafter.flatten()]))[0, 1] == pytest.approx(0.98, abs=0.01)
    assert torch.std(drafter) == pytest.approx(0.02, rel=0.05)
    assert drawn["target norm.weight"].mean() > 10


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_all_engines_of_a_case_run_on_small_shapes(case, tmp_path, monkeypatch):
    def child(name, folders, args, path, _longest):
        assert inside(name, folders, args, path) == 0

    monkeypatch.setattr(gpu_drafts_more, "child", child)
    flags = ["--tiny", "--device", "cpu", "--cases", case, "--answers", "4", "--tokens", "16", "--out", str(tmp_path)]
    assert gpu_drafts_more.main(flags) == 0
    report = json.loads((tmp_path / f"gpu_drafts_more_{case}.json").read_text())
    assert list(report["found"]) == [name for name, lane in LANES.items() if lane.case == case]
    if case in ("13", "13b"):
        differences = [
            value for found in report["found"].values() for value in found.values() if "differ" in str(value)
        ]
        assert [value["differ"] for value in differences] == [0] * 5
        assert all(found.get("drafts", {"tried": 1})["tried"] > 0 for found in report["found"].values())
    elif case == "12":
        assert all(found["temperature 0.0"]["tokens a step"] > 1.5 for found in report["found"].values())
    else:
        based = [lane for lane in LANES.values() if lane.case == case and lane.base]
        assert len(report["ratios"]) == sum(len(lane.measures) for lane in based)
