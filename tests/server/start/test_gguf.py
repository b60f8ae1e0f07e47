"""A GGUF file served over HTTP: its chat template, its tokenizer, its quantised weights."""

from __future__ import annotations

from server.app import make_app
from tests.quant import ggufs
from tests.server.asgi import Client
from tests.server.conftest import config_of, ready


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
