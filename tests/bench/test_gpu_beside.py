"""gpu_beside on a tiny mixture: both engines decode alternately, and the ratio comes from the recorded times."""

import json

import pytest

from tests.bench import gpu_beside


def test_a_setting_is_compared_in_alternating_turns(tmp_path, capsys):
    flags = ["--setting", "return_routed_experts", "--cases", "tiny-sparse", "--device", "cpu", "--rows", "1,4"]
    flags += ["--context", "32", "--turns", "2", "--layers", "1", "--out", str(tmp_path)]
    assert gpu_beside.main(flags) == 0
    (kept,) = json.loads((tmp_path / gpu_beside.FILE).read_text()).values()
    assert {rows: len(times["on"]) for rows, times in kept["seconds"].items()} == {"1": 2, "4": 2}
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("tiny-sparse, return_routed_experts, 1 rows: ")
    assert "asked 1.01" in first
    assert "asked" not in second
    assert gpu_beside.ratio_of({"off": [1.0, 2.0, 4.0], "on": [2.0, 3.0, 4.0]}) == pytest.approx((1.5, 1.0, 2.0))
    assert gpu_beside.main([*flags[:2], "--cases", "tiny-sparse w5"]) == 1
