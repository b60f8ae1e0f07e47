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

from server.render.load_tokenizer import load_tokenizer
from tests import tiny
from tests.server.conftest import config_of, maker, ready
from tests.server.live import listening

pytestmark = pytest.mark.asyncio(loop_scope="session")
HI = [{"role": "user", "content": "Hi"}]


def copied(tmp_path: Path, name: str = "qwen2") -> Path:
    """A tiny checkpoint that a test may change."""
    return Path(shutil.copytree(tiny.checkpoint(name), tmp_path / name))


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
