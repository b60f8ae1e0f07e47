"""gpu_pooling on tiny models: it prints every number that it is for."""

import pytest

from tests.bench import gpu_pooling


@pytest.mark.full
def test_an_embedder_and_a_reranker(capsys):
    flags = ["--device", "cpu", "--seconds", "0.2", "--threads", "2", "--queries", "20"]
    assert gpu_pooling.main(["--shape", "tiny-embedding,tiny-reranker", *flags]) == 0
    shown = capsys.readouterr().out
    for line in ("tiny-embedding: tok/s ", "tiny-embedding: query ms ", "tiny-reranker: rerank ms "):
        assert float(shown.partition(line)[2].partition(" ")[0].replace(",", "")) > 0
