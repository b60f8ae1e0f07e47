"""Stored responses: conversations, background, cancel, delete, and the bounds of the store."""

from __future__ import annotations

import asyncio

import pytest

from server.http import foreign_body
from server.output.response_store import OVERHEAD, ResponseStore, Stored, Turn
from server.render.items import read_items
from tests.server.conftest import quiet
from tests.server.live import LEADING_ONLY, picture, use_template, without_end

pytestmark = pytest.mark.asyncio(loop_scope="session")

HELLO = {"input": "hello", "max_output_tokens": 4, "temperature": 0}


async def ask(client, **fields):
    return await client.post("/v1/responses", {**HELLO, **fields})


async def until(client, name, *statuses):
    """Polls a response until it has one of the statuses, as clients do."""
    for _ in range(2000):
        body = (await client.get(f"/v1/responses/{name}")).json()
        if body["status"] in statuses:
            return body
        await asyncio.sleep(0.005)
    raise AssertionError(body)


@pytest.fixture
def shows(serve, monkeypatch):
    """A function that sends input with a template that prints every field; returns the prompt's text and the reply."""
    seen = []
    real = __import__("server.routes.response_prompt", fromlist=["prepare"]).prepare

    async def spy(exchange, prompt, asked, **named):
        seen.append(prompt.text)
        return await real(exchange, prompt, asked, **named)

    monkeypatch.setattr("server.routes.response_prompt.prepare", spy)
    client = serve()
    use_template(client)

    async def show(items, **fields):
        reply = await ask(client, input=items, **fields)
        assert reply.status == 200, reply.content
        return seen[-1], reply.json()

    show.client = client
    return show


# -- the prompt


async def test_text_and_items_are_the_same(shows):
    """A text and the equal list of items give the same prompt."""
    expected = "[user]hi\n[assistant]"
    assert (await shows("hi"))[0] == expected
    assert (await shows([{"role": "user", "content": "hi"}]))[0] == expected
    part = {"type": "input_text", "text": "hi"}
    assert (await shows([{"type": "message", "role": "user", "content": [part]}]))[0] == expected


async def test_instructions_go_first_and_developer_messages_follow(shows):
    items = [{"role": "developer", "content": "rules"}, {"role": "user", "content": "hi"}]
    assert (await shows(items, instructions="be brief"))[0] == (
        "[system]be brief\n[system]rules\n[user]hi\n[assistant]"
    )
    use_template(shows.client, LEADING_ONLY)
    assert (await shows(items, instructions="be brief"))[0] == "[system]be brief\nrules\n[user]hi\n"


async def test_calls_outputs_and_reasoning_are_history(shows):
    items = [
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hmm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "wait"}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call", "call_id": "c2", "namespace": "time", "name": "now", "arguments": ""},
        {"type": "custom_tool_call", "call_id": "c3", "name": "patch", "input": "+a"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "noon"}]},
        {"type": "custom_tool_call_output", "call_id": "c3", "output": "done"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "short"}], "encrypted_content": "x"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "user", "content": "go"},
    ]
    assert (await shows(items))[0] == (
        '[user]hi\n[assistant]<think>hmm</think>wait<call c1 weather {"city": "Rome"}><call c2 time__now {}>'
        '<call c3 patch {"input": "+a"}>\n[tool weather #c1]sunny\n[tool time__now #c2]noon\n[tool patch #c3]done\n'
        "[assistant]<think>short</think>no\n[user]go\n[assistant]"
    )


async def test_pictures_and_files_become_parts_of_chat():
    url = "data:image/png;base64," + picture()
    parts = [
        {"type": "input_image", "image_url": url, "detail": "low"},
        {"type": "input_file", "filename": "a.png", "file_data": url},
        {"type": "input_audio", "input_audio": {"data": "UklG", "format": "wav"}},
    ]
    (message,) = read_items(None, [], [{"role": "user", "content": parts}]).messages()
    assert message["content"] == [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "file", "file": {"file_data": url}},
        parts[2],
    ]


async def test_a_picture_is_seen(client):
    part = {"type": "input_image", "image_url": "data:image/png;base64," + picture()}
    with_it = await ask(client, input=[{"role": "user", "content": [{"type": "input_text", "text": "hello"}, part]}])
    plain = await ask(client)
    assert with_it.status == 200, with_it.content
    assert with_it.json()["usage"]["input_tokens"] >= plain.json()["usage"]["input_tokens"] + 4
    for given, text in (
        ({"type": "input_file", "file_url": "https://example.com/a.pdf"}, "file_data: file_url is not read here"),
        ({"type": "input_image", "file_id": "file-1"}, "image_url: file_id is not read here; send the data itself"),
        ({"type": "input_image", "image_url": ""}, "image_url: got an empty string; must be a URL"),
    ):
        reply = await ask(client, input=[{"role": "user", "content": [given]}])
        assert text in reply.error["message"]
    bad = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    reply = await ask(client, instructions="x", input=[{"role": "user", "content": [bad]}])
    assert reply.error["param"].startswith("input[0].content[0]")


async def test_tools_are_in_the_prompt_when_none_may_be_called(shows, caplog, monkeypatch):
    monkeypatch.setattr(foreign_body, "lines", foreign_body.Minutes())
    tools = [
        {"type": "function", "name": "a", "description": "d", "parameters": {"type": "object"}, "strict": None},
        {"type": "namespace", "name": "ns", "tools": [{"type": "function", "name": "b"}]},
        {"type": "custom", "name": "c"},
        {"type": "web_search"},
        {"type": "image_generation", "size": "auto"},
    ]
    text, body = await shows("hi", tools=tools, tool_choice="none")
    assert text.startswith('<tools>[{"type": "function", "function": {"name": "a", "description": "d"')
    assert '"name": "ns__b"' in text
    assert '{"name": "c", "parameters": {"type": "object", "properties": {"input": {"type": "string"}}' in text
    assert "web_search" not in text
    assert [tool["type"] for tool in body["tools"]] == ["function", "namespace", "custom"]
    assert body["tools"][1]["tools"][0]["name"] == "b"
    assert "tools.web_search of a request to /v1/responses runs at other servers only" in caplog.text
    assert "tools.image_generation" in caplog.text


async def test_built_in_tools_alone_are_dropped_and_the_answer_goes_on(shows):
    text, body = await shows("hi", tools=[{"type": "web_search"}], tool_choice="auto")
    assert (text, body["tools"]) == ("[user]hi\n[assistant]", [])


async def test_effort_reaches_the_template(shows):
    assert (await shows("hi", reasoning={"effort": "high"}))[0] == "[user]hi\n[assistant] thinking=True effort=high"
    assert (await shows("hi", reasoning={"effort": "none"}))[0] == "[user]hi\n[assistant] thinking=False effort=none"


# -- conversations


async def test_a_conversation_goes_on_without_its_instructions(shows):
    _, first = await shows("one", instructions="be brief")
    said = first["output"][0]["content"][0]["text"]
    text, second = await shows("two", previous_response_id=first["id"])
    assert text == f"[user]one\n[assistant]{said}\n[user]two\n[assistant]"
    assert second["previous_response_id"] == first["id"]
    again = second["output"][0]["content"][0]["text"]
    text, _ = await shows([{"role": "user", "content": "three"}], previous_response_id=second["id"], instructions="s")
    assert text == (f"[system]s\n[user]one\n[assistant]{said}\n[user]two\n[assistant]{again}\n[user]three\n[assistant]")


async def test_a_conversation_survives_the_deletion_of_its_beginning(shows):
    _, first = await shows("one")
    _, second = await shows("two", previous_response_id=first["id"])
    await shows.client.call("DELETE", f"/v1/responses/{first['id']}").finish()
    text, _ = await shows("three", previous_response_id=second["id"])
    assert text.startswith("[user]one\n")


async def test_items_may_be_named_instead_of_repeated(shows):
    _, first = await shows("one")
    item = first["output"][0]
    items = [{"role": "user", "content": "one"}, {"type": "item_reference", "id": item["id"]}]
    items.append({"role": "user", "content": "two"})
    text, second = await shows(items)
    assert text == f"[user]one\n[assistant]{item['content'][0]['text']}\n[user]two\n[assistant]"
    for untyped in ({"id": item["id"]}, {"id": item["id"], "type": None}):
        assert (await shows([items[0], untyped, items[2]]))[0] == text
    text, _ = await shows("three", previous_response_id=second["id"])
    assert item["content"][0]["text"] in text


async def test_unknown_ids_and_other_keys_get_404(serve):
    client = serve(server={"api_key": ("one", "two")})
    client.headers["authorization"] = "Bearer one"
    body = (await ask(client)).json()
    assert (await client.get(f"/v1/responses/{body['id']}")).json() == body
    other = {"authorization": "Bearer two"}
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel")):
        reply = await client.call(method, f"/v1/responses/{body['id']}{path}", headers=other).finish()
        assert (reply.status, reply.error["reason"]) == (404, "not_found")
    reply = await client.post("/v1/responses", {**HELLO, "previous_response_id": body["id"]}, headers=other)
    assert (reply.status, reply.error["param"]) == (404, "previous_response_id")
    assert (await client.get(f"/v1/responses/{body['id'][:-1]}")).status == 404
    assert (await ask(client, previous_response_id=body["id"])).status == 200


async def test_deleted_and_unstored_responses_are_gone(client):
    body = (await ask(client)).json()
    reply = await client.call("DELETE", f"/v1/responses/{body['id']}").finish()
    assert reply.json() == {"id": body["id"], "object": "response", "deleted": True}
    assert (await client.get(f"/v1/responses/{body['id']}")).status == 404
    body = (await ask(client, store=False)).json()
    assert body["store"] is False
    assert (await client.get(f"/v1/responses/{body['id']}")).status == 404
    assert client.state.responses.used == 0
    assert (await client.get("/v1/responses/x?stream=true")).status == 404


async def test_a_label_used_twice_makes_two_responses(client):
    headers = {"x-request-id": "same"}
    first = (await client.post("/v1/responses", HELLO, headers=headers)).json()
    second = (await client.post("/v1/responses", HELLO, headers=headers)).json()
    assert first["id"] == "resp_same"
    assert second["id"] != first["id"]
    assert (await client.get("/v1/responses/resp_same")).json() == first
    assert (await client.get(f"/v1/responses/{second['id']}")).json() == second


# -- background


async def test_background_response_is_queued_then_polled_to_its_end(client):
    whole = (await ask(client)).json()
    begun = (await ask(client, background=True, metadata={"a": "b"})).json()
    assert (begun["status"], begun["output"], begun["usage"]) == ("queued", [], None)
    assert begun["background"] is True
    ended = await until(client, begun["id"], "completed", "incomplete")
    assert ended["output"][0]["content"] == whole["output"][0]["content"]
    assert ended["metadata"] == {"a": "b"}
    assert ended["created_at"] == begun["created_at"]
    assert client.state.places.taken == 0
    assert not client.state.open_exchanges
    reply = await ask(client, previous_response_id=begun["id"])
    assert reply.status == 200


async def test_background_response_is_in_progress_and_can_be_cancelled(client):
    without_end(client)
    begun = (await ask(client, background=True, max_output_tokens=4000)).json()
    running = await until(client, begun["id"], "in_progress")
    assert running["output"] == []
    early = await ask(client, previous_response_id=begun["id"])
    assert (early.status, early.error["param"]) == (400, "previous_response_id")
    assert client.state.ledger()["background"] == 1
    cancelled = (await client.post(f"/v1/responses/{begun['id']}/cancel", {})).json()
    assert cancelled["status"] == "cancelled"
    assert (await client.get(f"/v1/responses/{begun['id']}")).json() == cancelled
    again = await client.call("POST", f"/v1/responses/{begun['id']}/cancel").finish()
    assert again.json() == cancelled
    held = await quiet(client.state)
    assert held["routes"] == 0
    assert client.state.places.taken == 0
    assert client.state.ledger()["background"] == 0


async def test_only_background_responses_can_be_cancelled(client):
    body = (await ask(client)).json()
    reply = await client.post(f"/v1/responses/{body['id']}/cancel", {})
    assert reply.status == 400


async def test_a_deleted_background_response_stops(client):
    without_end(client)
    begun = (await ask(client, background=True, max_output_tokens=4000)).json()
    reply = await client.call("DELETE", f"/v1/responses/{begun['id']}").finish()
    assert reply.status == 200
    held = await quiet(client.state)
    assert held["routes"] == 0
    assert client.state.responses.used == 0


async def test_background_response_fails_in_its_own_object(serve):
    client = serve(limits={"request_timeout": 0.2})
    without_end(client)
    begun = (await ask(client, background=True, max_output_tokens=4000)).json()
    ended = await until(client, begun["id"], "failed")
    assert ended["error"]["code"] == "server_error"


async def test_a_leaving_server_ends_what_runs_in_the_background(client):
    without_end(client)
    begun = (await ask(client, background=True, max_output_tokens=4000)).json()
    (exchange,) = client.state.open_exchanges
    exchange.cancel()
    await until(client, begun["id"], "failed")
    assert not client.state.open_exchanges


async def test_background_is_bounded_by_the_store(serve):
    client = serve(limits={"response_store_max": 1})
    without_end(client)
    begun = (await ask(client, background=True, max_output_tokens=4000)).json()
    full = await ask(client, background=True)
    assert (full.status, full.error["reason"]) == (429, "queue_full")
    assert client.state.places.taken == 1
    await client.post(f"/v1/responses/{begun['id']}/cancel", {})
    nothing = serve(limits={"response_store_max": 0})
    assert (await ask(nothing, background=True)).error["param"] == "background"
    body = (await ask(nothing)).json()
    assert (await nothing.get(f"/v1/responses/{body['id']}")).status == 404


# -- bounds


async def test_the_oldest_go_when_there_are_too_many(serve):
    client = serve(limits={"response_store_max": 2})
    names = [(await ask(client)).json()["id"] for _ in range(3)]
    found = [(await client.get(f"/v1/responses/{name}")).status for name in names]
    assert found == [404, 200, 200]


async def test_responses_go_after_their_time(serve):
    client, now = serve(limits={"response_store_ttl": 60.0}), asyncio.get_running_loop().time
    body = (await ask(client)).json()
    assert (await client.get(f"/v1/responses/{body['id']}")).status == 200
    (entry,) = client.state.responses.entries.values()
    assert 0 < entry.expires - now() <= 60
    entry.expires = now()  # as if a minute had passed
    assert (await client.get(f"/v1/responses/{body['id']}")).status == 404
    assert client.state.responses.used == 0


async def test_bytes_are_counted_once_and_given_back():
    store = ResponseStore(100, 60.0, 1 << 20)
    turn = None
    entries = []
    for at in range(5):
        turn = Turn(b'[{"n":%d}]' % at, turn)
        entries.append(Stored("", f"r{at}", turn, b"{}", (f"m{at}",)))
        store.add(entries[-1])
    each = len(b'[{"n":0}]') + len(b"[]") + OVERHEAD
    assert store.used == 5 * (each + 2)
    assert [item["n"] for item in turn.items()] == list(range(5))
    for entry in entries[:4]:
        store.remove(entry)
    assert store.used == 5 * each + 2  # the last response still refers to the other responses' turns
    store.remove(entries[4])
    assert (store.used, len(store)) == (0, 0)


async def test_too_many_bytes_push_out_the_oldest_and_never_what_runs():
    store = ResponseStore(100, 60.0, 10 * OVERHEAD)
    running = Stored("", "running", Turn(b"[]", None), running=object())
    store.add(running)
    for at in range(40):
        store.add(Stored("", f"r{at}", Turn(b"[" + b" " * 2000 + b"]", None), b"{}"))
        assert store.used <= 10 * OVERHEAD
    assert store.get("", "running") is running
    assert store.get("", "r39")
    assert store.get("", "r0") is None
    store.add(Stored("", "huge", Turn(b" " * 20 * OVERHEAD, None), b"{}"))
    assert store.get("", "huge") is None
    assert store.get("", "running") is running


async def test_s07_a_key_that_stores_much_pushes_out_its_own(serve):
    client = serve(server={"api_key": ("one", "two")}, limits={"response_store_max": 4})

    async def make(key):
        reply = await client.post("/v1/responses", {**HELLO, "max_output_tokens": 1}, headers={"x-api-key": key})
        return reply.json()["id"]

    async def remaining(key, names):
        found = [await client.get(f"/v1/responses/{name}", headers={"x-api-key": key}) for name in names]
        return [reply.status == 200 for reply in found]

    few = [await make("two")]
    many = [await make("one") for _ in range(8)]
    assert await remaining("two", few) == [True]
    assert await remaining("one", many) == [False] * 5 + [True] * 3
    few.append(await make("two"))
    assert await remaining("two", few) == [True, True]
    assert await remaining("one", many[-3:]) == [False, True, True]


async def test_s07_bytes_are_counted_by_key():
    store = ResponseStore(100, 60.0, 10 * OVERHEAD)
    small = Stored("b", "small", Turn(b"[]", None), b"x" * 10)
    store.add(small)
    for at in range(20):
        store.add(Stored("a", f"large{at}", Turn(b"[]", None), b"x" * OVERHEAD))
    assert store.get("b", "small") is small
    assert store.get("a", "large19") is not None
    assert store.used <= 10 * OVERHEAD
    for entry in list(store.entries.values()):
        store.remove(entry)
    assert store.used == 0
    assert not store.counts
    assert not store.bytes


async def test_a_response_of_the_same_name_takes_the_place_of_the_first():
    """Two requests with one label may run at the same time; the bytes of the first response are released."""
    store = ResponseStore(8, 3600.0, 1 << 20)
    for text in (b"[1]", b"[2]"):
        store.add(Stored("a", "same", Turn(text, None), b"{}", ("item",)))
    assert len(store) == 1
    assert store.used == OVERHEAD + len(b"[2]") + len(b"[]") + len(b"{}")
    store.remove(store.get("a", "same"))
    assert store.used == 0
    assert not store.counts
