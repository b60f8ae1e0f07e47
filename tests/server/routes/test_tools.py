"""Tools with tool_choice none: in the prompt unless the operator excludes them; the number of tools is limited."""

from __future__ import annotations

import dataclasses

import pytest

from server.render.chat import Renderer
from server.routes import tools
from tests.server.live import use_template

pytestmark = pytest.mark.asyncio(loop_scope="session")

USER = [{"role": "user", "content": "hi"}]
FUNCTION = {"name": "look_around", "parameters": {"type": "object", "properties": {}}}
SAME = {  # one request in three protocols
    "/v1/chat/completions": {
        "messages": USER, "max_tokens": 1, "tool_choice": "none", "tools": [{"type": "function", "function": FUNCTION}],
    },
    "/v1/messages": {
        "messages": USER, "max_tokens": 1, "tool_choice": {"type": "none"}, "tools": [{**FUNCTION, "input_schema": {}}],
    },
    "/v1/responses": {
        "input": "hi", "max_output_tokens": 1, "tool_choice": "none", "tools": [{"type": "function", **FUNCTION}],
    },
}  # fmt: skip


def length(reply) -> int:
    """Tokens of the prompt, including cached ones."""
    usage = reply.json()["usage"]
    found = usage.get("prompt_tokens", usage.get("input_tokens"))
    return found + usage.get("cache_read_input_tokens", 0)


@pytest.mark.parametrize("path", SAME)
async def test_tools_that_may_not_be_called_can_stay_out_of_the_prompt(serve, path):
    body = SAME[path]
    bare = {name: value for name, value in body.items() if not name.startswith("tool")}
    for exclude in (False, True):
        client = serve(chat={"exclude_tools_when_tool_choice_none": exclude})
        use_template(client)
        shown = length(await client.post(path, body)) > length(await client.post(path, bare))
        assert shown is not exclude


@pytest.mark.parametrize("path", [*SAME, "/v1/chat/completions/render"])
async def test_the_tools_of_a_request_are_read_once(client, monkeypatch, path):
    """The check, the prompt and the parsing of the answer share one ToolTable."""
    made, real = [], tools.offered

    def offered(*args):
        made.append(args)
        return real(*args)

    monkeypatch.setattr(tools, "offered", offered)
    reply = await client.post(path, SAME[path.removesuffix("/render")])
    assert reply.status == 200, reply.content
    assert len(made) == 1


@pytest.mark.parametrize("path", [*SAME, "/tokenize"])
async def test_s05_too_many_tools_are_refused_on_every_route(client, path):
    state = client.state
    config = dataclasses.replace(state.renderer.config, max_tools=2)
    state.renderer = Renderer(state.tokenizer, config, state.pool)
    body = SAME.get(path, {name: SAME["/v1/chat/completions"][name] for name in ("messages", "tools")})
    for count, status in ((2, 200), (3, 400)):
        reply = await client.post(path, {**body, "tools": body["tools"] * count})
        assert reply.status == status, reply.content
    assert "tools: got 3; at most 2 are allowed" in reply.error["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
async def test_a_tool_that_is_none_is_named(client, path):
    messages = [{"role": "user", "content": "hi"}]
    reply = await client.post(path, {"messages": messages, "tools": [{"function": {"name": "f"}}, {"x": 1}]})
    assert (reply.status, reply.error["param"]) == (400, "tools[1].function")
