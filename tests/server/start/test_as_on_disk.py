"""Checkpoints as people have them on disk, served over a socket."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.base.errors import ConfigError
from engine.weights.files import open_checkpoint
from server.render.load_tokenizer import load_tokenizer
from tests import tiny
from tests.server.conftest import config_of, maker, ready
from tests.server.live import listening

pytestmark = pytest.mark.asyncio(loop_scope="session")
HI = [{"role": "user", "content": "Hi"}]


def copied(tmp_path: Path, name: str = "qwen2") -> Path:
    """A tiny checkpoint that a test may change."""
    return Path(shutil.copytree(tiny.checkpoint(name), tmp_path / name, dirs_exist_ok=True))


def rewrite(path: Path, **fields: Any) -> None:
    """Set fields of a JSON file; None removes one."""
    values = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({key: value for key, value in {**values, **fields}.items() if value is not None}))


@asynccontextmanager
async def served(folder: Path, **groups: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with ready(config_of(model={"model": str(folder), "num_threads": 1}, **groups)) as state:
        client = maker(state)()
        async with listening(client) as url, httpx.AsyncClient(base_url=url, timeout=60) as http:
            http.state = state  # type: ignore[attr-defined]
            yield http


def in_config(folder: Path) -> None:
    rewrite(folder / "tokenizer_config.json", eos_token="<|im_start|>")


def in_the_map(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text('{"eos_token": null}')
    rewrite(folder / "special_tokens_map.json", eos_token={"content": "<|im_start|>", "normalized": False})


@pytest.mark.parametrize("write", [in_config, in_the_map])
async def test_an_end_token_that_only_the_tokenizer_names_ends_an_answer(tmp_path, write: Callable[[Path], None]):
    folder = copied(tmp_path)
    rewrite(folder / "config.json", eos_token_id=tiny.IDS["<|endoftext|>"])
    rewrite(folder / "generation_config.json", eos_token_id=tiny.IDS["<|endoftext|>"])
    write(folder)
    async with served(folder) as http:
        for name in ("<|im_start|>", "<|endoftext|>"):
            body = {"messages": HI, "max_tokens": 5, "logit_bias": {str(tiny.IDS[name]): 100}}
            reply = (await http.post("/v1/chat/completions", json=body)).json()
            assert reply["choices"][0]["finish_reason"] == "stop"
            assert reply["choices"][0]["stop_reason"] is None
            assert reply["choices"][0]["message"]["content"] in ("", None)
            assert reply["usage"]["completion_tokens"] == 1
        body["ignore_eos"] = True
        assert (await http.post("/v1/chat/completions", json=body)).json()["usage"]["completion_tokens"] == 5


async def test_a_tokenizer_of_several_files_is_served(tmp_path):
    folder = copied(tmp_path)
    text = "the cat and 😀 <|im_end|>"
    want = load_tokenizer(folder).encode(text)
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"], ensure_ascii=False))
    pairs = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(pairs) + "\n")
    (folder / "added_tokens.json").write_text(json.dumps(tiny.IDS))
    rewrite(folder / "tokenizer_config.json", tokenizer_class="GPT2Tokenizer")
    (folder / "tokenizer.json").unlink()
    async with served(folder) as http:
        reply = await http.post("/tokenize", json={"prompt": text, "add_special_tokens": False})
        assert reply.json()["tokens"] == want
        reply = await http.post("/v1/chat/completions", json={"messages": HI, "max_tokens": 4})
        assert reply.status_code == 200, reply.text


def one_numbered(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")


def another_name(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "Qwen2-tuned.safetensors")


def shards_without_index(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    for number in (1, 2):
        part = {name: tensors[name] for name in names[number - 1 :: 2]}
        save_file(part, folder / f"model-0000{number}-of-00002.safetensors", metadata={"format": "pt"})


async def first_token(http: httpx.AsyncClient) -> str:
    reply = await http.post("/v1/completions", json={"prompt": "the cat", "max_tokens": 4, "temperature": 0})
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["text"]


async def test_weights_without_an_index_are_the_same_model(tmp_path):
    texts = set()
    for change in (None, one_numbered, another_name, shards_without_index):
        folder = copied(tmp_path / (change.__name__ if change else "whole"))
        if change is not None:
            change(folder)
        async with served(folder) as http:
            texts.add(await first_token(http))
    assert len(texts) == 1


async def test_incomplete_or_ambiguous_weights_are_refused(tmp_path):
    folder = copied(tmp_path)
    shards_without_index(folder)
    first, second = (folder / f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    held = second.read_bytes()
    second.unlink()
    with pytest.raises(ConfigError, match=r"lacks model-00002-of-00002.safetensors of 2 numbered files"):
        open_checkpoint(folder)
    second.write_bytes(held)
    (folder / "copy.safetensors").write_bytes(held)
    with pytest.raises(ConfigError, match=r"both hold .*, and no model.safetensors.index.json says which"):
        open_checkpoint(folder)
    (folder / "copy.safetensors").rename(folder / "other-00001-of-00002.safetensors")
    with pytest.raises(ConfigError, match="holds several checkpoints"):
        open_checkpoint(folder)
    for path in folder.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(ConfigError, match="holds no weights"):
        open_checkpoint(folder)
    assert first != second


async def test_sampling_defaults_beyond_a_requests_bounds_are_clamped(tmp_path, caplog):
    folder = copied(tmp_path)
    beyond = {"top_k": 100_000, "temperature": 3.5, "repetition_penalty": 2.5, "top_p": 1.5, "do_sample": True}
    rewrite(folder / "generation_config.json", **beyond)
    with caplog.at_level("INFO", "omniloop"):
        async with served(folder) as http:
            assert http.state.defaults | {"temperature": 2.0, "repetition_penalty": 2.0} == http.state.defaults
            assert (http.state.defaults["top_k"], http.state.defaults["top_p"]) == (0, 1.0)
            await first_token(http)
    assert "generation_config.json: top_k=100000 is used as 0" in caplog.text
    assert "generation_config.json: temperature=3.5 is used as 2.0" in caplog.text
