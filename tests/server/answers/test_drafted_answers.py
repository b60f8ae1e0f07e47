"""Random requests on every generation route: a server with drafts gives the answers of a server without drafts.

Stops inside a run of tokens, several choices, log-probabilities, usage, schemas, streams.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
import pytest_asyncio

from server.app import make_app
from tests import tiny
from tests.server.answers.test_stream_is_whole import (
    chat_request,
    check,
    completion_request,
    fields_of,
    token_request,
)
from tests.server.asgi import Client
from tests.server.conftest import config_of, quiet, ready

pytestmark = pytest.mark.asyncio(loop_scope="session")

SHORT, GROUPS, PER_GROUP = 1, 40, 60  # 60, and 2,400 in the long run
SCHEMA = {"type": "object", "properties": {"ab": {"enum": ["aaaaaaaa", "abababab"]}}, "required": ["ab"]}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def drafting():
    """A client of the tiny model with drafts."""
    model = {"model": str(tiny.checkpoint("qwen3")), "num_threads": 1}
    rows = {"max_num_seqs": 64, "speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    async with ready(config_of(model=model, scheduler=rows)) as state:
        client = Client(make_app(state))
        client.state = state  # type: ignore[attr-defined]
        yield client


def repeating(draw: random.Random, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The request with rules under which the answer repeats itself, so that many drafts are right; or with a schema."""
    fields = body.get("sampling_params", body)
    fields["max_tokens"] = max(fields["max_tokens"], draw.randrange(30)) if fields["max_tokens"] else 0
    if path == "/v1/chat/completions" and draw.random() < 0.1:
        fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "ab", "schema": SCHEMA}}
        fields.pop("allowed_token_ids", None)
        fields.pop("stop_token_ids", None)
        fields["max_tokens"] = 60
    elif draw.random() < 0.8:
        fields["allowed_token_ids"] = [97, 101, 104, 116]  # a e h t
    return body


def of(answer: dict[str, Any]) -> dict[str, Any]:
    """What two servers must answer alike."""
    usage = answer.get("usage") or {}
    counts = {name: usage.get(name) for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    return {"choices": answer["choices"], "usage": counts}


def logprobs_of(answer: Any) -> tuple[Any, list[float]]:
    """The answer without its floats, and the floats in order: sums of other lengths may differ in their last bit."""
    floats: list[float] = []

    def strip(value: Any) -> Any:
        if isinstance(value, float):
            floats.append(value)
            return None
        if isinstance(value, dict):
            return {name: strip(each) for name, each in value.items()}
        return [strip(each) for each in value] if isinstance(value, list) else value

    return strip(answer), floats


@pytest.mark.parametrize(
    "group", [pytest.param(group, marks=() if group < SHORT else pytest.mark.full) for group in range(GROUPS)]
)
async def test_answers_are_those_of_a_server_without_drafts(tiny_client, tiny_state, drafting, group):
    draw = random.Random(100 + group)
    before = drafting.state.engine.stats.drafts
    for _ in range(PER_GROUP):
        make = draw.choice([chat_request, completion_request, token_request])
        path, body = make(draw, fields_of(draw, tiny_state.vocabulary.width))
        body = repeating(draw, path, body)
        plain, drafted, streamed = await asyncio.gather(
            tiny_client.post(path, body), drafting.post(path, body), drafting.post(path, {**body, "stream": True})
        )
        assert plain.status == drafted.status == 200, (body, plain.content, drafted.content)
        wanted, floats = logprobs_of(of(plain.json()))
        found, own = logprobs_of(of(drafted.json()))
        assert found == wanted, body
        assert own == pytest.approx(floats, abs=1e-5), body
        check(drafted.json(), streamed.events(), body)
    assert drafting.state.engine.stats.drafts.accepted_tokens > before.accepted_tokens + 100
    held = await quiet(drafting.state)
    assert held["routes"] == held["used"] == 0
