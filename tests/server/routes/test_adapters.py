"""Adapters by name over HTTP: PEFT's tokens on every route, loads and unloads while the server runs, and refusals."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import pytest_asyncio
import torch

from engine.lora.config import CONFIG
from engine.weights.files import ADAPTER
from server.app import make_app
from server.state import AppState
from tests import tiny
from tests.server.asgi import Client
from tests.server.conftest import config_of, quiet, ready, until
from tests.tiny_adapters import ATTENTION, DENSE, adapted

pytestmark = pytest.mark.asyncio(loop_scope="session")
NAME = "qwen3"
IDS = [5, 40, 41, 42, 7, 99, 100, 3]
SETTINGS: dict[str, dict[str, Any]] = {
    "tone": {"r": 3, "target_modules": DENSE},
    "style": {"r": 8, "target_modules": ATTENTION, "use_rslora": True, "rank_pattern": {"q_proj": 5}},
    "spare": {"r": 4, "target_modules": ["down_proj"]},
}


class World(NamedTuple):
    """A server with adapters, its client, and PEFT's tokens by adapter; "" is the base."""

    client: Client
    state: AppState
    folder: Path
    tokens: dict[str, list[int]]


def greedy(model: Any, count: int = 12) -> list[int]:
    ids = torch.tensor([IDS])
    with torch.inference_mode():
        model.generation_config.eos_token_id = None
        made = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return made[0, len(IDS) :].tolist()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    folder = tmp_path_factory.mktemp("adapters")
    tokens = {"": greedy(tiny.reference(tiny.checkpoint(NAME)))}
    for seed, (name, settings) in enumerate(SETTINGS.items()):
        tokens[name] = greedy(adapted(NAME, folder / name, seed, **settings))
    assert len({str(each) for each in tokens.values()}) == len(tokens), "adapters that change nothing show nothing"
    lora = {
        "enable_lora": True, "lora_modules": (f"tone={folder / 'tone'}",), "max_loras": 2, "max_cpu_loras": 2,
        "lora_dir": str(folder), "enable_runtime_lora": True,
    }  # fmt: skip
    model = {"model": str(tiny.checkpoint(NAME)), "num_threads": 1}
    config = config_of(model=model, lora=lora, server={"host": "127.0.0.1", "allowed_hosts": ("test",)})
    async with ready(config) as state:
        yield World(Client(make_app(state)), state, folder, tokens)


@pytest_asyncio.fixture(autouse=True, loop_scope="session")
async def names(world: World) -> AsyncIterator[None]:
    """After each test the server has the adapter of its start only, and no request holds anything."""
    yield
    for each in world.state.adapters.names:
        if each.name != "tone":
            world.state.adapters.remove(each.name)
    held = await quiet(world.state)
    assert held["adapter_rows"] == 0


async def complete(world: World, model: str | None, **fields: Any) -> Any:
    body = {"prompt": IDS, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True, **fields}
    return await world.client.post("/v1/completions", body | ({} if model is None else {"model": model}))


async def tokens_of(world: World, model: str | None, **fields: Any) -> list[int]:
    answer = await complete(world, model, **fields)
    assert answer.status == 200, answer.content.decode()
    return answer.json()["choices"][0]["token_ids"]


async def test_a_name_gives_the_adapters_tokens_and_the_base_its_own(world):
    base = world.state.names[0]
    assert await tokens_of(world, "tone") == world.tokens["tone"]
    assert await tokens_of(world, base) == world.tokens[""]
    assert await tokens_of(world, None) == world.tokens[""]
    assert await tokens_of(world, f"{base}:tone") == world.tokens["tone"]
    assert (await complete(world, "tone")).json()["model"] == "tone"


async def test_an_unknown_name_is_looked_for_in_the_folder(world):
    assert await tokens_of(world, "style") == world.tokens["style"]
    answer = await complete(world, "nothing")
    assert answer.status == 404
    assert "tone" in answer.json()["error"]["message"]
    assert (await complete(world, "../tone")).status == 404


async def load(world: World, name: str, path: str, route: str = "/v1/load_lora_adapter", **more: Any) -> Any:
    return await world.client.post(route, {"lora_name": name, "lora_path": path, **more})


async def unload(world: World, name: str) -> Any:
    return await world.client.post("/v1/unload_lora_adapter", {"lora_name": name})


async def test_loads_and_unloads_answer_in_vllms_words(world):
    answer = await load(world, "mine", "style")
    assert (answer.status, answer.content.decode()) == (200, "Success: LoRA adapter 'mine' added successfully.")
    assert await tokens_of(world, "mine") == world.tokens["style"]
    answer = await unload(world, "mine")
    assert (answer.status, answer.content.decode()) == (200, "Success: LoRA adapter 'mine' removed successfully.")
    assert (await complete(world, "mine")).status == 404
    assert (await unload(world, "mine")).status == 404


async def test_a_wrong_hash_is_named_and_the_log_has_the_adapters_name(world, caplog):
    answer = await load(world, "mine", "style", sha256="x")
    assert answer.json()["error"]["message"] == "sha256 must have 64 hexadecimal digits"
    with caplog.at_level("INFO", "omniloop.access"):
        await load(world, "mine", "style")
        await unload(world, "mine")
    assert caplog.text.count("adapter=mine") == 2


async def test_sglangs_routes_list_what_is_loaded(world):
    answer = await load(world, "mine", str(world.folder / "spare"), "/load_lora_adapter")
    assert answer.json() == {"success": True, "loaded_adapters": {"mine": "spare", "tone": "tone"}}
    assert await tokens_of(world, "mine") == world.tokens["spare"]
    answer = await world.client.post("/unload_lora_adapter", {"lora_name": "mine"})
    assert answer.json() == {"success": True, "loaded_adapters": {"tone": "tone"}}


async def test_a_name_has_new_weights_only_after_a_load_in_place(world):
    assert (await load(world, "mine", "style")).status == 200
    assert await tokens_of(world, "mine") == world.tokens["style"]
    answer = await load(world, "mine", "spare")
    assert answer.status == 400
    assert "load_inplace" in answer.json()["error"]["message"]
    assert await tokens_of(world, "mine") == world.tokens["style"]
    assert (await load(world, "mine", "spare", load_inplace=True)).status == 200
    assert await tokens_of(world, "mine") == world.tokens["spare"], "cached blocks belong to the earlier weights"


async def test_running_answers_keep_the_weights_that_they_began_with(world):
    assert (await load(world, "mine", "style")).status == 200
    body = {"prompt": IDS, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    world.state.engine.pause()
    call = world.client.call("POST", "/v1/completions", body | {"model": "mine"})
    running = asyncio.ensure_future(call.finish())
    await until(lambda: world.state.engine.ledger()["streams"])
    assert (await load(world, "mine", "spare", load_inplace=True)).status == 200
    assert (await unload(world, "mine")).status == 200
    world.state.engine.resume()
    assert (await running).json()["choices"][0]["token_ids"] == world.tokens["style"]


async def test_s34_bad_loads_change_nothing(world, tmp_path):
    async def refused(status: int, *words: str, name: str = "mine", **fields: Any) -> None:
        answer = await load(world, name, **fields)
        assert answer.status == status, answer.content.decode()
        message = answer.json()["error"]["message"]
        assert all(word in message for word in words), message
        assert str(world.folder.parent) not in message, "no path of the machine"

    base = world.state.names[0]
    broken = shutil.copytree(world.folder / "style", world.folder / "broken")
    (broken / CONFIG).write_text(json.dumps(json.loads((broken / CONFIG).read_text()) | {"use_dora": True}))
    large = shutil.copytree(world.folder / "style", world.folder / "large")
    (large / CONFIG).write_text(json.dumps(json.loads((large / CONFIG).read_text()) | {"r": 400}))
    try:
        await refused(404, path="none")
        await refused(404, path="../" + world.folder.name + "/style")
        await refused(404, path="/etc")
        await refused(400, "use_dora", path="broken")
        await refused(400, "shape", path="large")
        await refused(400, "base model", name=base, path="style")
        await refused(400, "characters", name="a b", path="style")
        await refused(400, "sha256", path="style", sha256="0" * 64)
        await refused(400, "sha256", path="style", sha256="x")
        await refused(400, "load_inplace", name="tone", path="style")
    finally:
        shutil.rmtree(broken)
        shutil.rmtree(large)
    assert (await world.client.post("/v1/load_lora_adapter", {"lora_name": "x"})).status == 400
    assert [each.name for each in world.state.adapters.names] == ["tone"]
    assert await tokens_of(world, "tone") == world.tokens["tone"]
    digest = hashlib.sha256((world.folder / "style" / ADAPTER).read_bytes()).hexdigest()
    assert (await load(world, "mine", "style", sha256=digest.upper())).status == 200


async def test_models_lists_adapters_with_root_and_parent(world):
    base = world.state.names[0]
    assert (await load(world, "mine", "style")).status == 200
    listed = (await world.client.get("/v1/models")).json()["data"]
    assert [(each["id"], each["root"], each["parent"]) for each in listed] == [
        (base, base, None), ("mine", "style", base), ("tone", "tone", base),
    ]  # fmt: skip
    assert (await world.client.get("/v1/models/mine")).json()["parent"] == base


async def test_every_generating_route_takes_the_name(world):
    """The adapter's answer differs from the base's, and the answer names the adapter."""
    chat = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0, "max_tokens": 8}
    routes = {
        "/v1/chat/completions": chat,
        "/v1/completions": {"prompt": "hello", "temperature": 0, "max_tokens": 8},
        "/v1/messages": chat,
        "/v1/responses": {"input": "hello", "temperature": 0, "max_output_tokens": 8},
        "/inference/v1/generate": {"token_ids": IDS, "sampling_params": {"temperature": 0, "max_tokens": 8}},
        "/completion": {"prompt": "hello", "temperature": 0, "n_predict": 8},
        "/chat/completions": chat,
        "/api/chat": {**chat, "stream": False, "options": {"temperature": 0, "num_predict": 8}},
        "/api/generate": {"prompt": "hello", "stream": False, "options": {"temperature": 0, "num_predict": 8}},
        "/generate": {"text": "hello", "sampling_params": {"temperature": 0, "max_new_tokens": 8}},
        "/v1/score": {"query": "hello", "items": ["a"], "label_token_ids": [5, 6]},
    }

    def content(answer: Any) -> str:
        found = answer.json()
        keys = ("choices", "content", "output", "message", "response", "text", "scores")
        return json.dumps([found.get(key) for key in keys]).replace(found.get("id", " "), "")

    for path, body in routes.items():
        base = await world.client.post(path, body)
        answer = await world.client.post(path, body | {"model": "tone"})
        assert answer.status == base.status == 200, (path, answer.content.decode())
        assert answer.json().get("model", "tone") == "tone", path
        texts = [re.sub(r'"id": "[^"]*"', "", content(each)) for each in (base, answer)]
        assert texts[0] != texts[1], path
        assert (await world.client.post(path, body | {"model": "nothing"})).status == 404, path


async def test_names_are_known_where_nothing_is_generated(world):
    for path, body in {"/tokenize": {"prompt": "a"}, "/v1/messages/count_tokens": {"messages": []}}.items():
        fields = body if path == "/tokenize" else {"messages": [{"role": "user", "content": "a"}]}
        assert (await world.client.post(path, fields | {"model": "tone"})).status == 200, path


async def test_rows_of_several_adapters_and_the_base_in_one_batch(world):
    """Three adapters over two places: each answer is the one of PEFT."""
    wanted = ["tone", "", "style", "spare", "tone", "style", "", "spare"] * 3
    answers = await asyncio.gather(*(tokens_of(world, name or None) for name in wanted))
    assert answers == [world.tokens[name] for name in wanted]


async def test_metrics_count_places_loads_and_tokens(world):
    await tokens_of(world, "style")
    await complete(world, "style")
    await load(world, "mine", "none")
    text = (await world.client.get("/metrics")).content.decode()
    assert 'vllm:lora_requests_info{max_lora="2",running_lora_adapters="",waiting_lora_adapters=""}' in text
    for line in (
        "lora_places_used ",
        "lora_parked 0.0",
        "lora_swaps_total ",
        "lora_swap_seconds_total ",
        "lora_adapters 2.0",
    ):
        assert f"\n{line}" in text, line
    assert float(re.search(r'lora_generation_tokens_total{lora_name="style"} (\S+)', text)[1]) >= 24
    assert float(re.search(r"\nlora_load_failures_total (\S+)", text)[1]) >= 1


async def test_s34_adapters_are_for_operators_where_others_can_reach_the_server(world):
    config = dataclasses.replace(
        world.state.config,
        server=dataclasses.replace(world.state.config.server, host="0.0.0.0", admin_api_key="secret"),
    )
    other = AppState(config)
    other.pool.shutdown()
    for name in ("engine", "adapters", "pool", "places"):
        setattr(other, name, getattr(world.state, name))
    other.phase = "ready"
    client = Client(make_app(other))
    body = {"lora_name": "mine", "lora_path": "style"}
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/load_lora_adapter", "/unload_lora_adapter"):
        answer = await client.post(path, body)
        assert (answer.status, answer.json()["error"]["reason"]) == (403, "admin_only")
    assert (await client.post("/v1/load_lora_adapter", body, headers={"authorization": "Bearer secret"})).status == 200


async def test_a_server_without_the_flags_has_no_such_routes_or_names(tiny_client):
    assert (await tiny_client.post("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "b"})).status == 404
    assert (await tiny_client.complete(model="tone")).status == 404
