"""Scoring as in evaluation harnesses: batches of token-id prompts with echo and logprobs, compared with `==`."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.server.conftest import quiet

pytestmark = pytest.mark.asyncio(loop_scope="session")

SCORE = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True, "seed": 1234}


def read(choice: dict[str, Any], context: int) -> tuple[float, bool]:
    """(sum of log-probabilities, whether the continuation is greedy), computed as in the harness."""
    logprobs = choice["logprobs"]
    own, top = logprobs["token_logprobs"][context:-1], logprobs["top_logprobs"][context:-1]
    return sum(own), all(value == max(best.values()) for value, best in zip(own, top))


async def greedy(client, ids: list[int], count: int) -> list[int]:
    body = {"prompt": ids, "max_tokens": count, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return (await client.post("/v1/completions", body)).json()["choices"][0]["token_ids"]


async def score(client, prompts: list[list[int]]) -> list[dict[str, Any]]:
    reply = await client.call("POST", "/v1/completions", {"prompt": prompts, **SCORE}).finish(timeout=150)
    assert reply.status == 200, reply.content[:500]
    choices = reply.json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(prompts)))
    return choices


def random_prompts(count: int, longest: int) -> list[list[int]]:
    draw = random.Random(count)
    return [[draw.randrange(256) for _ in range(draw.randrange(2, longest))] for _ in range(count)]


async def test_greedy_continuations_are_recognised(tiny_client):
    context = [5, 60, 200, 31]
    said = await greedy(tiny_client, context, 6)
    other = [*said[:3], (said[3] + 1) % 256, *said[4:]]
    (alone,) = await score(tiny_client, [[*context, *said]])
    both = await score(tiny_client, [[*context, *said], [*context, *other]])
    assert read(both[0], len(context)) == read(alone, len(context))
    assert read(both[0], len(context))[1] is True
    assert read(both[1], len(context))[1] is False
    assert read(both[0], len(context))[0] > read(both[1], len(context))[0]


async def test_a_batch_of_256_scores_like_each_prompt_alone(tiny_client, tiny_state):
    prompts = random_prompts(256, 40)
    choices = await score(tiny_client, prompts)
    for ids, choice in zip(prompts, choices):
        assert len(choice["logprobs"]["tokens"]) == len(ids) + 1
        assert choice["logprobs"]["token_logprobs"][0] is None
        assert choice["logprobs"]["top_logprobs"][0] is None
        for value, top in zip(choice["logprobs"]["token_logprobs"][1:], choice["logprobs"]["top_logprobs"][1:]):
            assert value in top.values()
    for at in random.Random(1).sample(range(256), 12):
        (alone,) = await score(tiny_client, [prompts[at]])
        assert alone["logprobs"] == choices[at]["logprobs"], "bit for bit, whatever else is in the batch"
    assert (await quiet(tiny_state))["routes"] == 0


@pytest.mark.full
async def test_a_batch_of_1024_scores(tiny_client, tiny_state):
    prompts = random_prompts(1024, 200)
    choices = await score(tiny_client, prompts)
    for at in (0, 511, 1023):
        assert (await score(tiny_client, [prompts[at]]))[0]["logprobs"] == choices[at]["logprobs"]
    assert (await quiet(tiny_state))["routes"] == 0


async def test_generated_and_scored_log_probabilities_are_the_same_numbers(tiny_client):
    """A token has the same log-probability when it is generated and when it is scored in a prompt."""
    ids = [7, 8, 9, 10]
    body = {"prompt": ids, "max_tokens": 6, "temperature": 1, "seed": 3, "logprobs": 2, "return_token_ids": True}
    made = (await tiny_client.post("/v1/completions", {**body, "ignore_eos": True})).json()["choices"][0]
    (scored,) = await score(tiny_client, [[*ids, *made["token_ids"]]])
    assert scored["logprobs"]["token_logprobs"][len(ids) : -1] == made["logprobs"]["token_logprobs"]


async def test_a_scored_prompt_is_not_read_from_the_cache(tiny_client):
    prompt = random_prompts(1, 100)[0] * 3
    for _ in range(2):
        body = (await tiny_client.post("/v1/completions", {"prompt": prompt, **SCORE})).json()
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert len(body["choices"][0]["logprobs"]["tokens"]) == len(prompt) + 1


async def test_a_prompt_that_fills_the_context_can_be_scored(tiny_client, tiny_state):
    whole = tiny_state.engine.max_model_len
    prompt = (random_prompts(1, 100)[0] * whole)[:whole]
    body = {"prompt": prompt, "temperature": 0, "echo": True, "logprobs": 1}
    reply = await tiny_client.call("POST", "/v1/completions", {**body, "max_tokens": 0}).finish(timeout=60)
    assert reply.status == 200, reply.content[:500]
    choice = reply.json()["choices"][0]
    assert len(choice["logprobs"]["token_logprobs"]) == whole
    (shorter,) = await score(tiny_client, [prompt[:-1]])
    assert choice["logprobs"]["token_logprobs"][:-1] == shorter["logprobs"]["token_logprobs"][:-1]
    for changes in ({"max_tokens": 1}, {"max_tokens": 0, "prompt": [*prompt, 5]}):
        refused = await tiny_client.post("/v1/completions", {**body, **changes})
        assert refused.status == 400
        assert refused.error["reason"] == "context_length_exceeded"
