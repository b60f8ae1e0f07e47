"""The embedded model with tools and schemas, through the official clients: the answers of the real weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from anthropic import Anthropic
from openai import OpenAI
from pydantic import BaseModel

from tests.end_to_end.process import ServerProcess, serving


class Weather(BaseModel):
    city: str
    degrees: int


def function(name: str, description: str, **kinds: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in kinds.items()}
    schema = {"type": "object", "properties": properties, "required": list(kinds)}
    return {"name": name, "description": description, "parameters": schema}


FUNCTIONS = [
    function("get_weather", "Weather of a town", city="string"),
    function("add_note", "Write a note", text="string"),
    function("set_timer", "Start a timer", minutes="integer"),
]
TOOLS = [{"type": "function", "function": one} for one in FUNCTIONS]
ASKED = {
    "What is the weather in Oslo?": ("get_weather", {"city": "Oslo"}),
    "Add a note: buy milk": ("add_note", {"text": "buy milk"}),
    "Set a timer for 12 minutes": ("set_timer", {"minutes": 12}),
}
RESULT = '{"weather": "sunny", "degrees": 21}'
SAID = "The weather is sunny. The degrees is 21."
WRITE = "The weather in Oslo is 21 degrees. Write it as JSON."


@pytest.fixture(scope="module")
def process() -> Iterator[ServerProcess]:
    with serving() as process:
        yield process


@pytest.fixture(scope="module")
def openai(process: ServerProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"http://127.0.0.1:{process.port}/v1", api_key="none") as client:
        yield client


@pytest.fixture(scope="module")
def anthropic(process: ServerProcess) -> Iterator[Anthropic]:
    with Anthropic(base_url=f"http://127.0.0.1:{process.port}", api_key="none") as client:
        yield client


@pytest.mark.parametrize("question", ASKED)
def test_a_question_becomes_a_call(openai, question):
    messages = [{"role": "user", "content": question}]
    answer = openai.chat.completions.create(model="omniloop", messages=messages, tools=TOOLS).choices[0]
    (call,) = answer.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ASKED[question]
    assert answer.finish_reason == "tool_calls"


def test_what_needs_no_tool_is_answered(openai):
    messages = [{"role": "user", "content": "What is 3 + 4?"}]
    answer = openai.chat.completions.create(model="omniloop", messages=messages, tools=TOOLS).choices[0]
    assert (answer.message.content, answer.message.tool_calls, answer.finish_reason) == ("7", None, "stop")


def test_a_result_becomes_a_sentence(openai):
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
    called = openai.chat.completions.create(model="omniloop", messages=messages, tools=TOOLS).choices[0].message
    messages += [called, {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": RESULT}]
    said = openai.chat.completions.create(model="omniloop", messages=messages, tools=TOOLS).choices[0].message
    assert (said.content, said.tool_calls) == (SAID, None)


def test_parse_gives_what_the_schema_says(openai):
    messages = [{"role": "user", "content": WRITE}]
    whole = openai.chat.completions.parse(model="omniloop", messages=messages, response_format=Weather)
    assert whole.choices[0].message.parsed == Weather(city="Oslo", degrees=21)
    answer = openai.responses.parse(model="omniloop", input=WRITE, text_format=Weather)
    assert answer.output_parsed == Weather(city="Oslo", degrees=21)


def test_responses_call_and_answer(openai):
    tools = [{"type": "function", **one} for one in FUNCTIONS]
    first = openai.responses.create(model="omniloop", input="What is the weather in Oslo?", tools=tools)
    (call,) = first.output
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Oslo"})
    result = {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}
    second = openai.responses.create(model="omniloop", previous_response_id=first.id, input=[result], tools=tools)
    assert second.output_text == SAID


def test_messages_call_and_answer(anthropic):
    tools = [
        {"name": one["name"], "description": one["description"], "input_schema": one["parameters"]} for one in FUNCTIONS
    ]
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
    with anthropic.messages.stream(model="omniloop", max_tokens=100, messages=messages, tools=tools) as stream:
        first = stream.get_final_message()
    (call,) = first.content
    assert (call.name, call.input, first.stop_reason) == ("get_weather", {"city": "Oslo"}, "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": RESULT}
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = anthropic.messages.create(model="omniloop", max_tokens=100, messages=messages, tools=tools)
    assert second.content[0].text == SAID
