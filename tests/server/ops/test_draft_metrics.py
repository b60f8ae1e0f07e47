"""/metrics of a server with drafts: their counts, and answers that drafts do not change."""

from __future__ import annotations

import re

import pytest

from server.app import make_app
from tests.server.asgi import Client
from tests.server.conftest import config_of, ready

TEXT = "one two three one two three one two three one two"
ASKED = [
    {"prompt": TEXT, "max_tokens": 40, "temperature": 0.0, "ignore_eos": True},
    {"prompt": TEXT, "max_tokens": 40, "temperature": 0.8, "seed": 3, "ignore_eos": True, "logprobs": 2},
]


def counts(text: str) -> dict[str, float]:
    """The values of the metrics of drafts, summed over positions."""
    found: dict[str, float] = {}
    for name, value in re.findall(r"^vllm:spec_decode_num_(\w+)_total\{.*\} (\S+)$", text, re.MULTILINE):
        found[name] = found.get(name, 0.0) + float(value)
    return found


@pytest.mark.asyncio(loop_scope="session")
async def test_drafts_are_counted_and_change_no_answer(client):
    wanted = [(await client.post("/v1/completions", asked)).json()["choices"] for asked in ASKED]
    assert not any(counts((await client.get("/metrics")).content.decode()).values())
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    async with ready(config_of(scheduler={"speculative_config": drafts})) as state:
        drafting = Client(make_app(state))
        got = [(await drafting.post("/v1/completions", asked)).json()["choices"] for asked in ASKED]
        found = counts((await drafting.get("/metrics")).content.decode())
    for mine, theirs in zip(got, wanted, strict=True):
        assert mine[0]["text"] == theirs[0]["text"]
        assert mine[0]["finish_reason"] == theirs[0]["finish_reason"]
    logprobs = [choices[1][0]["logprobs"] for choices in (got, wanted)]
    assert logprobs[0]["tokens"] == logprobs[1]["tokens"]
    assert logprobs[0]["token_logprobs"] == pytest.approx(logprobs[1]["token_logprobs"], abs=1e-5)
    assert 0 < found["accepted_tokens"] < found["draft_tokens"] <= 3 * found["drafts"]
    assert found["accepted_tokens_per_pos"] == found["accepted_tokens"]
