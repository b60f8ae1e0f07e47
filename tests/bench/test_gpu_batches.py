"""gpu_batches: the ratios come from the recorded numbers; its long form runs on a tiny model."""

import json

import pytest

from tests.bench import gpu_batches

FOUND = {
    "alone": {"ttft_ms": 20.0, "itl_ms": 6.0}, "beside": {"ttft_ms": 28.0, "itl_ms": 7.2}, "batch": 950.0,
    "engine": 1000.0, "batch_ran_to_the_end": True,
}  # fmt: skip


def test_each_ratio_is_compared_with_what_is_asked(capsys):
    assert gpu_batches.show("8b", FOUND)
    assert not gpu_batches.show("8b", FOUND | {"batch": 949.0})
    assert not gpu_batches.show("8b", FOUND | {"beside": {"ttft_ms": 30.1, "itl_ms": 7.2}})
    assert not gpu_batches.show("8b", FOUND | {"batch_ran_to_the_end": False})
    shown = capsys.readouterr().out
    assert "8b, 4 streams, ttft_ms p50: 20.00 -> 28.00, 1.400 times; asked 1.5: met" in shown
    assert "raise --lines" in shown


def test_lines_are_different_prompts_of_one_length():
    found = [json.loads(line)["body"] for line in gpu_batches.lines(3, (5, 2), 100, 1).splitlines()]
    assert [len(body["prompt"]) for body in found] == [5, 5, 5]
    assert len({tuple(body["prompt"]) for body in found}) == 3


@pytest.mark.full
def test_a_tiny_model_is_measured(tmp_path):
    flags = ["--shape", "tiny", "--device", "cpu", "--lines", "300", "--requests", "40", "--input-len", "40"]
    flags += ["--output-len", "24", "--num-gpu-blocks-override", "512", "--max-num-seqs", "16"]
    flags += ["--max-num-batched-tokens", "64", "--num-threads", "1", "--out", str(tmp_path)]
    assert gpu_batches.main(flags) in (0, 1)
    (seen,) = json.loads((tmp_path / gpu_batches.FILE).read_text()).values()
    assert seen["batch"] > 0
    assert seen["lines_beside"] > 0
