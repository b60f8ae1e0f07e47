"""Fields that each route reads for itself have the same effect on all routes that have them."""

from __future__ import annotations

from typing import Any

import pytest

from server.answers import respond
from server.routes import response_background
from tests.server.live import use_template

pytestmark = pytest.mark.asyncio(loop_scope="session")

HI = [{"role": "user", "content": "hi"}]
SMALLEST = {
    "/v1/chat/completions": {"messages": HI, "max_tokens": 1},
    "/v1/completions": {"prompt": "hi", "max_tokens": 1},
    "/v1/messages": {"messages": HI, "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": HI},
    "/v1/responses": {"input": "hi", "max_output_tokens": 1},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [5]},
    "/inference/v1/generate": {"token_ids": [5], "sampling_params": {"max_tokens": 1}},
}


class Recording:
    """A renderer that notes the arguments of its calls."""

    def __init__(self, renderer: Any) -> None:
        self.renderer = renderer
        self.asked: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.renderer, name)

    def counting(self) -> Recording:
        return self

    async def chat(self, messages, **named):
        self.asked = named
        return await self.renderer.chat(messages, **named)

    async def completion(self, prompt, add_special_tokens=True, **named):
        self.asked = {"add_special_tokens": add_special_tokens, **named}
        return await self.renderer.completion(prompt, add_special_tokens, **named)


@pytest.fixture
def recording(client):
    client.state.renderer = Recording(client.state.renderer)
    return client.state.renderer


@pytest.mark.parametrize("path", SMALLEST)
async def test_an_unknown_model_is_404_on_every_route(client, path):
    assert (await client.post(path, {**SMALLEST[path], "model": "omniloop"})).status == 200
    reply = await client.post(path, {**SMALLEST[path], "model": "none"})
    assert reply.status == 404
    assert "model none does not exist" in reply.error["message"]


async def test_any_model_name_is_answered_where_the_operator_allows_it(client, serve):
    anyone = serve(server={"any_model_name": True})
    for named, asked in ((client, "tgi"), (anyone, "tgi"), (anyone, "gpt-4o")):
        for path, body in SMALLEST.items():
            reply = await named.post(path, {**body, "model": asked})
            assert reply.status == 200, (path, reply.content)
            assert reply.json().get("model", asked) == asked
        assert (await named.get(f"/v1/models/{asked}")).json()["id"] == asked
    assert (await anyone.chat(model="x" * 300)).error["param"] == "model"


async def test_an_answer_is_as_long_as_asked(client):
    for count in (1, 7):
        for reply in (
            await client.chat(max_tokens=count, ignore_eos=True),
            await client.complete(max_tokens=count, ignore_eos=True),
        ):
            assert reply.json()["usage"]["completion_tokens"] == count


async def test_special_tokens_are_put_before_a_conversation_if_asked(client, recording):
    for given, wanted in ((None, False), (False, False), (True, True)):
        await client.chat(add_special_tokens=given)
        assert recording.asked["add_special_tokens"] is wanted


async def test_effort_reaches_the_template_of_chat(client):
    use_template(client)
    for effort, shown in (("none", "thinking=False effort=none"), ("high", "thinking=True effort=high")):
        body = (await client.chat(reasoning_effort=effort, return_prompt_text=True)).json()
        assert body["prompt_text"].endswith(f"[assistant] {shown}")
    kwargs = {"enable_thinking": False}
    body = (await client.chat(reasoning_effort="low", chat_template_kwargs=kwargs, return_prompt_text=True)).json()
    assert body["prompt_text"].endswith("thinking=False effort=low")


async def test_a_conversation_is_tokenized_as_asked(client):
    use_template(client)
    client.state.renderer = recording = Recording(client.state.renderer)
    fields = {"add_special_tokens": True, "add_generation_prompt": False, "continue_final_message": True}
    messages = [*HI, {"role": "assistant", "content": "well"}]
    open_end = await client.post("/tokenize", {"messages": messages, **fields})
    assert open_end.status == 200, open_end.content
    assert {name: recording.asked[name] for name in fields} == fields
    tokens = {}
    for name, more in {
        "plain": {},
        "closed": {"add_generation_prompt": False},
        "moody": {"chat_template_kwargs": {"mood": "m"}},
    }.items():
        reply = await client.post("/tokenize", {"messages": messages, **more})
        tokens[name] = client.state.tokenizer.decode(reply.json()["tokens"])
    assert tokens["plain"] == tokens["closed"] + "[assistant]"
    assert tokens["moody"] == tokens["plain"] + " mood=m"
    own = {"messages": messages, "chat_template": "{{ messages[0].role }} speaks"}
    refused = await client.post("/tokenize", own)
    assert (refused.status, refused.error["param"]) == (403, "chat_template")
    use_template(client, trust_request_chat_template=True)
    reply = await client.post("/tokenize", own)
    assert client.state.tokenizer.decode(reply.json()["tokens"]) == "user speaks"


async def test_what_a_response_echoes_unchanged(client):
    fields = {"user": "u", "prompt_cache_key": "k"}
    body = (await client.post("/v1/responses", {**SMALLEST["/v1/responses"], **fields})).json()
    assert {name: body[name] for name in fields} == fields


async def test_a_completion_is_made_as_asked(client, serve, recording, submitted):
    special = client.state.vocabulary.eos[0]
    (token,) = client.state.tokenizer.encode(" the")[:1]
    the = {"allowed_token_ids": [token], "ignore_eos": True}

    async def choice(**fields: Any) -> dict[str, Any]:
        reply = await client.complete("one two three", **fields)
        assert reply.status == 200, reply.content
        return reply.json()["choices"][0]

    # fields of the prompt
    await choice(add_special_tokens=False, truncate_prompt_tokens=2, truncation_side="right")
    assert recording.asked["add_special_tokens"] is False
    assert (recording.asked["truncate_prompt_tokens"], recording.asked["truncation_side"]) == (2, "right")
    # fields of the answer's end
    assert (await choice(**the, max_tokens=3, return_token_ids=True))["token_ids"] == [token] * 3
    assert (await choice(**the, stop=" the the"))["text"] == ""
    assert (await choice(**the, stop=" the the", include_stop_str_in_output=True))["text"] == " the the"
    rule = {"max_pattern_size": 1, "min_pattern_size": 1, "min_count": 3}
    assert (await choice(**the, max_tokens=9, repetition_detection=rule))["finish_reason"] == "repetition"
    # fields of the answer's text and tokens
    shown = await choice(allowed_token_ids=[special], ignore_eos=True, max_tokens=1, skip_special_tokens=False)
    assert shown["text"] == client.state.tokenizer.token_text(special)
    named = await choice(**the, logprobs=0, return_tokens_as_token_ids=True)
    assert named["logprobs"]["tokens"][0] == f"token_id:{token}"
    assert len((await choice(prompt_logprobs=1, return_token_ids=True))["prompt_logprobs"]) > 1
    # fields of caching and priority
    assert (await client.complete("a", request_id="mine")).json()["id"] == "cmpl-mine"
    submitted.clear()
    await choice(cache_salt="a")
    await choice()
    assert submitted[0].cache_salt != submitted[1].cache_salt
    first = serve(scheduler={"scheduling_policy": "priority"})
    await first.complete("a", priority=-3)
    assert submitted[-1].priority == -3
    # fields of the stream
    events = (
        await client.complete(
            "a", **the, max_tokens=6, stream=True, stream_interval=3, stream_options={"include_usage": True}
        )
    ).events()
    assert events[-2]["usage"]["completion_tokens"] == 6
    assert max(event["choices"][0]["text"].count(" the") for event in events[:-2]) >= 3
    # fields that some servers refuse
    assert (await client.complete("a", use_beam_search=True, stream=True)).error["param"] == "use_beam_search"
    for name, value in (("response_format", {"type": "xml"}), ("structured_outputs", {"choice": []})):
        assert (await client.complete("a", **{name: value})).error["param"].startswith(name)
    assert (await client.complete("a", model="other")).status == 404


DIALECTS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/inference/v1/generate")


@pytest.mark.parametrize("path", DIALECTS)
async def test_a_gateways_priority_has_effect_in_every_dialect(serve, client, submitted, path):
    by_priority = serve(scheduler={"scheduling_policy": "priority"})
    for fields, priority in (({}, 6), ({"priority": -2}, -2)):
        reply = await by_priority.post(path, {**SMALLEST[path], **fields}, headers={"X-Vllm-Priority": "6"})
        assert reply.status == 200, reply.content
        assert submitted[-1].priority == priority
    assert (await client.post(path, SMALLEST[path], headers={"X-Vllm-Priority": "6"})).status == 200
    assert submitted[-1].priority == 0
    assert (await client.post(path, {**SMALLEST[path], "priority": 3})).status == 400


@pytest.mark.parametrize("background", [False, True])
async def test_special_tokens_of_a_response_are_visible_on_request(client, monkeypatch, background):
    seen = []
    real = response_background.Answer

    def spy(exchange, asked, jobs, skip_special_tokens=True, *rest):
        seen.append(skip_special_tokens)
        return real(exchange, asked, jobs, skip_special_tokens, *rest)

    monkeypatch.setattr(response_background if background else respond, "Answer", spy)
    for fields in ({}, {"skip_special_tokens": False}, {"skip_special_tokens": True}):
        body = {**SMALLEST["/v1/responses"], **fields, "background": background}
        assert (await client.post("/v1/responses", body)).status == 200
    assert seen == [True, False, True]


@pytest.mark.parametrize("value", [100.5, -101, 1e9])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_bias_beyond_a_hundred_is_refused(client, path, value):
    reply = await client.post(path, {**SMALLEST[path], "logit_bias": {"5": value}})
    assert reply.status == 400
    assert reply.error["param"] == "logit_bias.5"
    assert (await client.post(path, {**SMALLEST[path], "logit_bias": {"5": 100, "6": -100}})).status == 200
