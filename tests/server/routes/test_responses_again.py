"""Replayed events of stored and of running responses: equal bytes from any number, whichever client disconnects."""

from __future__ import annotations

import asyncio
import dataclasses

import openai
import pytest

from server.output.response_record import OutputItem, ResponseRecord
from tests.server.conftest import quiet
from tests.server.live import listening, named_events, without_end

on_session_loop = pytest.mark.asyncio(loop_scope="session")

HELLO = {"input": "tell me more", "max_output_tokens": 12, "temperature": 0}
LONG = {**HELLO, "max_output_tokens": 3000}
FOLLOWED = {"background": True, "stream": True}


@pytest.fixture
def endless(client):
    without_end(client)
    return client


async def ask(client, **fields):
    return await client.post("/v1/responses", {**HELLO, **fields})


async def until(true):
    for _ in range(2000):
        if await true():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not happen")


async def again(client, name, query=""):
    return await client.get(f"/v1/responses/{name}?stream=true{query}")


@on_session_loop
async def test_a_streamed_response_is_replayed_byte_for_byte(endless):
    streamed = await ask(endless, stream=True)
    name = named_events(streamed.content)[0][1]["response"]["id"]
    told = await again(endless, name)
    assert told.reply_headers["content-type"] == "text/event-stream; charset=utf-8"
    assert told.content == streamed.content
    events = streamed.content.split(b"\n\n")[:-1]
    for after in range(-1, len(events) + 1):
        rest = b"".join(event + b"\n\n" for event in events[after + 1 :])
        assert (await again(endless, name, f"&starting_after={after}")).content == rest


@on_session_loop
async def test_a_whole_response_is_replayed_in_one_delta(endless):
    body = (await ask(endless)).json()
    events = named_events((await again(endless, body["id"])).content)
    kinds = [kind for kind, _ in events]
    assert kinds == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        "response.output_text.delta", "response.output_text.done", "response.content_part.done",
        "response.output_item.done", "response.incomplete",
    ]  # fmt: skip
    assert [data["sequence_number"] for _, data in events] == list(range(9))
    assert events[4][1]["delta"] == body["output"][0]["content"][0]["text"]
    assert events[-1][1]["response"] == body
    assert events[0][1]["response"]["status"] == "in_progress"


@on_session_loop
async def test_a_background_response_is_streamed_to_all_who_follow(endless):
    first = endless.call(
        "POST", "/v1/responses", {**LONG, "max_output_tokens": 200, "background": True, "stream": True}
    )
    first.start()
    await first.wrote.wait()
    name = named_events(first.content)[0][1]["response"]["id"]
    second = endless.call("GET", f"/v1/responses/{name}?stream=true").start()
    late = endless.call("GET", f"/v1/responses/{name}?stream=true&starting_after=5").start()
    for call in (first, second, late):
        await call.finish()
    events = named_events(first.content)
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    assert events[-1][0] == "response.incomplete"
    assert second.content == first.content
    assert named_events(late.content) == events[6:]
    assert (await again(endless, name)).content == first.content
    assert (await endless.get(f"/v1/responses/{name}")).json() == events[-1][1]["response"]


@on_session_loop
async def test_who_leaves_does_not_end_a_background_response(endless):
    call = endless.call("POST", "/v1/responses", {**LONG, **FOLLOWED, "max_output_tokens": 60}).start()
    await call.wrote.wait()
    name = named_events(call.content)[0][1]["response"]["id"]
    call.leave()
    await call.finish()

    async def ended():
        return (await endless.get(f"/v1/responses/{name}")).json()["status"] not in ("queued", "in_progress")

    await until(ended)
    assert (await endless.get(f"/v1/responses/{name}")).json()["status"] == "incomplete"
    assert not endless.state.open_exchanges


@on_session_loop
async def test_a_follower_receives_a_cancellation_and_a_slow_follower_all_events(endless):
    slow = endless.call("POST", "/v1/responses", {**LONG, **FOLLOWED})
    slow.reading.clear()
    slow.start()

    async def running():
        return endless.state.responses.running

    await until(running)
    (name,) = [name for _, name in endless.state.responses.entries]
    quick = endless.call("GET", f"/v1/responses/{name}?stream=true").start()

    async def has_begun():
        return bool(quick.writes)

    await until(has_begun)
    await endless.post(f"/v1/responses/{name}/cancel", {})
    await quick.finish()
    slow.reading.set()
    await slow.finish()
    assert named_events(slow.content)[-1][1]["response"]["status"] == "cancelled"
    assert named_events(slow.content) == named_events(quick.content)
    assert (await quiet(endless.state))["routes"] == 0


@on_session_loop
async def test_a_server_that_leaves_ends_the_stream_of_a_background_response(endless):
    call = endless.call("POST", "/v1/responses", {**LONG, **FOLLOWED}).start()
    await call.wrote.wait()
    for exchange in list(endless.state.open_exchanges):
        exchange.cancel()
    await call.finish()
    kind, data = named_events(call.content)[-1]
    assert kind == "response.failed"
    assert data["response"]["error"]["message"] == "the server is shutting down"


@on_session_loop
@pytest.mark.parametrize(
    ("query", "param"), [("stream=yes", "stream"), ("stream=true&starting_after=x", "starting_after")]
)
async def test_bad_queries_are_named(endless, query, param):
    name = (await ask(endless)).json()["id"]
    reply = await endless.get(f"/v1/responses/{name}?{query}")
    assert (reply.status, reply.error["param"]) == (400, param)


@on_session_loop
async def test_a_response_without_text_has_an_item_and_no_delta(client, monkeypatch):
    eos = client.state.vocabulary.eos[0]
    submit = client.state.engine.submit

    def ending(request):
        sampling = dataclasses.replace(request.sampling, allowed_token_ids=(eos,))
        return submit(dataclasses.replace(request, sampling=sampling))

    monkeypatch.setattr(client.state.engine, "submit", ending)
    streamed = await ask(client, stream=True)
    name = named_events(streamed.content)[0][1]["response"]["id"]
    assert (await again(client, name)).content == streamed.content
    assert "response.output_text.delta" not in {kind for kind, _ in named_events(streamed.content)}


@on_session_loop
async def test_the_openai_client_follows_and_resumes(endless):
    async with listening(endless) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as api:
        stream = await api.responses.create(model="omniloop", **{**HELLO, "max_output_tokens": 40}, background=True,
                                            stream=True)  # fmt: skip
        seen = []
        async for event in stream:
            seen.append(event)
            if len(seen) == 8:  # the client disconnects
                break
        await stream.close()
        name = seen[0].response.id
        resumed = await api.responses.retrieve(name, stream=True, starting_after=seen[-1].sequence_number)
        seen += [event async for event in resumed]
        assert [event.sequence_number for event in seen] == list(range(len(seen)))
        text = "".join(event.delta for event in seen if event.type == "response.output_text.delta")
        assert text == seen[-1].response.output_text


def test_a_record_is_replayed_from_any_number_on_while_it_grows():
    record = ResponseRecord({"id": "r"}, [])
    assert record.since(0)[1] == 2
    assert record.since(2) == (b"", 2)
    record.items.append(OutputItem({"id": "msg_1", "type": "message", "status": "in_progress", "content": []}))
    record.items[0].texts += ["a", "b", "c"]
    assert record.since(0)[1] == 7
    frames, following = record.since(5)
    assert (frames.count(b"data: "), following) == (2, 7)
    assert record.since(7) == (b"", 7)
    record.items.append(OutputItem({"id": "fc_1", "type": "function_call", "name": "f", "arguments": ""}))
    frames, following = record.since(7)  # events that end the message and begin the call
    assert (frames.count(b"data: "), following) == (4, 11)
