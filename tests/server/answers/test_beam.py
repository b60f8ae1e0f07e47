"""Beam search equals its definition, computed with one completion per beam and round; ends, aborts, batches."""

from __future__ import annotations

import asyncio
import json

import jsonschema
import pytest

from engine.base.request import FinishReason
from server.answers import beam_lines
from server.answers.beam import Beam
from server.schema.completion import CompletionBody
from server.structure.structure import structure_of
from tests.engine.grammar.kit import allowed as allowed_ids
from tests.server.conftest import quiet

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def by_hand(client, prompt, width, rounds, eos=(), penalty=1.0):
    """The definition: without early end, one completion for each beam gives its 2 * width likeliest tokens."""
    beams, ended = [((), 0.0)], []
    for _ in range(rounds):
        grown = []
        for tokens, total in beams:
            fields = {"max_tokens": 1, "logprobs": 2 * width, "temperature": 0, "return_tokens_as_token_ids": True}
            body = (await client.post("/v1/completions", {"prompt": [*prompt, *tokens], **fields})).json()
            for name, logprob in body["choices"][0]["logprobs"]["top_logprobs"][0].items():
                token = int(name.removeprefix("token_id:"))
                (ended if token in eos else grown).append(((*tokens, token), total + logprob))
        beams = sorted(grown, key=lambda beam: -beam[1])[:width]

    def score(beam):
        length = len(prompt) + len(beam[0]) - (bool(beam[0]) and beam[0][-1] in eos)
        return beam[1] / length**penalty

    return [tokens for tokens, _ in sorted([*ended, *beams], key=score, reverse=True)[:width]]


@pytest.mark.parametrize(("width", "rounds", "penalty"), [(1, 6, 1.0), (3, 4, 1.0), (2, 5, 3.0), (2, 5, -2.0)])
async def test_beam_search_equals_its_definition(client, state, width, rounds, penalty):
    prompt = state.tokenizer.encode("the quick brown")
    eos = state.vocabulary.eos
    wanted = await by_hand(client, prompt, width, rounds, eos, penalty)
    fields = {"use_beam_search": True, "n": width, "max_tokens": rounds, "ignore_eos": False}
    reply = await client.complete(prompt, **fields, length_penalty=penalty, return_token_ids=True)
    assert reply.status == 200, reply.content
    choices = reply.json()["choices"]
    assert [tuple(choice["token_ids"]) for choice in choices] == wanted
    for choice in choices:
        assert choice["finish_reason"] == ("stop" if choice["token_ids"][-1] in eos else "length")
    assert reply.json()["usage"]["completion_tokens"] == sum(map(len, wanted))
    assert (await quiet(state))["routes"] == 0


async def test_beams_end_early_only_when_nothing_can_win(client, state):
    """With a likely stop token at once and no weight on length, the search ends long before max_tokens."""
    prompt = state.tokenizer.encode("the quick brown")
    (first,) = await by_hand(client, prompt, 1, 1)
    fields = {"use_beam_search": True, "n": 1, "max_tokens": 2000, "length_penalty": 0, "ignore_eos": True}
    body = (await client.complete(prompt, **fields, stop_token_ids=list(first))).json()
    (choice,) = body["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", first[0])
    assert body["usage"]["completion_tokens"] == 1


async def test_length_weighs_as_asked():
    short = Beam((1, 2), -3.0, (), FinishReason.STOP)
    long = Beam((1, 2, 3, 4), -4.0, (), FinishReason.LENGTH)
    assert short.score(0, 0.0) > long.score(0, 0.0)
    assert long.score(0, 1.0) > short.score(0, 1.0) == -3.0  # an end-of-sequence token adds no length
    assert short.score(0, -1.0) > long.score(0, -1.0)


async def test_chat_prompts_and_logprobs_go_with_beams(client):
    fields = {"use_beam_search": True, "n": 2, "max_tokens": 3}
    body = (await client.chat("hi", **fields, logprobs=True, top_logprobs=2, prompt_logprobs=0)).json()
    for choice in body["choices"]:
        entries = choice["logprobs"]["content"]
        assert len(entries) == 3
        assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    assert len(body["prompt_logprobs"]) == body["usage"]["prompt_tokens"]
    both = (await client.complete(["one", "two"], **fields)).json()
    assert [choice["index"] for choice in both["choices"]] == [0, 1, 2, 3]
    alone = (await client.complete("two", **fields)).json()
    assert [c["text"] for c in both["choices"][2:]] == [c["text"] for c in alone["choices"]]


async def test_beams_of_a_picture_keep_its_places(client):
    from tests.server.live import picture

    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture()}"}}
    messages = [{"role": "user", "content": [part, {"type": "text", "text": "what is it?"}]}]
    greedy = (await client.chat(messages=messages, temperature=0, max_tokens=5)).json()
    one = (await client.chat(messages=messages, use_beam_search=True, n=1, max_tokens=5)).json()
    assert one["choices"][0]["message"] == greedy["choices"][0]["message"]
    assert one["usage"]["prompt_tokens_details"]["multimodal_tokens"]


async def test_a_search_can_be_left_and_aborted(client, state):
    body = {"prompt": "hi", "use_beam_search": True, "n": 4, "max_tokens": 4000, "ignore_eos": True, "request_id": "b"}
    call = client.call("POST", "/v1/completions", body).start()
    await begun(client, 1)
    call.leave()
    await call.finish()
    assert (await quiet(state))["routes"] == 0
    call = client.call("POST", "/v1/completions", body).start()
    await begun(client, 2)
    await client.post("/abort_requests", {"request_ids": ["cmpl-b"]})
    await call.finish()
    assert {choice["finish_reason"] for choice in call.json()["choices"]} == {"abort"}
    assert (await quiet(state))["routes"] == client.state.places.taken == 0


async def begun(client, count: int) -> None:
    """Waits until `count` searches have made their first tokens."""
    for _ in range(1000):
        if sum(client.state.metrics.histograms["time_to_first_token_seconds"].counts) >= count:
            return
        await asyncio.sleep(0.005)


async def test_a_search_past_its_deadline_is_504(serve, state):
    reply = await serve(limits={"request_timeout": 0.2}).complete(
        "hi", use_beam_search=True, n=2, max_tokens=4000, ignore_eos=True
    )
    assert reply.status == 504
    assert (await quiet(state))["routes"] == 0


async def test_beams_refuse_what_they_would_ignore(client):
    for fields, param in (
        ({"echo": True, "max_tokens": 0, "logprobs": 1}, "max_tokens"),
        ({"logprob_token_ids": [5]}, "logprob_token_ids"),
        ({"min_tokens": 2}, "min_tokens"),
        ({"bad_words": ["a"]}, "bad_words"),
        ({"frequency_penalty": 1}, "frequency_penalty"),
    ):
        reply = await client.complete("a", use_beam_search=True, **fields)
        assert (reply.status, reply.error["param"]) == (400, param)
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert (await client.chat(use_beam_search=True, tools=tools, tool_choice="none")).error[
        "param"
    ] == "use_beam_search"


async def test_a_search_is_past_the_queue_with_its_first_token(client):
    reply = await client.complete("hi", use_beam_search=True, n=3, max_tokens=60, ignore_eos=True)
    assert reply.status == 200, reply.content
    times = client.state.metrics.histograms
    assert 0 < times["time_to_first_token_seconds"].total < times["e2e_request_latency_seconds"].total / 3


# -- under a grammar

CHOICES = ["yes", "yes, indeed", "no", "nobody knows", "maybe"]


async def held_by_hand(client, state, prompt, structure, width, rounds):
    """The definition: each allowed token of each beam, by its log-probability in the model's own distribution."""
    grammar = await state.grammars.get(structure.key, structure.make)
    beams, ended = [((), 0.0)], []
    eos = state.vocabulary.eos
    for _ in range(rounds):
        grown = []
        for tokens, total in beams:
            matcher = grammar.matcher()
            assert matcher.try_consume_tokens(list(tokens)) == len(tokens)
            allowed = [token for token in allowed_ids(matcher).tolist() if token < grammar.vocabulary.end]
            may_end = len(allowed) < len(allowed_ids(matcher))
            fields = {"max_tokens": 1, "temperature": 0, "return_tokens_as_token_ids": True}
            asked = [*allowed, *(eos if may_end else ())]
            body = await client.post(
                "/v1/completions", {"prompt": [*prompt, *tokens], "logprob_token_ids": asked, **fields}
            )
            told = body.json()["choices"][0]["logprobs"]["top_logprobs"][0]
            found = sorted(((token, told[f"token_id:{token}"]) for token in asked), key=lambda pair: -pair[1])
            for token, logprob in found[: 2 * width]:
                beam = ((*tokens, token), total + logprob)
                if token in eos:
                    ended.append(beam)
                    continue
                copy = matcher.deep_copy()
                assert copy.consume_token(token)
                (ended if copy.is_stopped() else grown).append(beam)
        beams = sorted(grown, key=lambda beam: -beam[1])[:width]

    def score(beam):
        return beam[1] / (len(prompt) + len(beam[0]) - (beam[0][-1] in eos))

    return [tokens for tokens, _ in sorted([*ended, *beams], key=score, reverse=True)[:width]]


@pytest.mark.parametrize("few", [1024, 2])  # up to `few` tokens are requested by id
async def test_beams_under_a_grammar_equal_their_definition(client, state, monkeypatch, few):
    monkeypatch.setattr(beam_lines, "MOST_LISTED", few)
    prompt, asked = state.tokenizer.encode("the quick brown"), {"choice": CHOICES}
    body = CompletionBody(prompt="", structured_outputs=asked)
    wanted = await held_by_hand(client, state, prompt, structure_of(body, state.config.limits), 3, 8)
    fields = {"use_beam_search": True, "n": 3, "max_tokens": 8, "ignore_eos": False, "structured_outputs": asked}
    reply = await client.complete(prompt, **fields, return_token_ids=True)
    assert reply.status == 200, reply.content
    choices = reply.json()["choices"]
    assert [tuple(choice["token_ids"]) for choice in choices] == wanted
    assert all(choice["text"] in CHOICES and choice["finish_reason"] == "stop" for choice in choices)
    ledger = await quiet(state)
    assert (ledger["routes"], ledger["matchers"]) == (0, 0)


async def test_beams_of_chat_fit_a_schema(client):
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "boolean"}},
        "required": ["a", "b"],
    }
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    fields = {"use_beam_search": True, "n": 4, "max_tokens": 40, "ignore_eos": False, "response_format": form}
    body = (await client.chat("hi", **fields, logprobs=True, top_logprobs=1)).json()
    texts = [choice["message"]["content"] for choice in body["choices"]]
    assert len(texts) == 4
    for text, choice in zip(texts, body["choices"]):
        jsonschema.validate(json.loads(text), schema)
        assert len(choice["logprobs"]["content"][0]["top_logprobs"]) == 1
