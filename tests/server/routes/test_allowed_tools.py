"""A tool choice of type allowed_tools limits which tools may be called, in chat completions and in responses."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.scripted import play
from tests.server.structure.test_forced_calls import PATHS, F, G, calling, calls_of, forced

__all__ = ["calling"]
pytestmark = pytest.mark.asyncio(loop_scope="session")


def allowing(path: str, mode: str, *names: Any) -> dict[str, Any]:
    if path == PATHS[1]:
        return {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": n} for n in names]}
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize("path", PATHS[:2])
async def test_of_several_tools_the_allowed_ones_are_called(calling, path):
    tools = [F, G, {"type": "function", "function": {"name": "ping"}}]
    body = forced(path, "required", tools)
    for names in (["weather"], ["now"], ["now", "weather"]):
        choice = allowing(path, "required", *names)
        reply = await calling.post(path, {**body, "tool_choice": choice})
        assert reply.status == 200, reply.content
        ((name, _),) = calls_of(path, reply.json())
        assert name in names
        if path == PATHS[1]:
            assert reply.json()["tool_choice"] == choice
            assert len(reply.json()["tools"]) == 3
        else:
            assert reply.json()["choices"][0]["finish_reason"] == "tool_calls"
    for choice, param in (
        (allowing(path, "required", "now", "other"), ".tools[1].name"),
        (allowing(path, "auto"), ".tools"),
        (allowing(path, "none", "now"), ".mode"),
    ):
        reply = await calling.post(path, {**body, "tool_choice": choice})
        head = "tool_choice.allowed_tools" if path == PATHS[0] else "tool_choice"
        assert (reply.status, reply.json()["error"]["param"]) == (400, head + param)


@pytest.mark.parametrize("path", PATHS[:2])
async def test_under_auto_the_prompt_shows_the_allowed_tools(serve, path):
    client = serve()
    script = play(client, "Fine.", "Fine.")
    for choice in ("auto", allowing(path, "auto", "now")):
        await client.post(path, {**forced(path, "auto"), "tool_choice": choice})
        assert ('"weather"' in script.prompt(), '"now"' in script.prompt()) == (choice == "auto", True)


async def test_allowed_tools_that_only_openais_servers_run_are_left_out(calling):
    """The server leaves these tools out of the list of tools, and so out of the choice."""
    tools = [F["function"] | {"type": "function"}, {"type": "web_search"}, {"type": "mcp", "server_label": "s"}]
    body = {"input": "hi", "max_output_tokens": 60, "tools": tools}
    for mode, named, calls in (("required", ["weather"], 1), ("auto", [], 0)):
        choice = allowing(PATHS[1], mode, *named)
        choice["tools"] += [{"type": "web_search"}, {"type": "mcp", "server_label": "s"}]
        reply = await calling.post(PATHS[1], {**body, "tool_choice": choice})
        assert reply.status == 200, reply.content
        found = [item for item in reply.json()["output"] if item["type"] == "function_call"]
        assert len(found) == calls
        assert reply.json()["tool_choice"] == choice
        assert reply.reply_headers["x-ignored-fields"] == "tools.web_search, tools.mcp"
    refused = await calling.post(PATHS[1], {**body, "tool_choice": {**choice, "mode": "required"}})
    assert (refused.status, refused.error["param"]) == (400, "tool_choice")
    choice["tools"] = [{"type": "namespace", "name": "ns"}]
    refused = await calling.post(PATHS[1], {**body, "tool_choice": choice})
    assert (refused.status, refused.error["param"]) == (400, "tool_choice.tools[0].name")
