"""llama.cpp's /completion and /infill: the texts of /v1, every form of prompt, events, gaps among files, refusals."""

from __future__ import annotations

import base64
from types import SimpleNamespace

import numpy as np
import orjson
import pytest

from server.errors import ApiError
from server.output import line_limit
from tests import pooling_kit
from tests.mm import made as media
from tests.server.conftest import until
from tests.server.live import GAP, picture, use_gaps, use_template, without_end
from tests.server.scripted import play

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def text_of(client, prompt, **fields):
    reply = await client.post("/v1/completions", {"prompt": prompt, "max_tokens": 6, **fields})
    return reply.json()["choices"][0]["text"]


def events_of(reply):
    assert reply.reply_headers["content-type"].startswith("text/event-stream")
    return reply.events()


# -- /completion


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({}, {}),
        ({"temperature": 1.8, "seed": 5, "top_k": 40, "top_p": 0.9, "min_p": 0.01}, None),
        ({"repeat_penalty": 1.5, "presence_penalty": 0.5}, {"repetition_penalty": 1.5, "presence_penalty": 0.5}),
        ({"repeat_penalty": 1.5, "repeat_last_n": 0, "frequency_penalty": 0.5}, {"frequency_penalty": 0.5}),
        ({"logit_bias": [[300, 90], ["a", False]]}, {"logit_bias": {"300": 90}}),
        ({"logit_bias": {"300": 90}}, {"logit_bias": {"300": 90}}),
        ({"stop": [","], "ignore_eos": True}, None),
        ({"json_schema": {"enum": [1, 2]}}, {"structured_outputs": {"json": {"enum": [1, 2]}}}),
        ({"grammar": 'root ::= "yes" | "no"'}, {"structured_outputs": {"grammar": 'root ::= "yes" | "no"'}}),
    ],
)
async def test_the_text_is_that_of_v1(client, theirs, ours):
    wanted = await text_of(client, "1 2 3", **(theirs if ours is None else ours))
    body = {"prompt": "1 2 3", "n_predict": 6, **theirs}
    for path in ("/completion", "/completions"):
        whole = await client.post(path, body)
        assert whole.status == 200, whole.content
        assert whole.json()["content"] == wanted
    *parts, last = events_of(await client.post("/completion", {**body, "stream": True}))
    assert "".join(part["content"] for part in parts) == wanted
    assert (last["content"], last["stop"]) == ("", True)
    assert not any(part["stop"] for part in parts)


async def test_an_answer_has_llama_cpps_fields(client):
    made = (await client.post("/completion", {"prompt": "1 2 3", "n_predict": 4, "return_tokens": True})).json()
    ours = await client.post("/v1/completions", {"prompt": "1 2 3", "max_tokens": 4, "return_token_ids": True})
    assert made["tokens"] == ours.json()["choices"][0]["token_ids"]
    usage = ours.json()["usage"]
    assert (made["tokens_predicted"], made["tokens_evaluated"]) == (4, usage["prompt_tokens"])
    assert made["tokens_cached"] == usage["total_tokens"]
    assert (made["prompt"], made["model"], made["stop_type"], made["truncated"]) == (
        "1 2 3",
        "omniloop",
        "limit",
        False,
    )
    assert made["generation_settings"]["n_predict"] == 4
    timings = made["timings"]
    assert timings["predicted_n"] == 4
    assert timings["prompt_n"] + timings["cache_n"] == usage["prompt_tokens"]
    assert timings["predicted_per_second"] == pytest.approx(4000 / timings["predicted_ms"])
    ended = await client.post("/completion", {"prompt": "1 2 3", "stop": ["2"], "n_predict": 9})
    assert (ended.json()["stop_type"], ended.json()["stopping_word"]) == ("word", "2")
    bias = [[client.state.vocabulary.eos[0], 100]]
    assert (await client.post("/completion", {"prompt": "a", "logit_bias": bias})).json()["stop_type"] == "eos"


async def test_probabilities_are_those_of_completions(client):
    body = {"prompt": "1 2 3", "n_predict": 3, "n_probs": 2}
    ours = await client.post("/v1/completions", {"prompt": "1 2 3", "max_tokens": 3, "logprobs": 2})
    wanted = ours.json()["choices"][0]["logprobs"]["token_logprobs"]
    whole = (await client.post("/completion", body)).json()["completion_probabilities"]
    streamed = events_of(await client.post("/completion", {**body, "stream": True}))
    parts = [one for event in streamed for one in event.get("completion_probabilities", ())]
    for made in (whole, parts):
        assert [one["logprob"] for one in made] == pytest.approx(wanted, abs=1e-4)
        assert [len(one["top_logprobs"]) for one in made] == [2, 2, 2]
        assert [one["id"] for one in made] == [one["id"] for one in whole]
        assert made[0]["top_logprobs"][0]["id"] == made[0]["id"]


async def test_prompts_have_many_forms(client):
    encode = client.state.tokenizer.encode
    wanted = await text_of(client, "1 2 3")
    ids = encode("1 2 3", True)
    mixed = [*ids[:2], *[client.state.tokenizer.decode(ids[2:])]]
    for prompt in (ids, mixed, {"prompt_string": "1 2 3"}):
        made = (await client.post("/completion", {"prompt": prompt, "n_predict": 6})).json()
        assert made["content"] == wanted, prompt
    several = (
        await client.post("/completion", {"prompt": ["1 2 3", ids, {"prompt_string": "a"}], "n_predict": 6})
    ).json()
    assert [one["index"] for one in several] == [0, 1, 2]
    assert [one["content"] for one in several] == [wanted, wanted, await text_of(client, "a")]
    alone = (await client.post("/completion", {"prompt": ["1 2 3"], "n_predict": 6})).json()
    assert [one["content"] for one in alone] == [wanted]
    streamed = events_of(await client.post("/completion", {"prompt": ["1 2 3", "a"], "n_predict": 6, "stream": True}))
    first = "".join(event["content"] for event in streamed if event["index"] == 0)
    assert first == wanted
    assert sum(event["stop"] for event in streamed) == 2


async def test_media_stand_where_the_marker_is(client):
    sound = base64.b64encode(media.sound(media.tone(0.5))).decode()
    spelled, part = client.state.renderer.media.placeholders, {"image": picture("red"), "audio": sound}
    kinds = {"image": "image_url", "audio": "audio_url"}
    for kind, data in part.items():
        content = [{"type": kinds[kind], kinds[kind]: {"url": f"data:{kind}/any;base64,{data}"}}]
        ask = [{"role": "user", "content": [*content, {"type": "text", "text": "what is it?"}]}]
        chat = await client.post("/v1/chat/completions", {"messages": ask, "max_tokens": 6})
        wanted = chat.json()["choices"][0]["message"]["content"]
        rendered = (await client.post("/apply-template", {"messages": ask})).json()["prompt"]
        marked = {"prompt_string": rendered.replace(spelled[kind], "<__media__>"), "multimodal_data": [data]}
        made = await client.post("/completion", {"prompt": marked, "n_predict": 6})
        assert made.status == 200, made.content
        assert made.json()["content"] == wanted
        both = await client.post("/completion", {"prompt": [marked, "1 2 3"], "n_predict": 6})
        assert [one["content"] for one in both.json()] == [wanted, await text_of(client, "1 2 3")]
    broken = [{"prompt_string": "<__media__>", "multimodal_data": ["!"]}]
    reply = await client.post("/completion", {"prompt": broken})
    assert (reply.status, reply.error["param"]) == (400, "prompt[0].multimodal_data[0]")
    reply = await client.post("/completion", {"prompt": {**marked, "prompt_string": spelled["image"] + "<__media__>"}})
    assert (reply.status, reply.error["param"]) == (400, "prompt.prompt_string")


async def test_texts_and_tokens_have_llama_cpps_forms(client):
    tokenizer = client.state.tokenizer
    special = next(iter(tokenizer.special_spellings))
    for body, ids in (
        ({"content": "1 2 3"}, tokenizer.encode("1 2 3")),
        ({"content": "1 2 3", "add_special": True}, tokenizer.encode("1 2 3", True)),
        ({"content": f"a{special}"}, tokenizer.encode(f"a{special}")),
        ({"content": f"a{special}", "parse_special": False}, tokenizer.encode_segments([(f"a{special}", True)])),
    ):
        assert (await client.post("/tokenize", body)).json()["tokens"] == ids
    assert tokenizer.encode(f"a{special}") != tokenizer.encode_segments([(f"a{special}", True)])
    text = "é 漢"
    pieces = (await client.post("/tokenize", {"content": text, "with_pieces": True})).json()["tokens"]
    assert [one["id"] for one in pieces] == tokenizer.encode(text)
    data = [one["piece"].encode() if isinstance(one["piece"], str) else bytes(one["piece"]) for one in pieces]
    assert b"".join(data).decode() == text
    found = (await client.post("/detokenize", {"tokens": [one["id"] for one in pieces]})).json()
    assert found == {"content": text, "prompt": text}
    kind = {"content-type": "application/x-www-form-urlencoded"}
    assert (await client.post("/tokenize", body=b'{"content": "a"}', headers=kind)).status == 200
    for body, param in (
        ({"prompt": "a", "content": "a"}, "prompt"),
        ({}, "prompt"),
        ({"prompt": "a", "with_pieces": True}, "with_pieces"),
        ({"prompt": "a", "add_special": True}, "add_special"),
        ({"prompt": "a", "parse_special": False}, "parse_special"),
    ):
        reply = await client.post("/tokenize", body)
        assert (reply.status, reply.error["param"]) == (400, param)


async def test_no_tokens_compute_the_prompt_only(client):
    text = "a prompt that is sent twice " * 9
    for stream in (False, True):
        reply = await client.post("/completion", {"prompt": text, "n_predict": 0, "stream": stream})
        made = events_of(reply)[-1] if stream else reply.json()
        assert (made["content"], made["tokens_predicted"], made["stop_type"]) == ("", 0, "limit")
    again = (await client.post("/completion", {"prompt": text, "n_predict": 1})).json()
    assert again["timings"]["cache_n"] > 0


async def test_fields_are_selected_by_path(client):
    body = {"prompt": "1 2 3", "n_predict": 4, "response_fields": ["content", "timings/predicted_n", "nothing/at/all"]}
    made = (await client.post("/completion", body)).json()
    assert made == {"content": await text_of(client, "1 2 3", max_tokens=4), "timings/predicted_n": 4}


REFUSED = [
    ({"prompt": "a", "temperature": 9}, 400, "temperature"),
    ({"prompt": "a", "repeat_penalty": 9}, 400, "repeat_penalty"),
    ({"prompt": "a", "repeat_last_n": 64}, 400, "repeat_last_n"),
    ({"prompt": "a", "n_probs": 100}, 400, "n_probs"),
    ({"prompt": "a", "logit_bias": [[5]]}, 400, "logit_bias[0]"),
    ({"prompt": "a", "logit_bias": [[5, True]]}, 400, "logit_bias[0]"),
    ({"prompt": "a", "logit_bias": [[99999, 1]]}, 400, "logit_bias"),
    ({"prompt": "a", "json_schema": {"type": "objct"}}, 400, "json_schema.type"),
    ({"prompt": "a", "json_schema": {}, "grammar": "x"}, 400, "grammar"),
    ({"prompt": []}, 400, "prompt"),
    ({"prompt": 5}, 400, "prompt"),
    ({"prompt": [[1.5]]}, 400, "prompt[0]"),
    ({"prompt": {"text": "a"}}, 400, "prompt.prompt_string"),
    ({"prompt": [5, 99999]}, 400, "prompt[1]"),
    ({"prompt": ["a"] * 9999}, 400, "prompt"),
    ({"prompt": [5, *["a"] * 9999]}, 400, "prompt"),
    ({"prompt": {"prompt_string": "a", "multimodal_data": ["aGk="]}}, 400, "prompt.multimodal_data"),
    ({"prompt": {"prompt_string": "<__media__>", "multimodal_data": "aGk="}}, 400, "prompt.multimodal_data"),
    ({"prompt": {"prompt_string": 5, "multimodal_data": ["aGk="]}}, 400, "prompt.prompt_string"),
    ({"prompt": "a", "multimodal_data": ["aGk="]}, 400, "multimodal_data"),
    ({"prompt": "a", "model": "other"}, 404, "model"),
    ({}, 400, "prompt"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "status", "param"), REFUSED)
async def test_wrong_bodies_are_refused_by_the_clients_names(client, body, status, param):
    reply = await client.post("/completion", body)
    assert (reply.status, reply.error["param"]) == (status, param), reply.error
    assert reply.error["message"].startswith((param.partition("[")[0], "This model's", "model other")), reply.error


async def test_an_error_in_a_stream_is_an_event(client):
    without_end(client)
    call = client.call("POST", "/completion", {"prompt": "count", "stream": True}).start()
    await until(lambda: call.writes)
    for exchange in list(client.state.open_exchanges):
        exchange.answer_open.fail(ApiError(504, "deadline", "too long"))
    await call.finish()
    assert events_of(call)[-1]["error"]["message"] == "too long"


async def test_bodies_without_a_json_type_are_taken_if_no_page_sends_them(client):
    body, kind = orjson.dumps({"prompt": "hi", "n_predict": 1}), {"content-type": "application/x-www-form-urlencoded"}
    assert (await client.post("/completion", body=body, headers=kind)).status == 200
    page = {**kind, "origin": "http://localhost:8000", "host": "localhost:8000"}
    assert (await client.post("/completion", body=body, headers=page)).status == 415


# -- /infill


async def test_a_gap_is_filled_as_by_completions(client):
    use_gaps(client)
    wanted = await text_of(client, "1 + 1", suffix=" = 2")
    body = {"input_prefix": "1 + 1", "input_suffix": " = 2", "n_predict": 6}
    assert (await client.post("/infill", body)).json()["content"] == wanted
    editor = {
        "samplers": ["top_k", "top_p", "infill"],
        "id_slot": 0,
        "cache_prompt": True,
        "t_max_prompt_ms": 500,
        "n_indent": 4,
    }
    assert (await client.post("/infill", {**body, **editor})).json()["content"] == wanted
    streamed = events_of(await client.post("/infill", {**body, "stream": True}))
    assert "".join(event["content"] for event in streamed) == wanted
    warm = (await client.post("/infill", {**body, "n_predict": 0})).json()
    assert (warm["content"], warm["tokens_predicted"]) == ("", 0)


async def test_other_files_precede_the_gap_and_the_beginning_follows_it(client, submitted):
    use_gaps(client)
    decode = client.state.tokenizer.decode
    extra = [{"filename": "a.py", "text": "x = 1"}, {"filename": "b.py", "text": f"y = {GAP[0]}"}]
    body = {"input_prefix": "P", "input_suffix": "S", "prompt": "M", "input_extra": extra, "n_predict": 1}
    assert (await client.post("/infill", body)).status == 200
    ids = submitted[-1].prompt_token_ids.tolist()
    assert decode(ids) == f"a.py\nx = 1\nb.py\ny = {GAP[0]}\n{GAP[0]}P{GAP[1]}S{GAP[2]}M"
    markers = [client.state.tokenizer.id_of(name) for name in GAP]
    assert [token for token in ids if token in markers] == markers


async def test_what_does_not_fit_is_left_out(client):
    engine = play(client, *["fine"] * 4)
    use_gaps(client)
    most = client.state.engine.max_model_len
    text = "".join(f"{number} " for number in range(most))
    extra = [{"filename": f"{name}.py", "text": "z " * 4000} for name in "abc"]

    async def prompt_of(**fields):
        body = {"input_prefix": "P", "input_suffix": "S", "n_predict": 8, **fields}
        assert (await client.post("/infill", body)).status == 200
        ids = engine.requests[-1].prompt_token_ids.tolist()
        assert len(ids) <= most - 8
        return client.state.tokenizer.decode(ids), len(ids)

    prompt, _ = await prompt_of(input_extra=extra)
    assert "c.py" in prompt
    assert "a.py" not in prompt
    prompt, count = await prompt_of(input_prefix=text, input_suffix=text, input_extra=extra)
    before, after = prompt.removeprefix(GAP[0]).removesuffix(GAP[2]).split(GAP[1])
    assert (text.endswith(before), text.startswith(after)) == (True, True)
    assert ".py" not in prompt
    assert count > most - 12
    assert 2 < len(before) / len(after) < 4
    prompt, _ = await prompt_of(input_prefix=text * 40, input_suffix="")
    assert prompt.endswith(f"{most - 1} {GAP[1]}{GAP[2]}")


async def test_an_answer_ends_with_a_line_when_its_time_is_over(client, monkeypatch):
    use_gaps(client)
    newline = client.state.tokenizer.encode("\n")
    without_end(client)
    client.state.renderer.fill_in.ends = ()
    assert len(newline) == 1
    body = {"input_prefix": "a", "input_suffix": "b", "n_predict": 40, "logit_bias": [[newline[0], 100]]}
    clock = iter(range(100))
    monkeypatch.setattr(line_limit, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    for stream in (False, True):
        reply = await client.post("/infill", {**body, "t_max_predict_ms": 3000, "stream": stream})
        made = events_of(reply)[-1] if stream else reply.json()
        assert (made["tokens_predicted"], made["stop_type"]) == (4, "limit")
    monkeypatch.undo()
    whole = (await client.post("/infill", body)).json()
    assert whole["tokens_predicted"] == 40


async def test_models_without_tokens_for_it_refuse_gaps(client):
    reply = await client.post("/infill", {"input_prefix": "a", "input_suffix": "b"})
    assert reply.status == 501
    assert "no tokens for filling in the middle; send prompts to /completion" in reply.error["message"]
    use_gaps(client)
    for body, param in [
        ({"input_suffix": "b"}, "input_prefix"),
        ({"input_prefix": "a"}, "input_suffix"),
        ({"input_prefix": "a", "input_suffix": "b", "input_extra": [{"filename": "a"}]}, "input_extra[0].text"),
        ({"input_prefix": "a", "input_suffix": "b", "input_extra": [{"text": "a"}]}, "input_extra[0].filename"),
        ({"input_prefix": "a", "input_suffix": "b", "t_max_predict_ms": -5}, "t_max_predict_ms"),
        ({"input_prefix": "a", "input_suffix": "b", "prompt": 5}, "prompt"),
    ]:
        refused = await client.post("/infill", body)
        assert (refused.status, refused.error["param"]) == (400, param)


# -- the server


async def test_props_describe_the_model(client):
    made = (await client.get("/props")).json()
    assert made["default_generation_settings"]["n_ctx"] == client.state.engine.max_model_len
    assert made["default_generation_settings"]["params"]["temperature"] == 0.0
    assert made["default_generation_settings"]["params"]["n_predict"] == -1
    assert made["total_slots"] == client.state.engine.limits.max_rows
    assert (made["model_path"], made["modalities"]) == ("omniloop", {"vision": True, "audio": True})
    assert made["chat_template"] == client.state.renderer.template.source
    assert made["build_info"].startswith("omniloop ")


async def test_slots_count_the_tokens_of_running_answers(client):
    without_end(client)
    rows = (await client.get("/slots")).json()
    assert len(rows) == client.state.engine.limits.max_rows
    assert not any(row["is_processing"] for row in rows)
    call = client.call("POST", "/completion", {"prompt": "count", "stream": True}).start()
    await until(lambda: len(call.writes) > 2)
    first, second, *_ = (await client.get("/slots")).json()
    assert (first["is_processing"], second["is_processing"]) == (True, False)
    assert first["next_token"]["n_decoded"] > 2
    assert "prompt" not in first
    call.leave()
    await call.finish()


async def test_a_conversation_is_rendered(client):
    messages = [{"role": "user", "content": "hi"}]
    use_template(client)
    sent = {"messages": messages, "model": "omniloop"}
    assert (await client.post("/apply-template", sent)).json() == {"prompt": "[user]hi\n[assistant]"}
    assert (await client.post("/apply-template", {**sent, "model": "other"})).status == 404
    closed = await client.post("/apply-template", {**sent, "add_generation_prompt": False})
    assert closed.json() == {"prompt": "[user]hi\n"}
    tools = [{"type": "function", "function": {"name": "look"}}]
    more = {"tools": tools, "chat_template_kwargs": {"mood": "good"}}
    prompt = (await client.post("/apply-template", {**sent, **more})).json()["prompt"]
    assert prompt.startswith("<tools>")
    assert prompt.endswith("[assistant] mood=good")
    refused = await client.post("/apply-template", {**sent, "tools": [{"type": "function"}]})
    assert (refused.status, refused.error["param"]) == (400, "tools[0].function")


async def test_our_routes_have_llama_cpps_paths(serve, pooling):
    client = serve(server={"api_key": ("right",)})
    assert (await client.get("/v1/health")).status == 200
    key = {"x-api-key": "right"}
    assert (await client.get("/models")).status == 401
    assert (await client.get("/models", headers=key)).json() == (await client.get("/v1/models", headers=key)).json()
    body = {"messages": [{"role": "user", "content": "What is 12 + 30?"}]}
    assert (await client.post("/chat/completions", body, headers=key)).json()["choices"][0]["message"][
        "content"
    ] == "42"
    embedder = await pooling(pooling_kit.embedder("qwen3"))
    ours, theirs = [
        (await embedder.post(path, {"input": "a"})).json()["data"] for path in ("/v1/embeddings", "/embeddings")
    ]
    assert ours == theirs
    pairs = {"query": "a", "documents": ["a", "b"]}
    scores = [
        [one["relevance_score"] for one in (await embedder.post(path, pairs)).json()["results"]]
        for path in ("/rerank", "/reranking", "/v1/reranking")
    ]
    assert scores[0] == scores[1] == scores[2]
    assert (await client.post("/embeddings", {"input": "a"}, headers=key)).status == 501


async def test_vectors_have_llama_cpps_form(client, pooling):
    embedder = await pooling(pooling_kit.embedder("qwen3"))
    plain = await embedder.post("/v1/embeddings", {"input": ["a", "b"], "use_activation": False})
    wanted = np.array([one["embedding"] for one in plain.json()["data"]])
    norms = {
        None: np.linalg.norm(wanted, axis=1),
        2: np.linalg.norm(wanted, axis=1),
        -1: np.ones(2),
        0: np.abs(wanted).max(axis=1) / 32760,
        1: np.abs(wanted).sum(axis=1),
        3: np.linalg.norm(wanted, 3, axis=1),
    }
    for norm, lengths in norms.items():
        reply = await embedder.post("/embedding", {"content": ["a", "b"], "embd_normalize": norm})
        found = reply.json()
        assert [one["index"] for one in found] == [0, 1]
        made = np.array([one["embedding"][0] for one in found])
        np.testing.assert_allclose(made, wanted / lengths[:, None], rtol=1e-4)
    assert len((await embedder.post("/embedding", {"content": "a"})).json()) == 1
    for body, param in (
        ({"content": ["a", 5]}, "content[1]"),
        ({"content": "a", "embd_normalize": -2}, "embd_normalize"),
    ):
        reply = await embedder.post("/embedding", body)
        assert (reply.status, reply.error["param"]) == (400, param), reply.content
    assert (await embedder.post("/embedding", {"content": "a", "model": "other"})).status == 404
    assert (await client.post("/embedding", {"content": "a"})).status == 501
