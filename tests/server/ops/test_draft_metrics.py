"""/metrics of a server with drafts: their counts, and answers that drafts do not change; drafts of single answers."""

from __future__ import annotations

import re
from collections import Counter
from itertools import zip_longest
from typing import Any

import pytest

from server.app import make_app
from tests.server.asgi import Client
from tests.server.conftest import config_of, ready

TEXT = "one two three one two three one two three one two"
ASKED = [
    {"prompt": TEXT, "max_tokens": 40, "temperature": 0.0, "ignore_eos": True},
    {"prompt": TEXT, "max_tokens": 40, "temperature": 0.8, "seed": 3, "ignore_eos": True, "logprobs": 2},
]
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3}


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
    async with ready(config_of(scheduler={"speculative_config": DRAFTS})) as state:
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


CHAT = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 30, "temperature": 0.0, "ignore_eos": True}
TOKENS = {"token_ids": list(range(5, 14)) * 5, "sampling_params": {"max_tokens": 30, "ignore_eos": True, "seed": 1}}
ROUTES = {"/v1/chat/completions": CHAT, "/v1/completions": ASKED[0], "/inference/v1/generate": TOKENS}


def consistent(metrics: dict[str, Any], level: str) -> dict[str, Any]:
    """The counts of an answer, which must fit together."""
    found = metrics["speculative_decoding"]
    steps, drafts, right = (found[name] for name in ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens"))
    assert found["num_spec_tokens"] == 3
    assert sum(found["acceptance_histogram"]) == steps > 0
    assert sum(place * count for place, count in enumerate(found["acceptance_histogram"])) == right > 0
    lengths = {int(length): counts for length, counts in found["acceptance_histogram_by_draft_length"].items()}
    assert all(len(counts) == 1 + length for length, counts in lengths.items())
    assert sum(length * sum(counts) for length, counts in lengths.items()) == drafts
    assert [sum(counts) for counts in zip_longest(*lengths.values(), fillvalue=0)] == found["acceptance_histogram"]
    assert found["mean_acceptance_length"] == pytest.approx(1 + right / steps)
    assert found["draft_acceptance_rate"] == pytest.approx(right / drafts)
    assert ("per_step_accepted" in found) == ("per_step_drafted" in found) == (level == "detailed")
    if level == "detailed":
        assert (len(found["per_step_drafted"]), sum(found["per_step_drafted"])) == (steps, drafts)
        assert Counter(found["per_step_accepted"]) == Counter(
            {place: count for place, count in enumerate(found["acceptance_histogram"]) if count}
        )
    return found


@pytest.mark.parametrize("level", ["summary", "detailed"])
@pytest.mark.asyncio(loop_scope="session")
async def test_an_answer_reports_its_drafts(client, level):
    """On each generating route, in the body and in the chunk with the usage; null for several choices."""
    rows = {"speculative_config": DRAFTS, "per_request_spec_decode_metrics": level}
    async with ready(config_of(scheduler=rows)) as state:
        drafting = Client(make_app(state))
        before = state.engine.stats.drafts.accepted_tokens
        reported = 0
        for path, body in ROUTES.items():
            found = consistent((await drafting.post(path, body)).json()["metrics"], level)
            options = {"stream": True, "stream_options": {"include_usage": True}}
            chunks = (await drafting.post(path, {**body, **options})).events()
            (last,) = [chunk for chunk in chunks if "metrics" in chunk]
            assert last["usage"]
            again = consistent(last["metrics"], level)
            reported += found["num_accepted_draft_tokens"] + again["num_accepted_draft_tokens"]
        assert reported == state.engine.stats.drafts.accepted_tokens - before
        several = await drafting.post("/v1/completions", {**ASKED[0], "n": 2})
        short = await drafting.post("/v1/completions", {**ASKED[0], "max_tokens": 1})
        assert several.json()["metrics"] == short.json()["metrics"] == {"speculative_decoding": None}
    assert "metrics" not in (await client.post("/v1/completions", ASKED[0])).json()
