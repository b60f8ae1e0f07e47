"""A film's sound track is part of the prompt of models that take audio, unless the operator turns it off."""

from __future__ import annotations

import pytest

from server.start import makers
from server.state import AppState
from tests.mm import made
from tests.server.conftest import config_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

HEARD = made.data_url(made.film(made.ramp(20), track=made.tone(2.0)), "video/mp4")
MUTE = made.data_url(made.film(made.ramp(20)), "video/mp4")


async def prompt_tokens(client, url: str) -> int:
    parts = [{"type": "video_url", "video_url": {"url": url}}, {"type": "text", "text": "What moves?"}]
    reply = await client.chat(messages=[{"role": "user", "content": parts}], max_tokens=1)
    assert reply.status == 200, reply.content
    return reply.json()["usage"]["prompt_tokens"]


async def test_the_sound_of_a_film_is_part_of_the_prompt(client):
    sound = 2 + 2 * 25  # two seconds of sound, with a token before and after
    assert await prompt_tokens(client, HEARD) == pytest.approx(await prompt_tokens(client, MUTE) + sound, abs=2)


async def test_the_operator_may_switch_it_off(serve, state: AppState):
    other = AppState(config_of(chat={"mm_processor_kwargs": {"use_audio_in_video": False, "max_pixels": 12544}}))
    other.pool.shutdown()
    other.pool, other.engine, other.tokenizer = state.pool, state.engine, state.tokenizer
    client = serve()
    client.state.media = media = makers.make_loader(other)
    assert media is not None
    try:
        assert (media.options.use_audio_in_video, media.options.max_pixels) == (False, 12544)
        assert await prompt_tokens(client, HEARD) == await prompt_tokens(client, MUTE)
    finally:
        await media.close()
