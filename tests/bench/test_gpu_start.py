"""gpu_start on a tiny mixture: it reads the files that it has written, also as FP8, and reports each start."""

import json

import pytest

from tests.bench import gpu_start
from tests.bench.gpu_start import GIB, Case


def test_starts_of_files_and_of_drawn_weights(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_start, "SHARD", 1 << 18)
    monkeypatch.setattr(gpu_start, "CHUNK", 1 << 16)

    def child(name, folder, args, _cache):
        return gpu_start.asyncio.run(gpu_start.start(Case.of(name), folder, args.device))

    monkeypatch.setattr(gpu_start, "child", child)
    names = ["tiny-sparse", "tiny-sparse fp8-blocks", "tiny-sparse files", "tiny-sparse fp8 online"]
    flags = ["--cases", ",".join(names), "--device", "cpu", "--layers", "2", "--starts", "2", "--out", str(tmp_path)]
    assert gpu_start.main(flags) == 0
    kept = json.loads((tmp_path / gpu_start.FILE).read_text())
    assert list(kept) == names
    assert [report["bytes"] > 1 << 20 for report in kept.values()] == [False, False, True, True]
    shown = capsys.readouterr().out
    for line in ("fp8-blocks, ready, over", "fp8 online, reading, over", "files: ", "files, start 2: "):
        assert f"\ntiny-sparse {line}" in shown


def test_aims_are_compared_with_the_last_start():
    seen = {
        "8b files": [{"ready_s": 15.0, "read_s": 2.0, "phases": {"kernels": 10.0}}],
        "8b": [{"ready_s": 9.0, "read_s": 2.0}],
        "8b fp8 online": [{"ready_s": 9.0, "read_s": 2.5, "phases": {"kernels": 2.0}, "held": GIB, "peak": 3 * GIB}],
        "8b fp8": [{"ready_s": 20.0, "read_s": 2.0}, {"ready_s": 8.0, "read_s": 2.0}],
        "30b-a3b": [{"ready_s": 26.0, "read_s": 2.0}],
    }
    lines = gpu_start.asked(seen, {"8b files": 4_000_000_000})
    assert [line.rpartition(" ")[2] for line in lines] == ["MISSED", "met", "MISSED", "MISSED", "met", "memory"]
    assert lines[-1] == "8b files: 2.00 GB/s of files in memory"


@pytest.mark.parametrize("shape", ["8b", "30b-a3b", "gpt-oss-20b"])
def test_shapes_with_fewer_layers_keep_the_rest(shape):
    config = gpu_start.with_layers(gpu_start.SHAPES[shape], 3)
    assert config["num_hidden_layers"] == 3
    assert config["hidden_size"] == gpu_start.SHAPES[shape]["hidden_size"]
    assert len(config.get("layer_types", [0] * 3)) == 3
