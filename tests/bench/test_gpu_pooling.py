"""gpu_pooling on tiny models: it prints all of its numbers."""

import json

import pytest

from tests.bench import gpu_pooling


@pytest.mark.full
def test_an_embedder_and_a_reranker(capsys, tmp_path):
    flags = ["--device", "cpu", "--seconds", "0.2", "--threads", "2", "--queries", "20", "--out", str(tmp_path)]
    assert gpu_pooling.main(["--shape", "tiny-embedding,tiny-reranker", *flags]) == 0
    written = json.loads((tmp_path / "gpu_pooling.json").read_text())
    assert {shape: sorted(seen) for shape, seen in written.items()} == {
        "tiny-embedding": ["query ms", "tok/s"],
        "tiny-reranker": ["rerank ms"],
    }
    shown = capsys.readouterr().out
    for line in ("tiny-embedding: tok/s ", "tiny-embedding: query ms ", "tiny-reranker: rerank ms "):
        assert float(shown.partition(line)[2].partition(" ")[0].replace(",", "")) > 0
