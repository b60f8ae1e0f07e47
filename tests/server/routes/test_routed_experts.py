"""return_routed_experts on its three routes: arrays of prompt and choices, in answers and at the end of streams."""

from __future__ import annotations

import base64
import logging

import numpy as np
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from server.app import make_app
from server.ops import expert_watch
from server.ops.status import StatusLine
from tests import tiny
from tests.engine.test_routed_experts import check
from tests.server.asgi import Client
from tests.server.conftest import config_of, quiet, ready

pytestmark = pytest.mark.asyncio(loop_scope="session")
NAME = "qwen3_moe"
PROMPT = [7, 5, 9, 30, 31, 32, 33, 60, 61, 62, 63, 64, 65, 66, 67, 68, 69, 70]
ASKED = {"return_routed_experts": True, "return_token_ids": True, "max_tokens": 7, "ignore_eos": True}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def sparse():
    model = {"model": str(tiny.checkpoint(NAME)), "num_threads": 1}
    async with ready(config_of(model=model, cache={"enable_return_routed_experts": True})) as state:
        client = Client(make_app(state))
        client.state = state  # type: ignore[attr-defined]
        yield client
        held = await quiet(state)
        assert held["late_extras"] == held["slots"] == held["used"] == 0


def array(field: dict) -> np.ndarray:
    assert field["dtype"] == "uint8"
    return np.frombuffer(base64.b64decode(field["data"]), np.uint8).reshape(field["shape"])


def compare(prompt: list[int], answer: list[int], of_prompt: dict, of_answer: dict) -> None:
    """Each token of prompt and answer has a row, equal to transformers'."""
    first, second = array(of_prompt), array(of_answer)
    assert (len(first), len(second)) == (len(prompt), len(answer))
    check(NAME, np.array(prompt), answer, np.concatenate([first, second]))


async def posted(client: Client, path: str, body: dict):
    reply = await client.post(path, body)
    assert reply.status == 200, reply.content
    return reply


async def test_completions_have_arrays_of_prompts_and_choices(sparse):
    body = {"prompt": [PROMPT, PROMPT[:5]], "n": 2, "temperature": 1.0, "seed": 4, **ASKED}
    choices = (await posted(sparse, "/v1/completions", body)).json()["choices"]
    for choice in choices:
        first = choices[choice["index"] // 2 * 2]
        assert ("prompt_routed_experts" in choice) == (choice is first)
        compare(
            choice["prompt_token_ids"], choice["token_ids"], first["prompt_routed_experts"], choice["routed_experts"]
        )
    assert choices[0]["token_ids"] != choices[1]["token_ids"]


async def test_a_conversation_and_tokens_have_the_same_arrays(sparse):
    body = {"messages": [{"role": "user", "content": "a word"}], "temperature": 0, **ASKED}
    chat = (await posted(sparse, "/v1/chat/completions", body)).json()
    (choice,) = chat["choices"]
    compare(chat["prompt_token_ids"], choice["token_ids"], chat["prompt_routed_experts"], choice["routed_experts"])
    made = (await posted(sparse, "/v1/chat/completions/render", body)).json()
    tokens = (await posted(sparse, "/inference/v1/generate", made)).json()
    assert tokens["prompt_routed_experts"] == chat["prompt_routed_experts"]
    assert tokens["choices"][0]["routed_experts"] == choice["routed_experts"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/inference/v1/generate"])
async def test_a_stream_ends_with_the_arrays_of_the_whole_answer(sparse, path):
    body = {"/v1/completions": {"prompt": PROMPT}, "/inference/v1/generate": {"token_ids": PROMPT}}.get(path)
    body = body or {"messages": [{"role": "user", "content": "a word"}]}
    fields = {"temperature": 0, **ASKED}
    body |= {"sampling_params": fields} if path.endswith("generate") else fields
    whole = (await posted(sparse, path, body)).json()
    events = (await posted(sparse, path, {**body, "stream": True})).events()
    assert events[-1] == "[DONE]"
    told = [(event, choice) for event in events[:-1] for choice in event["choices"]]
    assert ["routed_experts" in choice for _, choice in told] == [False] * (len(told) - 1) + [True]
    event, last = told[-1]
    assert last["finish_reason"] == "length"
    assert last["routed_experts"] == whole["choices"][0]["routed_experts"]
    of_prompt = {**whole["choices"][0], **whole}["prompt_routed_experts"]
    assert {**event, **last}["prompt_routed_experts"] == of_prompt


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_ends_at_a_stop_string_has_its_tokens_experts(sparse, stream):
    letters = sparse.state.tokenizer.encode("abcdefgh", False)
    body = {"prompt": PROMPT, "temperature": 1.0, "seed": 3, "allowed_token_ids": letters, **ASKED}
    free = (await posted(sparse, "/v1/completions", body)).json()
    stop = free["choices"][0]["text"][:3]
    body |= {"stop": [stop, *"cdh"], "stream": stream, "n": 2}
    reply = await posted(sparse, "/v1/completions", body)
    choices = [choice for event in reply.events()[:-1] for choice in event["choices"]] if stream else None
    choices = choices or reply.json()["choices"]
    for index in range(2):
        mine = [choice for choice in choices if choice["index"] == index]
        ids = [token for choice in mine for token in choice["token_ids"]]
        assert len(ids) < 7
        assert mine[-1]["finish_reason"] == "stop"
        assert mine[-1]["stop_reason"] in body["stop"]
        assert sum("routed_experts" in choice for choice in mine) == 1
        first = next(choice for choice in choices if "prompt_routed_experts" in choice)
        compare(PROMPT, ids, first["prompt_routed_experts"], mine[-1]["routed_experts"])


async def test_a_prompt_alone_has_its_experts(sparse):
    body = {"prompt": PROMPT, **ASKED, "max_tokens": 0, "echo": True}
    (choice,) = (await posted(sparse, "/v1/completions", body)).json()["choices"]
    compare(PROMPT, [], choice["prompt_routed_experts"], choice["routed_experts"])


async def test_routed_experts_are_returned_only_on_request(sparse):
    choices = (await posted(sparse, "/v1/completions", {"prompt": PROMPT, "max_tokens": 2})).json()["choices"]
    assert not [name for name in choices[0] if "routed" in name]


async def test_generate_takes_the_field_outside_sampling_params(sparse):
    sampling = {"temperature": 0, "max_tokens": 7, "ignore_eos": True}
    inside = {**sampling, "return_routed_experts": True}
    body = {"token_ids": PROMPT, "sampling_params": sampling}
    want = (await posted(sparse, "/inference/v1/generate", {**body, "sampling_params": inside})).json()
    got = (await posted(sparse, "/inference/v1/generate", {**body, "return_routed_experts": True})).json()
    assert want["prompt_routed_experts"] == got["prompt_routed_experts"]
    assert want["choices"][0]["routed_experts"] == got["choices"][0]["routed_experts"]
    body = {"token_ids": PROMPT, "sampling_params": inside, "return_routed_experts": False}
    assert "prompt_routed_experts" not in (await posted(sparse, "/inference/v1/generate", body)).json()


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
async def test_routes_without_a_place_for_experts_refuse_by_name(sparse, path):
    body = {"/v1/responses": {"input": "a word", "max_output_tokens": 2}}.get(path)
    body = body or {"messages": [{"role": "user", "content": "a word"}], "max_tokens": 2}
    reply = await sparse.post(path, {**body, "return_routed_experts": True})
    assert reply.status == 400
    assert "return_routed_experts: answers of this route have no place for experts" in reply.json()["error"]["message"]
    for asked in (False, None):
        await posted(sparse, path, {**body, "return_routed_experts": asked})


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/inference/v1/generate"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_model_without_experts_refuses_by_name(client, path, stream):
    fields = {"return_routed_experts": True}
    body = {"sampling_params": fields, "token_ids": PROMPT} if path.endswith("generate") else fields
    body |= {"prompt": PROMPT} if path == "/v1/completions" else {}
    body |= {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {}
    reply = await client.post(path, {**body, "stream": stream})
    assert reply.status == 400
    assert "return_routed_experts: this model's layers have no experts" in reply.error["message"]


async def test_beams_have_no_experts(sparse):
    body = {"prompt": PROMPT, "use_beam_search": True, "n": 2, **ASKED}
    reply = await sparse.post("/v1/completions", body)
    assert reply.status == 400
    assert "return_routed_experts" in reply.error["message"]


async def test_scrapes_and_the_debug_log_report_the_expert_load(sparse, monkeypatch, caplog):
    """A query returns the counts that the previous one started; a query within EVERY steps of the last is skipped."""
    watch, status = sparse.state.experts, StatusLine(sparse.state)
    monkeypatch.setattr(watch, "_looked_at", sparse.state.engine.stats.steps)
    monkeypatch.setattr(watch, "looking", None)
    await sparse.get("/metrics")
    assert watch.looking is None
    monkeypatch.setattr(expert_watch, "EVERY", 1)
    with caplog.at_level(logging.DEBUG, "omniloop.experts"):
        watch.layers = []
        while not watch.layers:
            await posted(sparse, "/v1/completions", {"prompt": PROMPT, "max_tokens": 3, "ignore_eos": True})
            status.tick()
            status.stop()
            if watch.looking is not None:
                await watch.looking
    assert [layer.layer for layer in watch.layers] == [0, 2]
    assert "by layer, and the share of tokens at the busiest one: 0: " in caplog.text
    page = (await sparse.get("/metrics")).content.decode()
    shown = {family.name: family.samples for family in text_string_to_metric_families(page)}
    for name, least, most in (("touched", 1, 13), ("largest", 1 / 13, 1)):
        samples = shown["vllm:moe_experts_touched" if name == "touched" else "vllm:moe_largest_share"]
        assert [sample.labels["layer"] for sample in samples] == ["0", "2"]
        assert all(least <= sample.value <= most for sample in samples)
