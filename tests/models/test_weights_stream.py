"""Streaming weights to a device that copies late: the bits equal the memory map's, or loading fails with one line."""

import io
import logging
import os
import threading

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.base.errors import ConfigError
from engine.kernels.gemm.pack import Placement
from engine.models.registry import build_model, load_model_config
from engine.weights import load as loading
from engine.weights import stream as streaming
from engine.weights.files import open_checkpoint
from engine.weights.load import load_weights, weight_bytes
from engine.weights.pieces import Pieces
from engine.weights.progress import ProgressLine
from engine.weights.table import expand
from tests import tiny
from tests.models.late import LateUpload

DTYPES = ("float32", "bfloat16", "float16")


@pytest.fixture
def late(monkeypatch):
    """load_weights streams to a late device; `late(chunk_bytes, threads)` sets the sizes."""
    upload = LateUpload()
    monkeypatch.setattr(loading, "upload_for", lambda device: upload)

    def set_sizes(chunk_bytes, threads=2):
        def stream(*args):
            streaming.stream(*args, chunk_bytes=chunk_bytes, threads=threads)

        monkeypatch.setattr(loading, "stream", stream)
        return upload

    return set_sizes


def filled(folder, activations=torch.float32, **options):
    config = load_model_config(folder)
    model = build_model(config, activations)
    with torch.inference_mode():
        load_weights(model, str(folder), **options)
    return model


def tensors_of(part):
    """All tensors of a part by name, including those of its packed weights."""
    found = {}
    for owner in (part, getattr(part, "weight", None), getattr(getattr(part, "head", None), "weight", None)):
        for name in getattr(owner, "__slots__", ()):
            value = getattr(owner, name, None)
            if isinstance(value, torch.Tensor):
                found[f"{type(owner).__name__}.{name}"] = value
    return found


def assert_same_bits(got, want):
    count = 0
    parts = {id(place.part): place for place in expand(want.weight_table(), want).values()}.values()
    others = {id(place.part): place for place in expand(got.weight_table(), got).values()}.values()
    for ours, theirs in zip(others, parts, strict=True):
        mine, expected = tensors_of(ours.part), tensors_of(theirs.part)
        assert mine.keys() == expected.keys()
        for name, tensor in expected.items():
            assert mine[name].dtype == tensor.dtype
            assert mine[name].shape == tensor.shape
            assert torch.equal(mine[name].view(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name
            count += 1
    assert count


@pytest.mark.parametrize("name", sorted(tiny.CHECKPOINTS))
def test_every_architecture_has_the_bits_of_its_files(name, late, monkeypatch):
    upload = late(chunk_bytes=4096 + 12)
    got = filled(tiny.checkpoint(name))
    assert upload.chunks > 20
    assert upload.pinned_bytes <= 4 * (4096 + 12)
    assert upload.finished
    monkeypatch.setattr(loading, "upload_for", lambda device: None)
    assert_same_bits(got, filled(tiny.checkpoint(name)))


@pytest.mark.parametrize("saved", DTYPES)
@pytest.mark.parametrize("activations", [torch.float32, torch.bfloat16])
def test_every_dtype_of_files_and_activations(saved, activations, late, tmp_path, monkeypatch):
    folder = tiny.save(tiny.qwen2(), tmp_path / saved, dtype=saved, max_shard_size="60KB")
    late(chunk_bytes=3000, threads=3)
    got = filled(folder, activations)
    monkeypatch.setattr(loading, "upload_for", lambda device: None)
    assert_same_bits(got, filled(folder, activations))


def test_pieces_saved_in_different_dtypes(late, tmp_path, monkeypatch):
    folder = tiny.save(tiny.llama(), tmp_path / "mixed")
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    for name in ("q_proj", "v_proj"):
        key = f"model.layers.1.self_attn.{name}.weight"
        tensors[key] = tensors[key].to(torch.bfloat16)
    save_file(tensors, path)
    late(chunk_bytes=5000)
    got = filled(folder)
    monkeypatch.setattr(loading, "upload_for", lambda device: None)
    assert_same_bits(got, filled(folder))


@pytest.mark.parametrize("chunk_bytes", [64, 1 << 20])
def test_one_reader_and_any_size_of_chunk(chunk_bytes, late, monkeypatch):
    upload = late(chunk_bytes, threads=1)
    upload._delay_s = 0
    got = filled(tiny.checkpoint("qwen3"))
    monkeypatch.setattr(loading, "upload_for", lambda device: None)
    assert_same_bits(got, filled(tiny.checkpoint("qwen3")))


def test_joined_pieces_are_neighbours_on_the_device():
    model = build_model(load_model_config(tiny.checkpoint("llama")), torch.float32)
    places = expand(model.weight_table(), model)
    pieces = Pieces(places, dict.fromkeys(places, torch.bfloat16), Placement(torch.float32, "cpu"))
    q, k, v = (pieces.room(f"layers.0.self_attn.{name}_proj.weight") for name in "qkv")
    assert k.data_ptr() == q.data_ptr() + 2 * q.numel()
    assert v.data_ptr() == k.data_ptr() + 2 * k.numel()
    gate, up = (pieces.room(f"layers.0.mlp.{name}_proj.weight") for name in ("gate", "up"))
    assert up.data_ptr() == gate.data_ptr() + 2 * gate.numel()


def test_tensors_that_are_not_wanted_are_not_read():
    shards = open_checkpoint(tiny.checkpoint("llama"))
    wanted = {name: name for name in shards[0].tensors if "layers.1" in name}
    made = list(streaming.chunks(shards, wanted, 10_000))
    assert {span.name for chunk in made for span in chunk.spans} == set(wanted)
    assert sum(chunk.size for chunk in made) == sum(shards[0].tensors[name].num_bytes for name in wanted)
    assert all(chunk.size == sum(span.size for span in chunk.spans) <= 10_000 for chunk in made)


def threads_that_read():
    return [thread for thread in threading.enumerate() if thread.name.startswith("omniloop-weights")]


def test_a_file_that_shrinks_while_it_is_read_is_one_line(late, tmp_path, monkeypatch):
    folder = tiny.save(tiny.llama(), tmp_path / "short")
    late(chunk_bytes=4096)
    path = folder / "model.safetensors"
    real = loading.open_checkpoint

    def then_cut(where):
        shards = real(where)
        os.truncate(path, path.stat().st_size - 5000)
        return shards

    monkeypatch.setattr(loading, "open_checkpoint", then_cut)
    with pytest.raises(ConfigError, match=r"model.safetensors has become shorter") as error:
        filled(folder)
    assert "\n" not in str(error.value)
    assert not threads_that_read()


def test_a_file_that_cannot_be_read_is_one_line(late, tmp_path, monkeypatch):
    folder = tiny.save(tiny.llama(), tmp_path / "gone", max_shard_size="60KB")
    late(chunk_bytes=4096)
    real = loading.open_checkpoint

    def then_gone(where):
        shards = real(where)
        shards[1].path.unlink()
        return shards

    monkeypatch.setattr(loading, "open_checkpoint", then_gone)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        filled(folder)
    assert not threads_that_read()


def test_a_truncated_shard_is_refused_before_anything_is_read(late, tmp_path):
    folder = tiny.save(tiny.llama(), tmp_path / "cut")
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    upload = late(chunk_bytes=4096)
    with pytest.raises(ConfigError, match=r"its range is \d+\.\.\d+ of \d+"):
        filled(folder)
    assert upload.chunks == 0


def test_a_copy_that_fails_ends_the_loading(late):
    upload = late(chunk_bytes=4096)
    upload.send = lambda copies: (_ for _ in ()).throw(RuntimeError("CUDA error: unspecified launch failure"))
    with pytest.raises(RuntimeError, match="launch failure"):
        filled(tiny.checkpoint("llama"))
    assert not threads_that_read()


def test_progress_counts_every_byte_once_in_any_order(late):
    late(chunk_bytes=3000, threads=3)
    seen = []
    model = filled(tiny.checkpoint("qwen3"), progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1] == (weight_bytes(model), weight_bytes(model))


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_shows_a_bar_that_ends_with_a_line():
    out = Terminal()
    line = ProgressLine(out=out)
    for done in range(0, 16 * 10**9 + 1, 10**9):
        line(done, 16 * 10**9)
    text = out.getvalue()
    assert text.startswith("\rweights [ ")
    assert "#] 16.0 of 16.0 GB" in text
    assert text.endswith(" GB/s\n")
    assert text.count("\r") <= 3, "no more than ten times a second"


def test_a_log_gets_one_line_and_small_models_none(caplog):
    out = io.StringIO()
    with caplog.at_level(logging.INFO, "omniloop.engine"):
        for total in (1 << 20, 10**9):
            line = ProgressLine(out=out)
            for done in (0, total // 2, total):
                line(done, total)
    assert out.getvalue() == ""
    assert [record.getMessage()[:20] for record in caplog.records] == ["weights: 1.00 GB in "]


def test_streamed_weights_that_are_no_numbers_are_found_by_name(late, tmp_path):
    late(4096)
    folder = tmp_path / "broken"
    folder.mkdir()
    tensors = load_file(tiny.checkpoint("llama") / "model.safetensors")
    tensors["model.layers.2.self_attn.v_proj.weight"][0, 0] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    model = build_model(load_model_config(tiny.checkpoint("llama")), torch.float32)
    with pytest.raises(ConfigError, match=r"broken: layers\.2\.self_attn\.v_proj\.weight: the weights hold NaN"):
        load_weights(model, str(folder))
