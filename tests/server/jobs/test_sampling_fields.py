"""Every sampling field of the contract changes the engine's request or the answer; each test fails if it is ignored."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import math
import shutil

import numpy as np
import pytest

import engine.run.start
from _fast.detok import TokenTable
from engine.base.errors import ConfigError
from engine.base.request import SamplingParams
from server.errors import ApiError
from server.flags.config import Config
from server.jobs.sampling import check_defaults, defaults_from, in_range, resolve
from server.render.vocabulary import Vocabulary
from server.schema.common import RepetitionFields, SamplingFields
from server.start import load
from tests import tiny
from tests.engine.host_accelerator import HostAccelerator
from tests.server.conftest import config_of, maker, ready

pytestmark = pytest.mark.asyncio(loop_scope="session")

TEXTS = [b"a", b'"', b"ba", b"c", b"", b"d", b"e", b"f", b"c\n"]  # the other tokens have none
VOCABULARY = Vocabulary(
    100,
    (99,),
    lambda text: [40 + len(text)],
    lambda param: None,
    TokenTable(b"".join(TEXTS), np.cumsum([0, *map(len, TEXTS)], dtype=np.int32), bytes(len(TEXTS))),
)


@pytest.fixture
def ids(state):
    """A function: text -> token ids."""
    return lambda text: state.tokenizer.encode(text)


def asked(defaults=None, config: Config | None = None, **fields):
    """The sampling parameters that a body with these fields gets."""
    body = SamplingFields(**fields)
    return resolve(body, None, fields.get("max_tokens"), defaults or {}, config or config_of(), VOCABULARY)


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({"max_tokens": 7}, "max_tokens", 7),
        ({"temperature": 0.3}, "temperature", 0.3),
        ({"temperature": 0.001}, "temperature", 0.01),
        ({"temperature": 0}, "temperature", 0.0),
        ({"top_p": 0.4}, "top_p", 0.4),
        ({"top_k": 5}, "top_k", 5),
        ({"top_k": -1}, "top_k", 0),
        ({"min_p": 0.2}, "min_p", 0.2),
        ({"presence_penalty": 0.5}, "presence_penalty", 0.5),
        ({"frequency_penalty": -0.5}, "frequency_penalty", -0.5),
        ({"repetition_penalty": 1.3}, "repetition_penalty", 1.3),
        ({"dry_multiplier": 0.8}, "dry_multiplier", 0.8),
        ({"dry_base": 1.5}, "dry_base", 1.5),
        ({"dry_allowed_length": 3}, "dry_allowed_length", 3),
        ({"dry_penalty_last_n": 64}, "dry_penalty_last_n", 64),
        ({"dry_multiplier": 1, "dry_sequence_breakers": ["a", "c\n"]}, "dry_breakers", bytes([0b101, 0b1, *bytes(11)])),
        (
            {"dry_multiplier": 1},
            "dry_breakers",
            bytes([0b10, 0b1, *bytes(11)]),
        ),  # tokens with a line end, a colon, a quote or a star
        ({"dry_multiplier": 1, "dry_sequence_breakers": []}, "dry_breakers", bytes(13)),
        ({"top_n_sigma": 1.5}, "top_n_sigma", 1.5),
        ({"top_n_sigma": -1}, "top_n_sigma", 0.0),
        ({"xtc_probability": 0.5}, "xtc_probability", 0.5),
        ({"xtc_threshold": 0.25}, "xtc_threshold", 0.25),
        ({"seed": 11}, "seed", 11),
        ({"seed": -1}, "seed", None),
        ({"ignore_eos": True}, "ignore_eos", True),
        ({"stop_token_ids": [4, 5]}, "stop_token_ids", (4, 5)),
        ({"min_tokens": 2, "max_tokens": 3}, "min_tokens", 2),
        ({"logit_bias": {"3": 100}}, "logit_bias", ((3, 100.0),)),
        ({"allowed_token_ids": [1]}, "allowed_token_ids", (1,)),
        ({"bad_words": ["ab"]}, "bad_words", ((42,), (43,))),  # tokens of the word without and with a leading space
        ({"prompt_logprobs": 2}, "prompt_logprobs", 2),
        ({"logprob_token_ids": [8]}, "logprob_token_ids", (8,)),
        ({"logprob_token_ids": [8]}, "logprobs", 0),
    ],
)
async def test_the_field_reaches_the_engine(fields, name, value):
    assert getattr(asked(**fields).params, name) == value
    assert getattr(asked().params, name) != value or value in (None, 0.0, 0)


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({"n": 3}, "n", 3),
        ({"stop": "x"}, "stop", ("x",)),
        ({"stop": ["x", "yz"]}, "stop", ("x", "yz")),
        ({"include_stop_str_in_output": True}, "include_stop", True),
        ({"stream": True}, "stream", True),
        ({"stream": True, "stream_interval": 5}, "interval", 5),
        ({"use_beam_search": True}, "beam", True),
        ({"length_penalty": 0.5}, "length_penalty", 0.5),
        ({"max_tokens": 5}, "max_tokens", 5),
    ],
)
async def test_the_field_reaches_the_answer(fields, name, value):
    assert getattr(asked(**fields), name) == value
    assert getattr(asked(), name) != value


async def test_defaults_come_from_checkpoint_operator_and_request_in_this_order():
    generation = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05, "max_new_tokens": 9}
    generation |= {"top_n_sigma": 2.0}
    found = defaults_from(generation, {"top_k": 7, "presence_penalty": 0.25, "xtc_probability": 0.5})
    params = asked(found, top_p=0.5).params
    assert (params.temperature, params.top_k, params.top_p) == (0.6, 7, 0.5)
    assert (params.repetition_penalty, params.presence_penalty) == (1.05, 0.25)
    assert (params.top_n_sigma, params.xtc_probability) == (2.0, 0.5)
    assert found["max_new_tokens"] == 9
    assert defaults_from({"do_sample": False, "temperature": 0.7, "top_p": 0.9}, {})["temperature"] == 0.0
    assert defaults_from({"do_sample": False}, {"temperature": 0.4})["temperature"] == 0.4


@pytest.mark.parametrize("where", ["cpu", "device path"])
async def test_a_penalty_of_the_checkpoint_holds_for_a_request_that_names_none(
    tiny_client, tmp_path, monkeypatch, where
):
    """Checkpoints of the Qwen2.5 family set a repetition penalty; a request may override it."""
    folder = shutil.copytree(tiny.checkpoint("qwen3"), tmp_path / "penalised")
    generation = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**generation, "repetition_penalty": 1.9}))
    if where != "cpu":
        monkeypatch.setattr(engine.run.start, "open_accelerator", lambda device: HostAccelerator())
    body = {"prompt": list(range(20, 40)), "max_tokens": 24, "ignore_eos": True, "return_token_ids": True}

    async def said(client, **fields) -> list[int]:
        answer = await client.post("/v1/completions", {**body, **fields})
        return answer.json()["choices"][0]["token_ids"]

    async with ready(config_of(model={"model": str(folder), "num_threads": 1})) as state:
        client = maker(state)()
        assert state.defaults["repetition_penalty"] == 1.9
        penalised, plain = await said(client), await said(client, repetition_penalty=1.0)
    assert penalised == await said(tiny_client, repetition_penalty=1.9)
    assert plain == await said(tiny_client)
    assert len(set(penalised)) > len(set(plain))


async def test_dry_ends_a_repetition_and_its_breakers_let_it_pass(tiny_client):
    """The tiny model repeats itself; with DRY it does not, unless every token of its answer breaks repetitions."""
    body = {"prompt": list(range(40, 60)), "max_tokens": 40, "ignore_eos": True, "temperature": 0}

    async def said(**fields) -> str:
        return (await tiny_client.post("/v1/completions", {**body, **fields})).json()["choices"][0]["text"]

    plain, dry = await said(), await said(dry_multiplier=20, dry_allowed_length=1)
    words = sorted(set(plain))
    assert len(set(dry)) > len(words)
    assert await said(dry_multiplier=20, dry_penalty_last_n=0) == plain
    assert await said(dry_multiplier=20, dry_sequence_breakers=words) == plain


async def test_generation_config_vllm_ignores_the_checkpoint(serve, state):
    from server.start.load import complete

    assert state.defaults["temperature"] == 0.0  # from the embedded model's generation_config.json
    client = serve(model={"generation_config": "vllm", "override_generation_config": {"top_k": 3}})
    try:
        complete(client.state)
    finally:
        state.engine.on_step = state.metrics.step
    assert client.state.defaults == {"top_k": 3}


async def test_max_new_tokens_of_the_operator_is_the_default_length(serve):
    client = serve()
    client.state.defaults = {**client.state.defaults, "max_new_tokens": 3}
    body = (await client.chat(max_tokens=None)).json()
    assert body["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("fields", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 0}])
async def test_the_narrowest_cut_is_greedy(client, fields):
    greedy = (await client.chat(temperature=0, max_tokens=12)).json()["choices"][0]["message"]
    hot = {"temperature": 2.0, "max_tokens": 12, "seed": 5}
    assert (await client.chat(**{**hot, **fields})).json()["choices"][0]["message"] == greedy
    assert (await client.chat(**hot)).json()["choices"][0]["message"] != greedy


async def test_several_choices_at_temperature_0_are_allowed_and_equal(client):
    choices = (await client.chat(temperature=0, n=3)).json()["choices"]
    assert len({choice["message"]["content"] for choice in choices}) == 1
    assert len(choices) == 3


async def test_penalties_move_the_answer_away_from_what_was_said(client, ids):
    pair = [ids(" the")[0], ids("a")[0]]
    fields = {"allowed_token_ids": pair, "temperature": 0, "max_tokens": 60, "return_token_ids": True}
    for name in ("frequency_penalty", "presence_penalty", "repetition_penalty"):
        plain, moved = await asyncio.gather(client.chat(**fields), client.chat(**fields, **{name: 2.0}))
        plain_ids, moved_ids = (reply.json()["choices"][0]["token_ids"] for reply in (plain, moved))
        if name == "frequency_penalty":
            assert abs(moved_ids.count(pair[0]) - 30) <= 12, "each repetition costs 2: the two must take turns"
        assert plain_ids.count(pair[0]) + plain_ids.count(pair[1]) == 60


async def test_requested_ids_are_reported_with_the_likeliest(client, ids, state):
    wanted = [ids(" the")[0], ids("a")[0]]
    chat = (await client.chat(logprobs=True, top_logprobs=1, logprob_token_ids=wanted, temperature=0)).json()
    for entry in chat["choices"][0]["logprobs"]["content"]:
        assert [top["token"] for top in entry["top_logprobs"][1:]] == [
            state.tokenizer.token_text(one) for one in wanted
        ]
        assert entry["top_logprobs"][0]["logprob"] >= entry["top_logprobs"][1]["logprob"]
    streamed = (await client.chat(logprob_token_ids=wanted, stream=True, temperature=0)).events()
    entries = [e["choices"][0]["logprobs"] for e in streamed[:-1] if e["choices"][0]["logprobs"]]
    assert all(len(entry["top_logprobs"]) == 2 for piece in entries for entry in piece["content"])
    plain = (await client.complete(logprob_token_ids=wanted, return_tokens_as_token_ids=True, temperature=0)).json()
    for top in plain["choices"][0]["logprobs"]["top_logprobs"]:
        assert {f"token_id:{one}" for one in wanted} <= set(top)


async def test_the_whole_vocabulary_is_reported_only_where_the_operator_allows_it(client, serve, state):
    refused = await client.chat(logprobs=True, top_logprobs=-1)
    assert refused.error["param"] == "top_logprobs"
    # The engine's own limit follows the edge's: a request beyond it never reaches the device.
    open_edge = serve(limits={"max_logprobs": -1})
    assert (await open_edge.chat(logprobs=True, top_logprobs=-1)).status == 400


async def test_tokens_are_written_as_ids_by_field_or_flag(client, serve):
    flagged = serve(chat={"return_tokens_as_token_ids": True})
    for reply in (
        await client.chat(logprobs=True, return_tokens_as_token_ids=True),
        await flagged.chat(logprobs=True),
    ):
        assert reply.json()["choices"][0]["logprobs"]["content"][0]["token"].startswith("token_id:")
    named = await flagged.complete(logprobs=0, return_tokens_as_token_ids=False)
    assert not named.json()["choices"][0]["logprobs"]["tokens"][0].startswith("token_id:")


async def test_chunks_are_never_smaller_than_the_servers_interval(serve):
    client = serve(scheduler={"stream_interval": 4})
    for fields in ({}, {"stream_interval": 2}):
        reply = await client.chat(stream=True, max_tokens=9, **fields)
        assert len(reply.writes) <= 4
    wide = await client.chat(stream=True, max_tokens=9, stream_interval=8)
    assert len(wide.writes) <= 3


async def test_echo_says_the_last_message_again_before_the_answer(client):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "The answer is"}]
    fields = {"messages": messages, "continue_final_message": True, "temperature": 0, "n": 2}
    plain = (await client.chat(**fields)).json()["choices"][0]["message"]["content"]
    for choice in (await client.chat(**fields, echo=True)).json()["choices"]:
        assert choice["message"]["content"] == "The answer is" + plain
    events = (await client.chat(**fields, echo=True, stream=True)).events()
    pieces = [e["choices"][0]["delta"].get("content", "") for e in events[:-1] if e["choices"][0]["index"] == 1]
    assert pieces[:2] == ["", "The answer is"]
    assert "".join(pieces) == "The answer is" + plain
    messages[-1]["content"] = [{"type": "text", "text": "The answer is"}]
    assert (await client.chat(**fields, echo=True)).json()["choices"][0]["message"]["content"].startswith("The answer")
    assert (await client.chat("hi", echo=True, temperature=0)).json()["choices"][0]["message"]["content"] == (
        await client.chat("hi", temperature=0)
    ).json()["choices"][0]["message"]["content"]


async def test_answers_have_the_role_that_the_operator_named(serve):
    client = serve(chat={"response_role": "model"})
    assert (await client.chat()).json()["choices"][0]["message"]["role"] == "model"
    assert (await client.chat(stream=True)).events()[0]["choices"][0]["delta"] == {"role": "model", "content": ""}


async def test_repetition_ends_an_answer(client, ids):
    token = ids(" the")[0]
    rule = {"max_pattern_size": 3, "min_pattern_size": 1, "min_count": 4}
    fields = {"allowed_token_ids": [token], "max_tokens": 50, "return_token_ids": True, "repetition_detection": rule}
    (choice,) = (await client.chat(**fields)).json()["choices"]
    assert choice["finish_reason"] == "repetition"
    assert choice["token_ids"] == [token] * 4
    assert choice["message"]["content"] == " the the the the"
    (choice,) = (await client.chat(**fields, min_tokens=9)).json()["choices"]
    assert len(choice["token_ids"]) == 9
    last = (await client.complete("a", stream=True, **fields)).events()[-2]
    assert last["choices"][0]["finish_reason"] == "repetition"
    assert client.state.metrics.finished["repetition"] == 3
    rule["min_pattern_size"] = 3
    assert len((await client.chat(**fields)).json()["choices"][0]["token_ids"]) == 12  # three tokens, four times
    rule["max_pattern_size"] = 0
    assert (await client.chat(**fields)).json()["choices"][0]["finish_reason"] == "length"


async def test_rules_of_repetition_are_read_as_sent():
    found = asked(repetition_detection=RepetitionFields(max_pattern_size=5, min_pattern_size=2, min_count=3)).repetition
    assert (found.shortest, found.longest, found.min_count) == (2, 5, 3)


async def test_truncation_keeps_the_side_that_was_asked_for(client, state):
    ids = state.tokenizer.encode("one two three four five six")
    for side, kept in ((None, ids[-3:]), ("left", ids[-3:]), ("right", ids[:3])):
        body = (
            await client.complete(ids, truncate_prompt_tokens=3, truncation_side=side, return_token_ids=True)
        ).json()
        assert body["choices"][0]["prompt_token_ids"] == kept
    chat = (await client.chat("one two three", truncate_prompt_tokens=5)).json()
    assert chat["usage"]["prompt_tokens"] == 5


async def test_priority_goes_by_field_or_header_where_the_policy_looks_at_it(client, serve, monkeypatch):
    seen = []
    submit = client.state.engine.submit
    monkeypatch.setattr(client.state.engine, "submit", lambda request: seen.append(request) or submit(request))
    assert (await client.chat(priority=1)).error["param"] == "priority"
    by_priority = serve(scheduler={"scheduling_policy": "priority"})
    await by_priority.chat(priority=-4)
    await by_priority.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, headers={"X-Vllm-Priority": "6"})
    await client.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, headers={"X-Vllm-Priority": "6"})
    assert [request.priority for request in seen] == [-4, 6, 0]


async def test_request_id_names_the_answer(client):
    assert (await client.chat(request_id="mine")).json()["id"] == "chatcmpl-mine"
    assert (await client.complete(request_id="mine")).json()["id"] == "cmpl-mine"
    assert (await client.complete(request_id="a\nb")).error["param"] == "request_id"


async def test_special_tokens_are_added_and_skipped_as_asked(client, ids, state):
    special = state.vocabulary.eos[0]
    fields = {"allowed_token_ids": [special], "ignore_eos": True, "max_tokens": 2}
    assert (await client.chat(**fields)).json()["choices"][0]["message"]["content"] == ""
    shown = (await client.chat(**fields, skip_special_tokens=False)).json()["choices"][0]["message"]["content"]
    assert shown == state.tokenizer.token_text(special) * 2


async def test_numbers_the_engine_gets_are_finite(client):
    for name in ("temperature", "top_p", "presence_penalty", "length_penalty"):
        reply = await client.post("/v1/completions", body=b'{"prompt": "a", "%s": 1e999}' % name.encode())
        assert reply.status == 400
    assert all(math.isfinite(v) for v in dataclasses.asdict(SamplingParams()).values() if isinstance(v, float))


async def test_processed_logprobs_of_the_whole_vocabulary_where_the_operator_chose_so():
    model = {"model": str(tiny.checkpoint("qwen3")), "num_threads": 1, "logprobs_mode": "processed_logprobs"}
    config = config_of(model=model, limits={"max_logprobs": -1})
    assert config.engine().logprobs_mode == "processed_logprobs"
    async with ready(config) as state:
        client = maker(state)(model=model, limits={"max_logprobs": -1})
        fields = {"logprobs": True, "top_logprobs": -1, "temperature": 1, "allowed_token_ids": [65, 66]}
        body = (await client.chat(**fields)).json()
        for entry in body["choices"][0]["logprobs"]["content"]:
            values = [top["logprob"] for top in entry["top_logprobs"]]
            assert len(values) == state.vocabulary.width
            assert math.exp(values[0]) + math.exp(values[1]) == pytest.approx(1.0, abs=1e-5)
            assert set(values[2:]) == {-9999.0}
        told = (await client.complete("ab", echo=True, logprobs=-1, max_tokens=0)).json()["choices"][0]["logprobs"]
        assert len(told["top_logprobs"][1]) >= state.tokenizer.vocab_size  # ids beyond the vocabulary have no text
        assert (await client.chat(use_beam_search=True)).status == 501  # beams add raw log-probabilities


async def test_max_completion_tokens_wins(client):
    body = (await client.chat(max_tokens=9, max_completion_tokens=2)).json()
    assert body["usage"]["completion_tokens"] == 2


async def test_the_prompt_is_made_as_asked(client, serve):
    plain = (await client.chat("hi", return_prompt_text=True)).json()["prompt_text"]
    open_end = (await client.chat("hi", return_prompt_text=True, add_generation_prompt=False)).json()["prompt_text"]
    assert plain.startswith(open_end)
    assert len(plain) > len(open_end)
    template = "{{ documents[0].title }}|{{ messages[0].content }}|{{ mood }}"
    fields = {"chat_template": template, "documents": [{"title": "T", "text": "x"}], "return_prompt_text": True}
    refused = await client.chat("hi", **fields)
    assert (refused.status, refused.error["param"]) == (403, "chat_template")
    trusting = serve()
    settings = dataclasses.replace(trusting.state.renderer.config, trust_request_chat_template=True)
    trusting.state.renderer = type(trusting.state.renderer)(trusting.state.tokenizer, settings, trusting.state.pool)
    body = (await trusting.chat("hi", **fields, chat_template_kwargs={"mood": "m"})).json()
    assert body["prompt_text"] == "T|hi|m"


async def test_fields_without_effect_here_are_taken(client):
    plain = (await client.chat(temperature=0)).json()["choices"]
    quiet = {"include_reasoning": False, "spaces_between_special_tokens": False, "parallel_tool_calls": False}
    quiet |= {"user": "u", "metadata": {"a": 1}, "store": True, "session_id": "s", "best_of": 1}
    reply = await client.chat(temperature=0, **quiet)
    assert reply.json()["choices"] == plain


async def test_the_error_of_a_number_out_of_range_has_its_limits_in_plain_digits():
    with pytest.raises(ApiError) as caught:
        in_range("max_tokens", 0, 1, 2**31 - 1)
    assert str(caught.value) == "max_tokens: got 0; must be 1 to 2147483647"


@pytest.mark.parametrize(
    ("defaults", "said"),
    [
        ({"temperature": "hot"}, "temperature: got hot; must be 0 to 2"),
        ({"max_new_tokens": 0}, "max_new_tokens: got 0; must be 1 to"),
        ({"top_p": 0.0}, "top_p: got 0.0; must be greater than 0"),
    ],
)
async def test_defaults_that_would_refuse_every_request_end_the_start(state, defaults, said):
    with pytest.raises(ConfigError, match=said):
        check_defaults(defaults, state.config, VOCABULARY)
    check_defaults(state.defaults, state.config, VOCABULARY)


async def test_the_models_sampling_defaults_are_logged_at_start(caplog):
    caplog.set_level(logging.INFO, "omniloop")
    async with ready(config_of(model={"override_generation_config": {"temperature": 0.25}})):
        pass
    (line,) = [record.getMessage() for record in caplog.records if "sampling defaults" in record.getMessage()]
    assert "temperature=0.25" in line
    assert "--generation-config vllm" in line
    caplog.clear()
    load.log_defaults({})
    assert not caplog.records
