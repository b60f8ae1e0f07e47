"""Fields of the official client's transcriptions that this server does not serve are refused by name, never ignored."""

from __future__ import annotations

from pathlib import Path

import pytest
from openai import AsyncOpenAI, BadRequestError

from tests.server.live import listening

pytestmark = pytest.mark.asyncio(loop_scope="session")

DIGITS = (Path(__file__).parents[2] / "examples" / "media" / "digits-118.wav").read_bytes()
UNSERVED = {
    "include": ["logprobs"],
    "known_speaker_names": ["Ann"],
    "known_speaker_references": ["data:audio/wav;base64,AAAA"],
    "keywords": ["stop"],
    "languages": ["en", "de"],
    "chunking_strategy": {"type": "server_vad", "threshold": 0.5},
}


async def test_fields_that_would_change_the_transcript_are_refused_by_name(client):
    async with listening(client) as url, AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as api:
        for field, value in UNSERVED.items():
            with pytest.raises(BadRequestError, match=f"{field}: not supported") as refused:
                await api.audio.transcriptions.create(
                    model="omniloop", file=("a.wav", DIGITS), extra_body={field: value}
                )
            assert refused.value.param == field


async def test_cutting_that_is_done_anyway_may_be_asked_for(client):
    async with listening(client) as url, AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as api:
        heard = await api.audio.transcriptions.create(
            model="omniloop", file=("a.wav", DIGITS), chunking_strategy="auto"
        )
        assert heard.text == "118"
