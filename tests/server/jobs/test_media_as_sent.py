"""Media as clients send them, over a socket: types that name another format, films that are lists of pictures."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator

import httpx
import numpy as np
import pytest
import pytest_asyncio

from tests.mm import made
from tests.server.live import listening

pytestmark = pytest.mark.asyncio(loop_scope="session")

JPEG, PNG = (made.picture(made.noise(60, 80), kind) for kind in ("JPEG", "PNG"))
WAV, MP4 = made.sound(made.tone(0.5)), made.film(made.ramp(8))
GIF = made.picture(made.noise(60, 80), "GIF")


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def url_part(modality: str, url: str) -> dict:
    return {"type": f"{modality}_url", f"{modality}_url": {"url": url}}


def named(modality: str, data: bytes, mime: str) -> dict:
    return url_part(modality, f"data:{mime};base64,{encoded(data)}")


def frames_part(pictures: list[bytes], mime: str = "video/jpeg") -> dict:
    return url_part("video", f"data:{mime};base64,{','.join(map(encoded, pictures))}")


def frames(count: int, height: int = 64, width: int = 64) -> list[bytes]:
    return [made.picture(pixels, "JPEG") for pixels in made.ramp(count, height, width)]


@pytest_asyncio.fixture(loop_scope="session")
async def http(serve) -> AsyncIterator[httpx.AsyncClient]:
    client = serve(chat={"trust_request_mm_kwargs": True})
    async with listening(client) as url, httpx.AsyncClient(base_url=url, timeout=60) as http:
        yield http


async def ask(http: httpx.AsyncClient, *parts: dict, **fields) -> httpx.Response:
    content = [*parts, {"type": "text", "text": "?"}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1, **fields}
    return await http.post("/v1/chat/completions", json=body)


async def test_the_bytes_name_the_format(http):
    wrong = []
    for case in (
        named("image", PNG, "image/jpeg"),
        named("image", JPEG, "image/png"),
        named("image", GIF, "image/webp"),
        named("image", PNG, "image/*"),
        named("image", JPEG, "application/octet-stream"),
        named("audio", WAV, "audio/mpeg"),
        named("audio", WAV, "audio/*"),
        named("video", MP4, "video/webm"),
        {"type": "input_audio", "input_audio": {"data": encoded(WAV), "format": "mp3"}},
        {"type": "file", "file": {"file_data": f"data:image/png;base64,{encoded(JPEG)}"}},
        {"type": "file", "file": {"file_data": f"data:audio/mp4;base64,{encoded(WAV)}"}},
    ):
        reply = await ask(http, case)
        if reply.status_code != 200:
            wrong.append((str(case)[:60], reply.text))
    assert not wrong


async def test_messages_and_responses_take_a_picture_under_any_name(http):
    source = {"type": "base64", "media_type": "image/png", "data": encoded(JPEG)}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "?"}]
    tool = [{"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "image", "source": source}]}]
    history = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}]},
        {"role": "user", "content": tool},
    ]
    for messages in ([{"role": "user", "content": content}], history):
        reply = await http.post("/v1/messages", json={"model": "omniloop", "max_tokens": 1, "messages": messages})
        assert reply.status_code == 200, reply.text
    item = {"role": "user", "content": [{"type": "input_image", "image_url": f"data:image/png;base64,{encoded(JPEG)}"}]}
    reply = await http.post("/v1/responses", json={"input": [item], "max_output_tokens": 16})
    assert reply.status_code == 200, reply.text


async def test_a_type_of_another_modality_is_refused(http):
    for modality, data, mime in (("image", PNG, "audio/wav"), ("audio", WAV, "image/png"), ("video", MP4, "image/png")):
        reply = await ask(http, named(modality, data, mime))
        assert (reply.status_code, reply.json()["error"]["reason"]) == (400, "data_url_invalid")
        assert f"read as {modality}" in reply.json()["error"]["message"]


async def test_a_list_of_pictures_is_a_film(http, monkeypatch, state):
    seen = []
    processor = type(state.media.processor)
    real = processor.process
    monkeypatch.setattr(processor, "process", lambda _, item, *rest: (seen.append(item), real(_, item, *rest))[1])
    assert (await ask(http, frames_part(frames(6)))).status_code == 200
    for fps in (4, 5, 4):  # the last item comes from the cache
        reply = await ask(http, frames_part(frames(5)), media_io_kwargs={"video": {"fps": fps}})
        assert reply.status_code == 200, reply.text
    pictures = [made.picture(pixels, kind) for pixels, kind in zip(made.ramp(2, 64, 64), ("PNG", "JPEG"))]
    assert (await ask(http, frames_part(pictures, "image/png"))).status_code == 200
    assert (await ask(http, frames_part(frames(1)))).status_code == 200
    assert [len(item.data) for item in seen] == [6, 5, 5, 2, 1]
    assert [item.seconds_per_frame for item in seen] == [1.0, 0.25, 0.2, 1.0, 1.0]
    greys = [round(float(frame.mean())) for frame in seen[0].data]
    assert np.abs(np.array(greys) - (20 + 2 * np.arange(6))).max() <= 1, "all pictures, in their order"


@pytest.mark.parametrize(
    ("part", "reason", "said"),
    [
        (frames_part([*frames(1), PNG]), "media_invalid", "picture 1 of the video is 80x60, and the first is 64x64"),
        (frames_part([*frames(2), WAV]), "media_unsupported", "picture 2 of the video is wav"),
        (frames_part([*frames(1), JPEG[:200]]), "media_invalid", "damaged"),
        (frames_part(frames(1) * 601), "media_too_large", "601 pictures at 1 per second"),
        (
            url_part("video", "data:video/jpeg;base64," + "," * 40_000),
            "media_too_large",
            "40001 pictures; at most 36000",
        ),
        (url_part("video", "data:video/jpeg;base64,AAAA,,AAAA"), "data_url_invalid", "got 0"),
        (frames_part([made.picture(made.noise(16, 16), "JPEG")[:40]] * 2), "media_invalid", "damaged"),
    ],
)
async def test_films_of_pictures_have_the_limits_of_films(http, part, reason, said):
    reply = await ask(http, part)
    assert (reply.status_code, reply.json()["error"]["reason"]) == (400, reason), reply.text
    assert said in reply.json()["error"]["message"]
    assert reply.json()["error"]["param"] == "messages[0].content[0].video_url"
