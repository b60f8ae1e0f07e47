"""Errors name the path in the client's own request, even if the server has converted its blocks or items."""

from __future__ import annotations

import anthropic
import openai
import pytest

from tests.server.live import listening, picture

pytestmark = pytest.mark.asyncio(loop_scope="session")

MARK = "see <|IMAGE|>"
BROKEN = "iVBORw0KGg*="
DAMAGED = picture()[:40]
NOT_A_PICTURE = "AAAA"


def source(data, kind="image/png"):
    return {"type": "base64", "media_type": kind, "data": data}


def image(data):
    return {"type": "image", "source": source(data)}


def text(words):
    return {"type": "text", "text": words}


def user(*blocks):
    return {"role": "user", "content": list(blocks)}


def said(*blocks):
    return {"role": "assistant", "content": list(blocks)}


USE = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
HI, YES = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}


def result(*blocks):
    return user({"type": "tool_result", "tool_use_id": "t", "content": list(blocks)})


def document(of, **more):
    return {"type": "document", "source": of, **more}


def link(url):
    return {"type": "image", "source": {"type": "url", "url": url}}


MESSAGES = [
    ([user(image(BROKEN))], "messages[0].content[0].source.data"),
    ([user(image(DAMAGED))], "messages[0].content[0].source.data"),
    ([user(image(NOT_A_PICTURE))], "messages[0].content[0].source.data"),
    ([user(image(""))], "messages[0].content[0].source.data"),
    ([user(text("a"), image(picture()), image(BROKEN))], "messages[0].content[2].source.data"),
    ([HI, YES, user(text("a")), user(text("b"), image(BROKEN))], "messages[3].content[1].source.data"),
    ([HI, user(image(BROKEN))], "messages[1].content[0].source.data"),
    ([user(link("gopher://a/b.png"))], "messages[0].content[0].source.url"),
    ([user(link(""))], "messages[0].content[0].source.url"),
    ([user(link("data:image/png,x"))], "messages[0].content[0].source.url"),
    ([HI, said(USE), result(text("a"), image(BROKEN))], "messages[2].content[0].content[1].source.data"),
    ([user(document({"type": "content", "content": [image(BROKEN)]}))],
     "messages[0].content[0].source.content[0].source.data"),
    ([user(document({"type": "text", "media_type": "text/plain", "data": MARK}))],
     "messages[0].content[0].source.data"),
    ([user(document({"type": "text", "data": "a"}, title=MARK))], "messages[0].content[0].title"),
    ([user(document(source("AAAA", "application/pdf")))], "messages[0].content[0].source.type"),
    ([{"role": "user", "content": MARK}], "messages[0].content contains"),
    ([user(text(MARK))], "messages[0].content[0].text contains"),
    ([HI, {"role": "user", "content": MARK}], "messages[1].content contains"),
    ([HI, user(text("a"), text(MARK))], "messages[1].content[1].text contains"),
    ([HI, said(text("a"), {**USE, "input": {"at": MARK}}), result(text("b"))], "messages[1].content[1] contains"),
    ([HI, said({"type": "thinking", "thinking": MARK, "signature": ""}, text("a")), HI],
     "messages[1].content[0].thinking contains"),
    ([HI, said(USE), result(text(MARK))], "messages[2].content[0].content[0].text contains"),
]  # fmt: skip


@pytest.mark.parametrize(("messages", "place"), MESSAGES, ids=lambda value: value if isinstance(value, str) else "")
async def test_messages_name_the_place_in_the_clients_block(client, messages, place):
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        limit = {"max_tokens": 1} if path == "/v1/messages" else {}
        reply = await client.post(path, {"messages": messages, **limit})
        said = reply.json()["error"]["message"]
        assert reply.status in (400, 403), said
        assert said.startswith((place, f"{place}: ", f"{place} "))
        assert not said.startswith(f"{place}.")
        assert "image_url" not in said


def part(kind, key, value, **more):
    return {"type": kind, key: value, **more}


def item(*parts, role="user"):
    return {"type": "message", "role": role, "content": list(parts)}


def url(data, kind="image/png"):
    return f"data:{kind};base64,{data}"


CALL = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
ASK = item(part("input_text", "text", "hi"))
RESPONSES = [
    ([item(part("input_text", "text", "a"), part("input_image", "image_url", url(BROKEN)))],
     "input[0].content[1].image_url"),
    ([item(part("input_image", "image_url", url(DAMAGED)))], "input[0].content[0].image_url"),
    ([item(part("input_image", "image_url", "gopher://a"))], "input[0].content[0].image_url"),
    ([item(part("input_file", "file_data", url(BROKEN), filename="a.png"))], "input[0].content[0].file_data"),
    ([item(part("input_file", "file_data", "AAAA", filename="a.png"))], "input[0].content[0].file_data"),
    ([item(part("input_file", "file_data", url("AAAA", "application/pdf")))], "input[0].content[0].file_data"),
    ([item(part("input_audio", "input_audio", {"data": BROKEN, "format": "wav"}))], "input[0].content[0].input_audio"),
    ([item(part("input_video", "video_url", url(BROKEN, "video/mp4")))], "input[0].content[0].video_url"),
    ([ASK, CALL, {"type": "function_call_output", "call_id": "c",
                  "output": [part("input_image", "image_url", url(BROKEN))]}], "input[2].output[0].image_url"),
    ([ASK, {**CALL, "arguments": f'{{"a": "{MARK}"}}'}], "input[1]"),
    ([ASK, {**CALL, "name": MARK}], "input[1]"),
    ([ASK, ASK, item(part("input_text", "text", MARK))], "input[2].content[0].text"),
    ([item(part("output_text", "text", "a"), part("refusal", "refusal", MARK), role="assistant"), ASK],
     "input[0].content[1].refusal"),
    (MARK, "input"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "place"), RESPONSES, ids=lambda value: value if isinstance(value, str) else "")
async def test_responses_name_the_place_in_the_clients_item(client, given, place):
    reply = await client.post("/v1/responses", {"input": given, "max_output_tokens": 1})
    error = reply.json()["error"]
    assert reply.status in (400, 403, 422), error
    assert error["param"] == place
    assert "messages" not in error["message"]


async def test_a_whole_that_is_too_long_is_called_what_the_client_calls_it(client):
    many = [ASK, item(part("output_text", "text", "a"), role="assistant")] * 1025
    error = (await client.post("/v1/responses", {"input": many})).json()["error"]
    assert error["param"] == "input"
    assert error["message"].startswith("input has 2050 messages")


async def test_the_official_clients_see_their_own_places(client):
    async with listening(client) as address:
        async with anthropic.AsyncAnthropic(base_url=address, api_key="x", max_retries=0, timeout=20) as api:
            given = anthropic.types.Base64ImageSourceParam(type="base64", media_type="image/png", data=BROKEN)
            asked = user(text("what is it?"), anthropic.types.ImageBlockParam(type="image", source=given))
            with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.content\[1\]\.source\.data: "):
                await api.messages.create(model="omniloop", max_tokens=4, messages=[asked])
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0, timeout=20) as api:
            shown = openai.types.responses.ResponseInputImageParam(
                type="input_image", detail="auto", image_url=url(BROKEN)
            )
            with pytest.raises(openai.BadRequestError) as caught:
                await api.responses.create(model="omniloop", input=[user(shown)])
            assert caught.value.param == "input[0].content[0].image_url"
            asked = user({"type": "image_url", "image_url": {"url": url(BROKEN)}})
            with pytest.raises(openai.BadRequestError) as caught:
                await api.chat.completions.create(model="omniloop", messages=[asked])
            assert caught.value.param == "messages[0].content[0].image_url"
