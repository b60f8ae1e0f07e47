"""Options of pictures and films: set by the operator or a trusted request, and never above the ceilings."""

from __future__ import annotations

import pytest

from server.cli import parse
from server.flags.command_line import UsageError
from server.jobs.media_options import merged
from server.start import makers
from server.state import AppState
from tests.mm import made
from tests.server.conftest import config_of
from tests.server.live import picture

on_session_loop = pytest.mark.asyncio(loop_scope="session")

FILM = made.data_url(made.film(made.ramp(20)), "video/mp4")
LOOK = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + picture("blue")}}
WATCH = {"type": "video_url", "video_url": {"url": FILM}}


async def tokens(client, part, path="/v1/chat/completions", **fields) -> int:
    messages = [{"role": "user", "content": [part, {"type": "text", "text": "?"}]}]
    reply = await client.post(path, {"messages": messages, "max_tokens": 1, **fields})
    assert reply.status == 200, reply.content
    body = reply.json()
    return len(body["token_ids"]) if path.endswith("render") else body["usage"]["prompt_tokens"]


@on_session_loop
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/chat/completions/render"])
async def test_a_trusted_request_may_ask_for_less(serve, path):
    client = serve(chat={"trust_request_mm_kwargs": True})
    assert await tokens(client, LOOK, path, mm_processor_kwargs={"max_pixels": 28 * 28}) < await tokens(
        client, LOOK, path
    )
    few = await tokens(client, WATCH, path, media_io_kwargs={"video": {"num_frames": 2}})
    assert few < await tokens(client, WATCH, path)
    assert few == await tokens(client, WATCH, path, mm_processor_kwargs={"num_frames": 2})
    many = await tokens(client, WATCH, path, media_io_kwargs={"video": {"num_frames": 10_000}})
    assert many == await tokens(client, WATCH, path, mm_processor_kwargs={"num_frames": 20})  # all frames of the film


@on_session_loop
@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("mm_processor_kwargs", {"size": 3}, "there is no option 'size'"),
        ("mm_processor_kwargs", {"num_pictures": 3}, "there is no option 'num_pictures'"),
        ("mm_processor_kwargs", {"max_pixels": "many"}, "max_pixels must be a whole number above 0"),
        ("mm_processor_kwargs", {"max_pixels": 0}, "max_pixels must be a whole number above 0"),
        ("mm_processor_kwargs", {"max_pixels": 1.5}, "a whole number above 0 and below 2147483648, not 1.5"),
        ("mm_processor_kwargs", {"fps": 2**31}, "fps must be a number above 0 and below 2147483648"),
        ("mm_processor_kwargs", {"min_pixels": 5000, "max_pixels": 4999}, "min_pixels must be at most max_pixels"),
        ("media_io_kwargs", {"audio": {}}, "is known"),
        ("media_io_kwargs", {"video": {"colour": 1}}, "video: got {'colour': 1}; an object of these names is known"),
        ("media_io_kwargs", {"video": 3}, "video: got 3; an object of these names is known"),
    ],
)
async def test_s22_others_are_refused_by_name(serve, field, value, text):
    refused = await serve().chat(**{field: value})
    assert (refused.status, refused.error["param"]) == (403, field)
    wrong = await serve(chat={"trust_request_mm_kwargs": True}).chat(**{field: value})
    assert (wrong.status, wrong.error["param"]) == (400, field)
    assert text in wrong.error["message"]


@on_session_loop
async def test_the_operators_options_stand_where_a_request_brings_none(serve, state):
    other = AppState(config_of(chat={"media_io_kwargs": {"video": {"num_frames": 2}}}))
    other.pool.shutdown()
    other.pool, other.engine, other.tokenizer = state.pool, state.engine, state.tokenizer
    client = serve(chat={"trust_request_mm_kwargs": True})
    plain = await tokens(client, WATCH)
    client.state.media = media = makers.make_loader(other)
    assert media is not None
    try:
        two = await tokens(client, WATCH)
        assert two < plain
        assert await tokens(client, WATCH, media_io_kwargs={"video": {"num_frames": 20}}) == two, "no more than that"
        assert await tokens(client, WATCH, mm_processor_kwargs={"use_audio_in_video": False}) == two
    finally:
        await media.close()


def test_flags_are_checked_at_start():
    assert parse(["--media-io-kwargs", '{"video": {"fps": 1.5}}'])[1].chat.media_io_kwargs == {"video": {"fps": 1.5}}
    with pytest.raises(UsageError, match=r"--media-io-kwargs: audio: got \{\}; an object"):
        parse(["--media-io-kwargs", '{"audio": {}}'])
    assert merged({"fps": 2.0}, {"video": {"fps": 1.0}}).fps == 1.0
