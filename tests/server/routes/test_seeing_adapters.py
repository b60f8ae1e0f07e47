"""Adapters of models that see, over HTTP: the answers of the checkpoint into which PEFT merged the adapter."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest

from server.app import make_app
from tests import tiny
from tests.mm.made import data_url, noise, picture
from tests.server.asgi import Client
from tests.server.conftest import config_of, ready
from tests.tiny_adapters import ATTENTION, adapted

pytestmark = pytest.mark.asyncio(loop_scope="session")
PICTURE = {"type": "image_url", "image_url": {"url": data_url(picture(noise(60, 90, 1), "PNG"), "image/png")}}
WORDS = {"type": "text", "text": "What is it?"}
MODULES = {  # an ordinary list, which fits the tower too; and one of the decoder only
    "paligemma": [[*ATTENTION, "linear"], ["gate_proj", "down_proj"]],
    "internvl": [[*ATTENTION, "fc1", "linear_1"], ["gate_proj", "down_proj"]],
}


async def answers(client: Client, model: str) -> list[Any]:
    """Tokens and log-probabilities of an answer about a picture, and of one without."""
    found = []
    for parts in ([PICTURE, WORDS], [WORDS]):
        body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 6, "temperature": 0, "logprobs": True}
        answer = await client.post("/v1/chat/completions", body | {"model": model})
        assert answer.status == 200, answer.content
        entries = answer.json()["choices"][0]["logprobs"]["content"]
        found.append([(each["bytes"], pytest.approx(each["logprob"], abs=1e-3)) for each in entries])
    return found


def flags(folder: Path, **lora: Any) -> Any:
    return config_of(model={"model": str(folder), "num_threads": 1}, server={"served_model_name": ("base",)}, lora=lora)


@pytest.mark.parametrize("name", MODULES)
async def test_pictures_are_seen_through_the_adapter(name, tmp_path):
    wanted = {}
    for number, modules in enumerate(MODULES[name]):
        model = adapted(name, tmp_path / str(number), number, r=4, target_modules=modules)
        merged = shutil.copytree(tiny.checkpoint(name), tmp_path / f"merged-{number}")
        (merged / "model.safetensors").unlink()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.merge_and_unload().save_pretrained(merged)
        async with ready(flags(merged)) as state:
            wanted[str(number)] = await answers(Client(make_app(state)), "base")
    modules = tuple(f"{number}={tmp_path / number}" for number in wanted)
    async with ready(flags(tiny.checkpoint(name), enable_lora=True, max_loras=2, lora_modules=modules)) as state:
        client = Client(make_app(state))
        base = await answers(client, "base")
        for number, want in wanted.items():
            assert await answers(client, number) == want
            assert await answers(client, number) == want, "rows of pictures are cached now"
            assert base != want
        assert await answers(client, "base") == base
