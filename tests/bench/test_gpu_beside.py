"""gpu_beside on a tiny mixture: both engines decode by turns, and the ratio is of the times that it keeps."""

import json

import pytest

from tests.bench import gpu_beside
from tests.bench.shapes import QWEN3_30B_A3B, SHAPES, TINY

OF_EXPERTS = ("architectures", "model_type", "num_experts_per_tok", "norm_topk_prob", "decoder_sparse_step")


def test_a_setting_is_compared_by_turns(tmp_path, monkeypatch, capsys):
    sparse = {**TINY, **{key: QWEN3_30B_A3B[key] for key in OF_EXPERTS}, "num_experts": 12, "moe_intermediate_size": 64}
    monkeypatch.setitem(SHAPES, "tiny", {**sparse, "num_hidden_layers": 3})
    flags = ["--setting", "return_routed_experts", "--cases", "tiny", "--device", "cpu", "--rows", "1,4"]
    flags += ["--context", "32", "--turns", "2", "--layers", "2", "--out", str(tmp_path)]
    assert gpu_beside.main(flags) == 0
    (kept,) = json.loads((tmp_path / gpu_beside.FILE).read_text()).values()
    assert {rows: len(times["on"]) for rows, times in kept["seconds"].items()} == {"1": 2, "4": 2}
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("tiny, return_routed_experts, 1 rows: ")
    assert "asked 1.01" in first
    assert "asked" not in second
    assert gpu_beside.ratio_of({"off": [1.0, 2.0, 4.0], "on": [2.0, 3.0, 4.0]}) == pytest.approx((1.5, 1.0, 2.0))
    assert gpu_beside.main([*flags[:2], "--cases", "tiny w5"]) == 1
