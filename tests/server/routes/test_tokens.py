"""Render endpoints and /inference/v1/generate: rendered ids get the chat's answer; media hashes are not trusted."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from mm.cache import ProcessorCache
from tests.server.conftest import quiet
from tests.server.live import picture

pytestmark = pytest.mark.asyncio(loop_scope="session")
SEEN = {"role": "user", "content": [{"type": "text", "text": "what is it?"}]}


def with_pictures(*colours: str) -> list:
    """Messages with pictures of these colours."""
    parts = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture(one)}"}} for one in colours]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "what is it?"}]}]


async def rendered(client, **fields):
    reply = await client.post("/v1/chat/completions/render", fields)
    assert reply.status == 200, reply.content
    return reply.json()


async def test_a_rendered_conversation_is_answered_as_the_conversation_itself(client):
    fields = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "seed": 3, "temperature": 1.2}
    fields |= {"stop": ["q"], "logprobs": True, "top_logprobs": 1}
    made = await rendered(client, **fields, request_id="r1")
    assert made["request_id"] == "chatcmpl-r1"
    assert made["model"] == "omniloop"
    assert made["features"] is None
    assert made["sampling_params"]["stop"] == ["q"]
    assert made["sampling_params"]["logprobs"] == 1
    whole = (await client.post("/v1/chat/completions", {**fields, "return_token_ids": True})).json()
    assert made["token_ids"] == whole["prompt_token_ids"]
    reply = await client.post("/inference/v1/generate", {**made, "output_mode": "text"})
    assert reply.status == 200, reply.content
    body = reply.json()
    (choice,), (wanted,) = body["choices"], whole["choices"]
    assert body["request_id"] == "chatcmpl-r1"
    assert choice["token_ids"] == wanted["token_ids"]
    assert choice["text"] == wanted["message"]["content"]
    assert choice["logprobs"] == wanted["logprobs"]
    assert (choice["finish_reason"], choice["stop_reason"]) == (wanted["finish_reason"], wanted["stop_reason"])
    assert body["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


async def test_rendered_completions_are_a_list(client, state):
    reply = await client.post("/v1/completions/render", {"prompt": ["one", "two two"], "max_tokens": 4, "n": 2})
    made = reply.json()
    assert [one["token_ids"] for one in made] == [state.tokenizer.encode(text, True) for text in ("one", "two two")]
    assert all(one["sampling_params"]["max_tokens"] == 4 and one["sampling_params"]["n"] == 2 for one in made)
    assert (await client.post("/v1/completions/render", {"prompt": []})).status == 400


async def test_a_stream_of_tokens_makes_the_whole_answer(client, state):
    body = {
        "token_ids": state.tokenizer.encode("hello there"),
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    body["sampling_params"] = {"max_tokens": 7, "ignore_eos": True, "n": 2, "seed": 1, "temperature": 1, "logprobs": 0}
    events = (await client.post("/inference/v1/generate", body)).events()
    assert events[-1] == "[DONE]"
    assert events[-2]["usage"]["completion_tokens"] == 14
    del body["stream"], body["stream_options"]
    whole = (await client.post("/inference/v1/generate", body)).json()
    for choice in whole["choices"]:
        mine = [e["choices"][0] for e in events[:-2] if e["choices"][0]["index"] == choice["index"]]
        assert [token for piece in mine for token in piece["token_ids"]] == choice["token_ids"]
        assert [entry for piece in mine for entry in piece["logprobs"]["content"]] == choice["logprobs"]["content"]
        assert mine[-1]["finish_reason"] == "length"
        assert "text" not in choice


@pytest.mark.parametrize("colours", [["red"], ["red", "blue", "red"]])
async def test_pictures_are_found_by_hash_and_seen_again(client, state, colours):
    fields = {"messages": with_pictures(*colours), "max_tokens": 6, "temperature": 0}
    made = await rendered(client, **fields)
    assert len(made["features"]["mm_hashes"]["image"]) == len(colours)
    for place in made["features"]["mm_placeholders"]["image"]:
        part = made["token_ids"][place["offset"] : place["offset"] + place["length"]]
        assert set(part) == {state.engine.model.media_token_ids["image"]}
    wanted = (await client.post("/v1/chat/completions", {**fields, "return_token_ids": True})).json()
    reply = await client.post("/inference/v1/generate", made)
    assert reply.status == 200, reply.content
    assert reply.json()["choices"][0]["token_ids"] == wanted["choices"][0]["token_ids"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda made: made["features"]["mm_placeholders"]["image"][0].update(offset=0), "placeholder_mismatch"),
        (lambda made: made["features"]["mm_placeholders"]["image"][0].update(offset=-5), "placeholder_mismatch"),
        (lambda made: made["features"]["mm_placeholders"]["image"][0].update(offset=2**40), "placeholder_mismatch"),
        (lambda made: made["features"]["mm_placeholders"]["image"][0].update(length=3), "placeholder_mismatch"),
        (lambda made: made["features"]["mm_placeholders"]["image"].pop(), "placeholder_mismatch"),
        (lambda made: made["features"].update(mm_placeholders={}), "placeholder_mismatch"),
        (lambda made: made["features"]["mm_hashes"]["image"].append("00" * 16), "placeholder_mismatch"),
        (lambda made: made["features"]["mm_hashes"].update(image=["00" * 16, "00" * 16]), "media_unknown"),
        (lambda made: made["features"]["mm_hashes"].update(image=["zz", ""]), "media_unknown"),
        (lambda made: made["features"]["mm_hashes"]["image"].reverse(), "placeholder_mismatch"),
        (lambda made: swap(made["features"]["mm_placeholders"]["image"]), "placeholder_mismatch"),
        (lambda made: made.update(features=None), "placeholder_mismatch"),
        (lambda made: made["token_ids"].__setitem__(slice(0, 1), made["token_ids"][:1] * 2), "placeholder_mismatch"),
        (lambda made: made.update(cache_salt="other"), "media_unknown"),
        (lambda made: made["token_ids"].append(-1), "token_id_out_of_range"),
        (lambda made: made.update(token_ids=[]), "empty_prompt"),
        (lambda made: made.update(token_ids=[5] * 10_000, features=None), "context_length_exceeded"),
    ],
)
async def test_s24_spans_and_hashes_are_recomputed_and_compared(client, state, change, reason):
    from base64 import b64encode
    from io import BytesIO

    from PIL import Image

    data = BytesIO()
    Image.new("RGB", (112, 56), "green").save(data, "PNG")
    messages = with_pictures("red")
    url = f"data:image/png;base64,{b64encode(data.getvalue()).decode()}"
    messages[0]["content"].insert(1, {"type": "image_url", "image_url": {"url": url}})
    made = await rendered(client, messages=messages, max_tokens=2)
    assert (await client.post("/inference/v1/generate", made)).status == 200
    bad = copy.deepcopy(made)
    change(bad)
    reply = await client.post("/inference/v1/generate", bad)
    assert reply.status == 400, reply.content
    assert reply.error["reason"] == reason
    assert (await quiet(state))["routes"] == client.state.places.taken == 0


def swap(places: list) -> None:
    """Exchanges the lengths of two items."""
    places[0]["length"], places[1]["length"] = places[1]["length"], places[0]["length"]


async def test_s35_a_hash_finds_only_what_the_same_caller_rendered(serve):
    client = serve(server={"api_key": ("one", "two")})
    fields = {"messages": with_pictures("red"), "max_tokens": 2}
    mine, other = {"x-api-key": "one"}, {"x-api-key": "two"}
    made = (await client.post("/v1/chat/completions/render", fields, headers=mine)).json()
    assert (await client.post("/inference/v1/generate", made, headers=mine)).status == 200
    assert (await client.post("/inference/v1/generate", made, headers=other)).error["reason"] == "media_unknown"


async def test_s35_a_uuid_finds_only_the_same_keys_earlier_upload(serve):
    client = serve(server={"api_key": ("one", "two")})
    url = {"url": f"data:image/png;base64,{picture('blue')}"}
    mine, other = {"x-api-key": "one"}, {"x-api-key": "two"}

    def body(part, **more):
        return {"messages": [{"role": "user", "content": [{"type": "image_url", **part}, SEEN["content"][0]]}],
                "max_tokens": 2, **more}  # fmt: skip

    first = await client.post("/v1/chat/completions", body({"image_url": url, "uuid": "u1"}), headers=mine)
    assert first.status == 200
    again = await client.post("/v1/chat/completions", body({"image_url": None, "uuid": "u1"}), headers=mine)
    assert again.json()["choices"] == first.json()["choices"]
    for headers, more in ((other, {}), (mine, {"cache_salt": "s"})):
        reply = await client.post(
            "/v1/chat/completions", body({"image_url": None, "uuid": "u1"}, **more), headers=headers
        )
        assert (reply.status, reply.error["reason"]) == (400, "media_unknown")
    open_server = serve()  # without keys, only a salt separates callers
    for salt, status in ((None, 400), ("mine", 200)):
        more = {"cache_salt": salt} if salt else {}
        await open_server.post("/v1/chat/completions", body({"image_url": url, "uuid": "u2"}, **more))
        reply = await open_server.post("/v1/chat/completions", body({"image_url": None, "uuid": "u2"}, **more))
        assert reply.status == status


async def test_fields_outside_the_sampling_params_have_effect(client, state):
    ids = state.tokenizer.encode("hello there")
    assert (await client.post("/inference/v1/generate", {"token_ids": ids, "model": "none"})).status == 404
    assert (await client.post("/inference/v1/generate", {"token_ids": ids, "priority": 2})).error["param"] == "priority"
    bad = {"token_ids": ids, "sampling_params": {"max_tokens": 0}}
    assert (await client.post("/inference/v1/generate", bad)).error["param"] == "sampling_params.max_tokens"
    body = {"token_ids": ids, "sampling_params": {"max_tokens": 2, "prompt_logprobs": 1}}
    told = (await client.post("/inference/v1/generate", body)).json()["prompt_logprobs"]
    assert told[0] is None
    assert len(told) == len(ids)


async def test_an_empty_cache_knows_nothing():
    assert ProcessorCache(1000).get((b"", np.zeros(16, np.uint8).tobytes())) is None
