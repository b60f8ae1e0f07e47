"""A GGUF file served over HTTP: its chat template, its tokenizer, its quantised weights; files of a repository."""

from __future__ import annotations

import shutil

import gguf
import pytest

from engine.base.errors import ConfigError
from engine.weights.gguf import read_gguf
from server import cli
from server.app import make_app
from server.flags.config import Config, ModelFlags
from server.start.folders import hub_of, is_hub_name, located
from server.start.gguf import as_folder, chosen
from tests.quant import ggufs
from tests.server.asgi import Client
from tests.server.conftest import config_of, ready
from tests.server.fake_hub import FakeHub, asked_in_place_of_the_real


async def test_a_file_answers(tmp_path):
    path = str(ggufs.write(tmp_path / "tiny-Q4_K.gguf", "qwen3", "q4_k", tied=True))
    async with ready(config_of(model={"model": path, "num_threads": 1, "device": "cpu"})) as state:
        client = Client(make_app(state))
        assert (await client.get("/v1/models")).json()["data"][0]["id"] == path
        asked = {"messages": [{"role": "user", "content": "the inn"}], "max_tokens": 6, "temperature": 0}
        first, again = [(await client.post("/v1/chat/completions", json=asked)).json() for _ in range(2)]
        assert first["usage"]["completion_tokens"] > 0
        assert first["choices"][0]["message"]["content"] == again["choices"][0]["message"]["content"]
        shown = (await client.post("/tokenize", json=asked)).json()
        assert shown["tokens"][0] == state.tokenizer.id_of("<|start|>")
        assert shown["tokens"][-1] == state.tokenizer.id_of("<|end|>")


FILES = [
    "README.md",
    "Tiny-Q4_K_M.gguf",
    "Tiny-UD-Q4_K_M.gguf",
    "Tiny-Q8_0.gguf",
    "BF16/Tiny-BF16-00001-of-00002.gguf",
    "BF16/Tiny-BF16-00002-of-00002.gguf",
    "mmproj-F16.gguf",
    "imatrix_unsloth.gguf",
]


@pytest.mark.parametrize(
    ("quant", "files", "expected"),
    [
        ("Q8_0", FILES, [FILES[3]]),
        ("q8_0", FILES, [FILES[3]]),
        ("BF16", FILES, FILES[4:6]),
        ("UD-Q4_K_M", FILES, [FILES[2]]),
        ("Tiny-Q4_K_M", FILES, [FILES[1]]),
        ("Tiny-Q4_K_M.gguf", FILES, [FILES[1]]),
        ("", [FILES[1], FILES[3], FILES[6]], [FILES[1]]),
        ("", FILES[4:7], FILES[4:6]),
        ("", FILES, "several files match; the choices are Tiny-Q4_K_M, Tiny-UD-Q4_K_M; write org/tiny:QUANT"),
        ("Q4_K_M", FILES, "org/tiny:Q4_K_M: several files match"),
        ("Q5_K_M", FILES, "no file matches; the choices are Tiny-BF16, Tiny-Q4_K_M, Tiny-Q8_0, Tiny-UD-Q4_K_M;"),
        ("K_M", [FILES[1]], [FILES[1]]),
        ("4_K_M", [FILES[1]], "no file matches"),
        ("", ["a.txt"], "the choices are none"),
    ],
)
def test_the_file_is_chosen_by_the_end_of_its_name(quant, files, expected):
    if isinstance(expected, list):
        assert chosen("org/tiny", quant, files) == expected
        return
    with pytest.raises(ConfigError) as refused:
        chosen("org/tiny", quant, files)
    assert expected in str(refused.value)


def split(path, count=8):
    """The file's tensors in pieces of at most `count`, written by the gguf package."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(path.with_name("pieces.gguf"), "qwen3", split_max_tensors=count)
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture")):
            kinds = [*field.types, None][:2]
            writer.add_key_value(field.name, field.contents(), *kinds)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(path.parent.glob("pieces-*.gguf"))


def test_a_model_in_pieces_has_the_tensors_of_the_whole(tmp_path):
    whole = ggufs.write(tmp_path / "tiny-Q4_K.gguf", "qwen3", "q4_k", tied=True)
    pieces = split(whole)
    assert len(pieces) >= 3
    one, parts = read_gguf(whole), read_gguf(pieces[0])
    folder = as_folder(str(pieces[0]), tokenizer=True)
    for file in (parts, read_gguf(type(whole)(folder) / "model.gguf")):
        assert {*file.entries()} == {*one.entries()}
        with one.open() as left, file.open() as right:
            for name in one.entries():
                assert left.tensor(name).equal(right.tensor(name)), name
    with pytest.raises(ConfigError, match=r"is piece 2 of \d: name the first, pieces-00001-of-0000"):
        read_gguf(pieces[1])
    kept = pieces[1].read_bytes()
    shutil.copy(pieces[2], pieces[1])
    with pytest.raises(ConfigError, match=r"pieces-00002-of-\d+.gguf is not piece 2 of"):
        read_gguf(pieces[0])
    pieces[1].write_bytes(kept[:200])
    with pytest.raises(ConfigError, match="fetch it again"):
        read_gguf(pieces[0])
    pieces[1].unlink()
    with pytest.raises(ConfigError, match="there is no pieces-00002-of-"):
        read_gguf(pieces[0])


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A hub with a repository of two models: Q4_K_M, and Q8_0 in pieces."""
    folder = tmp_path / "repository"
    folder.mkdir()
    ggufs.write(folder / "Tiny-Q4_K_M.gguf", "qwen3", "q4_k", tied=True)
    pieces = split(ggufs.write(folder / "whole.gguf", "qwen3", "q8_0", tied=True))
    for at, piece in enumerate(pieces, 1):
        piece.rename(folder / f"Tiny-Q8_0-{at:05d}-of-{len(pieces):05d}.gguf")
    (folder / "whole.gguf").unlink()
    (folder / "mmproj-F16.gguf").write_bytes(b"not for us")
    with FakeHub({"org/tiny": folder}) as hub:
        asked_in_place_of_the_real(hub, monkeypatch, tmp_path / "cache")
        yield hub


def fetched(name, weights=True):
    config = Config(model=ModelFlags(model=name))
    return located(config, name, hub_of(config), weights)


async def test_a_repository_of_gguf_files_is_served_by_name(fake):
    assert is_hub_name("org/tiny:Q8_0")
    config = cli.parse(["-hf", "org/tiny:Q8_0"])[1]
    assert config.model_names == ("org/tiny:Q8_0",)
    async with ready(config_of(model={"model": "org/tiny:Q8_0", "num_threads": 1, "device": "cpu"})) as state:
        client = Client(make_app(state))
        asked = {"messages": [{"role": "user", "content": "the inn"}], "max_tokens": 4, "temperature": 0}
        reply = await client.post("/v1/chat/completions", json=asked)
        assert (reply.status, reply.json()["model"]) == (200, "org/tiny:Q8_0")
    assert {*fake.fetched()} == {file for file in fake.files("org/tiny") if "Q8_0" in file}


def test_one_model_is_fetched_once_and_found_without_the_hub(fake):
    with pytest.raises(ConfigError, match=r"its configuration is inside Tiny-Q4_K_M\.gguf, which is not on this"):
        fetched("org/tiny", weights=False)
    folder = fetched("org/tiny")
    assert read_gguf(type(fake.repositories["org/tiny"])(folder) / "model.gguf").architecture == "qwen3"
    assert fake.fetched() == ["Tiny-Q4_K_M.gguf"]
    fetched("org/tiny:Q4_K_M", weights=False)
    assert fake.fetched() == ["Tiny-Q4_K_M.gguf"]
    fake.down = True
    fetched("org/tiny:Q4_K_M")
    with pytest.raises(ConfigError, match="no file matches; the choices are Tiny-Q4_K_M"):
        fetched("org/tiny:Q5_K_M")
    fake.down = False
    with pytest.raises(ConfigError, match="no file matches; the choices are Tiny-Q4_K_M, Tiny-Q8_0"):
        fetched("org/tiny:Q5_K_M")
