"""The embedded model as an agent: twenty turns with three tools through the official clients, on every route."""

from __future__ import annotations

from typing import Any

import anthropic
import jsonschema
import openai
import pytest

from tests.server.live import listening
from tests.server.structure.test_forced_calls import PATHS, F, G, calls_of, forced

pytestmark = pytest.mark.asyncio(loop_scope="session")

SMALL = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}


@pytest.mark.parametrize("path", PATHS)
async def test_the_embedded_model_goes_twenty_turns_with_three_tools(serve, path):
    """The model's calls fit their schemas; every other turn is streamed; the last turn is a text."""
    client = serve()
    tools = [F, G, {"type": "function", "function": {"name": "ping", "parameters": SMALL}}]
    fields: dict[str, Any] = {"model": "omniloop", **forced(path, "required", tools)}
    key = "input" if path == PATHS[1] else "messages"
    turns: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
    async with (
        listening(client) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as api,
        anthropic.AsyncAnthropic(base_url=url, api_key="x", max_retries=0) as messages,
    ):
        for at in range(20):
            kind = {PATHS[0]: api.chat.completions, PATHS[1]: api.responses, PATHS[2]: messages.messages}[path]
            sent: Any = {**fields, key: turns}
            if path == PATHS[2]:
                sent["tool_choice"] = {"type": "any", "disable_parallel_tool_use": True}
            if at == 19:
                sent["tool_choice"] = {"type": "none"} if path == PATHS[2] else "none"
            if at % 2:
                async with kind.stream(**sent) as stream:
                    end = {PATHS[0]: "completion", PATHS[1]: "response", PATHS[2]: "message"}[path]
                    body = (await getattr(stream, f"get_final_{end}")()).model_dump(exclude_none=True)
            else:
                body = (await kind.create(**sent)).model_dump(exclude_none=True)
            if at == 19:
                break
            ((name, arguments),) = calls_of(path, body)
            schema = next(t["function"]["parameters"] for t in tools if t["function"]["name"] == name)
            jsonschema.validate(arguments, schema)
            turns += answered(path, body, f"result {at}")
    assert len(turns) == 39
    assert said_in(path, body)


def answered(path: str, body: dict[str, Any], text: str) -> list[dict[str, Any]]:
    """The turn with a call, and the result of the call."""
    if path == PATHS[0]:
        message = body["choices"][0]["message"]
        return [message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": text}]
    if path == PATHS[1]:
        (call,) = body["output"]
        return [call, {"type": "function_call_output", "call_id": call["call_id"], "output": text}]
    (use,) = body["content"]
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": text}
    return [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]


def said_in(path: str, body: dict[str, Any]) -> str:
    """The text of an answer without calls."""
    if path == PATHS[0]:
        assert body["choices"][0]["finish_reason"] == "stop"
        return body["choices"][0]["message"]["content"]
    if path == PATHS[1]:
        return body["output"][0]["content"][0]["text"]
    return body["content"][0]["text"]
