"""return_progress: every streaming route reports after each step of a prompt how many of its tokens are computed."""

from __future__ import annotations

import orjson
import pytest

pytestmark = pytest.mark.asyncio(loop_scope="session")

TEXT = "word " * 270  # more tokens than one step of the tests' server has
ASK = [{"role": "user", "content": TEXT}]
ROUTES = {
    "/v1/chat/completions": {"messages": ASK, "max_tokens": 3},
    "/chat/completions": {"messages": ASK, "max_tokens": 3},
    "/v1/completions": {"prompt": TEXT, "max_tokens": 3},
    "/v1/responses": {"input": TEXT, "max_output_tokens": 3},
    "/v1/messages": {"messages": ASK, "max_tokens": 3},
    "/inference/v1/generate": {"token_ids": [5] * 300, "sampling_params": {"max_tokens": 3, "return_progress": True}},
    "/completion": {"prompt": TEXT, "n_predict": 3},
    "/completions": {"prompt": TEXT, "n_predict": 3},
    "/infill": {"input_prefix": TEXT, "input_suffix": "b", "n_predict": 3},
    "/api/chat": {"messages": ASK, "options": {"num_predict": 3}},
    "/api/generate": {"prompt": TEXT, "options": {"num_predict": 3}},
    "/generate": {"text": TEXT, "sampling_params": {"max_new_tokens": 3}},
}


def objects_of(reply):
    """The objects of a stream, of events or of lines."""
    lines = [line.removeprefix(b"data: ") for line in reply.content.splitlines()]
    return [orjson.loads(line) for line in lines if line.startswith(b"{")]


async def streamed(client, path, **fields):
    wanted = {} if path.startswith("/inference") else {"return_progress": True}
    reply = await client.post(path, {**ROUTES[path], **wanted, "stream": True, **fields})
    assert reply.status == 200, reply.content
    assert "x-ignored-fields" not in reply.reply_headers
    return objects_of(reply)


def reports_of(objects):
    return [each["prompt_progress"] for each in objects if "prompt_progress" in each]


@pytest.fixture
def gapped(client):
    from tests.server.live import use_gaps

    use_gaps(client)
    return client


@pytest.mark.parametrize("path", ROUTES)
async def test_a_stream_reports_each_step_of_its_prompt_and_answers_the_same(gapped, path):
    await gapped.state.engine.reset_prefix_cache()
    objects = await streamed(gapped, path)
    reports = reports_of(objects)
    total = reports[0]["total"]
    assert total > 256
    assert len(reports) >= 2
    counts = [report["processed"] for report in reports]
    assert counts == sorted(set(counts))
    assert counts[-1] == total
    assert {(report["total"], report["cache"]) for report in reports} == {(total, 0)}
    times = [report["time_ms"] for report in reports]
    assert times == sorted(times)
    again = await streamed(gapped, path)
    (report,) = reports_of(again)
    assert 0 < report["cache"] < report["processed"] == total
    body = dict(ROUTES[path])
    if path.startswith("/inference"):
        body["sampling_params"] = {"max_tokens": 3}
    without = objects_of(await gapped.post(path, {**body, "stream": True}))
    assert not reports_of(without)
    assert said(objects) == said(again) == said(without)
    whole = await gapped.post(path, {**ROUTES[path], "return_progress": True, "stream": False})
    assert whole.status == 200, whole.content
    assert b"prompt_progress" not in whole.content


def said(objects):
    return "".join(text for each in objects if "prompt_progress" not in each for text in texts_in(each))


def texts_in(value):
    """Texts of an object under the names that routes use for new text."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name in ("content", "text", "response") and isinstance(inner, str):
                yield inner
            else:
                yield from texts_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from texts_in(inner)


async def test_several_prompts_report_with_their_numbers(client):
    await client.state.engine.reset_prefix_cache()
    objects = await streamed(client, "/v1/completions", prompt=[TEXT, "more " * 270], n=2)
    found = {
        (each["choices"][0]["index"], each["prompt_progress"]["total"]) for each in objects if "prompt_progress" in each
    }
    assert {index for index, _ in found} == {0, 2}


async def test_a_background_response_reports_nothing(client):
    body = {"input": "hi", "background": True, "return_progress": True}
    reply = await client.post("/v1/responses", body)
    assert (reply.status, reply.error["param"]) == (400, "return_progress")


async def test_the_official_clients_read_streams_with_reports(client):
    from anthropic import AsyncAnthropic
    from openai import AsyncOpenAI

    from tests.server.live import listening

    async with listening(client) as url:
        extra = {"return_progress": True}
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="-") as openai:
            stream = await openai.chat.completions.create(
                model="omniloop", messages=ASK, max_tokens=3, stream=True, extra_body=extra
            )
            chunks = [chunk async for chunk in stream]
            assert chunks[0].choices[0].delta.role == "assistant"
            reports = [chunk.prompt_progress for chunk in chunks if getattr(chunk, "prompt_progress", None)]
            assert reports[-1]["processed"] == reports[-1]["total"]
            async with openai.responses.stream(
                model="omniloop", input=TEXT, max_output_tokens=3, extra_body=extra
            ) as answer:
                kinds = [event.type async for event in answer]
            assert "response.prompt_progress" in kinds
        async with (
            AsyncAnthropic(base_url=url, api_key="-") as anthropic,
            anthropic.messages.stream(model="omniloop", messages=ASK, max_tokens=3, extra_body=extra) as messages,
        ):
            assert (await messages.get_final_message()).usage.output_tokens > 0
