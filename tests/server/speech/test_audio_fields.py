"""Fields of the official client's transcriptions that this server lacks are refused by name, never ignored."""

from __future__ import annotations

from pathlib import Path

import pytest
from openai import AsyncOpenAI, BadRequestError

from tests.server.live import listening

pytestmark = pytest.mark.asyncio(loop_scope="session")

DIGITS = (Path(__file__).parents[3] / "examples" / "media" / "digits-118.wav").read_bytes()
UNSERVED = {
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


async def test_log_probabilities_of_a_transcript_are_those_of_its_tokens(client):
    async with listening(client) as url, AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as api:
        asked = {"model": "omniloop", "file": ("a.wav", DIGITS), "include": ["logprobs"]}
        heard = await api.audio.transcriptions.create(**asked)
        assert "".join(entry.token for entry in heard.logprobs) == heard.text == "118"
        assert bytes(int(byte) for entry in heard.logprobs for byte in entry.bytes) == b"118"
        assert all(-1 < entry.logprob <= 0 for entry in heard.logprobs)
        stream = await api.audio.transcriptions.create(**asked, stream=True)
        *deltas, done = [event async for event in stream]
        assert done.type == "transcript.text.done"
        assert all("".join(each.token for each in event.logprobs) == event.delta for event in deltas)
        assert [(each.token, each.logprob) for event in deltas for each in event.logprobs] == [
            (each.token, each.logprob) for each in done.logprobs
        ]
        assert [(each.token, each.logprob) for each in done.logprobs] == [
            (each.token, each.logprob) for each in heard.logprobs
        ]
        plain = await api.audio.transcriptions.create(model="omniloop", file=("a.wav", DIGITS))
        assert plain.logprobs is None
        for wrong, text in (
            ({"include": ["words"]}, "include: got words; must be logprobs"),
            ({"response_format": "verbose_json"}, "include: logprobs come with response_format json"),
        ):
            with pytest.raises(BadRequestError, match=text):
                await api.audio.transcriptions.create(**{**asked, **wrong})
