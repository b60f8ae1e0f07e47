"""/v1/embeddings, /pooling and /classify with decoders: transformers' numbers, every form of input, refusals."""

from __future__ import annotations

import asyncio
import base64
import dataclasses

import httpx
import numpy as np
import openai
import pytest
from starlette.applications import Starlette

from engine.base.errors import ConfigError
from engine.models.registry import load_model_config
from server.render.chat import Renderer
from tests import pooling_kit as kit
from tests import tiny
from tests.asked_vectors import FEW, ids_of, vectors
from tests.pooling_kit import close
from tests.server.conftest import quiet
from tests.server.live import listening

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.parametrize("body", ["qwen3", "llama", "mistral", "qwen2"])
async def test_vectors_are_those_of_the_last_token(pooling, body):
    folder = kit.embedder(body)
    client = await pooling(folder)
    hidden = kit.body_of(folder)
    wanted = [kit.unit(hidden(ids)[-1]) for ids in await ids_of(client, FEW)]
    close(await vectors(client, FEW), wanted)
    close(await vectors(client, await ids_of(client, FEW)), wanted)
    close(await vectors(client, FEW[0]), wanted[:1])


@pytest.mark.parametrize(
    ("kind", "old"),
    [
        ("mean_tokens", True),
        ("max_tokens", False),
        ("weightedmean_tokens", True),
        ("mean_sqrt_len_tokens", True),
        ("cls_token", False),
    ],
)
async def test_each_kind_of_pooling_with_a_dense_layer_behind_it(pooling, kind, old):
    folder = kit.embedder("qwen3", kind, dense=24, normalize=kind != "max_tokens", old=old)
    client = await pooling(folder)
    hidden, tensors = kit.body_of(folder), kit.load_file(folder / "2_Dense" / "model.safetensors")
    weight, bias = tensors["linear.weight"].numpy(), tensors["linear.bias"].numpy()
    wanted = []
    for ids in await ids_of(client, FEW):
        line = np.tanh(weight @ kit.pooled(hidden(ids), kind) + bias)
        wanted.append(line if kind == "max_tokens" else kit.unit(line))
    close(await vectors(client, FEW), wanted)


LEFT_OUT = [("qwen3", "weightedmean_tokens"), ("bert", "mean_tokens"), ("xlm_roberta", "max_tokens")]


@pytest.mark.parametrize(("body", "kind"), LEFT_OUT)
async def test_prompts_may_be_left_out_of_what_is_pooled(pooling, body, kind):
    folder = kit.embedder(body, kind, prompts=True, include_prompt=False)
    client, hidden = await pooling(folder), kit.body_of(folder)
    tokenizer, wanted = client.state.tokenizer, []
    framed = body != "qwen3"
    left_out = len(tokenizer.encode(kit.PREFIX["query"])) + framed
    for text in FEW:
        ids = tokenizer.encode(kit.PREFIX["query"] + text, True)
        lines, weights = hidden(ids), np.arange(1, len(ids) + 1)[:, None]
        if kind == "max_tokens":
            wanted.append(kit.unit(lines[left_out:].max(0)))
        else:
            weights = weights if kind == "weightedmean_tokens" else np.ones_like(weights)
            wanted.append(kit.unit((lines * weights)[left_out:].sum(0) / weights[left_out:].sum()))
    close(await vectors(client, FEW, prompt_name="query"), wanted)
    close(
        await vectors(client, [tokenizer.encode("the cat", True)]),
        [kit.unit(kit.pooled(hidden(tokenizer.encode("the cat", True)), kind))],
    )
    scores = (await client.post("/score", {"text_1": "the cat", "text_2": FEW})).json()["data"]
    documents = await vectors(client, FEW, prompt_name="document")
    asked = await vectors(client, "the cat", prompt_name="query")
    np.testing.assert_allclose([one["score"] for one in scores], (documents @ asked.T)[:, 0], atol=1e-5)


async def test_requests_that_do_not_fit_a_left_out_prompt_are_refused(pooling):
    client = await pooling(kit.embedder("qwen3", "weightedmean_tokens", prompts=True, include_prompt=False))
    left = {"input": "the cat", "truncate_prompt_tokens": -1, "truncation_side": "left"}
    for body, text in (
        (left, "would cut the prompt"),
        ({"input": ["the cat", ""]}, "input[1]: has no tokens behind the prompt"),
    ):
        answer = await client.post("/v1/embeddings", body)
        assert answer.status == 400
        assert text in answer.json()["error"]["message"]
    with pytest.raises(ConfigError, match="include_prompt=false with cls_token"):
        load_model_config(kit.embedder("qwen3", "cls_token", include_prompt=False))


@pytest.mark.full
@pytest.mark.parametrize(("body", "kind"), LEFT_OUT)
async def test_prompts_are_left_out_as_sentence_transformers_does(pooling, body, kind):
    folder = kit.embedder(body, kind, prompts=True, include_prompt=False)
    client, model = await pooling(folder), kit.oracle(folder)
    close(await vectors(client, FEW), model.encode(FEW, prompt_name="document"))
    close(await vectors(client, FEW, prompt_name="query"), model.encode(FEW, prompt_name="query"))


@pytest.mark.full
@pytest.mark.parametrize("kind", ["lasttoken", "mean_tokens", "weightedmean_tokens"])
async def test_vectors_are_those_of_sentence_transformers(pooling, kind):
    folder = kit.embedder("qwen3", kind, dense=24, prompts=True)
    client, model = await pooling(folder), kit.oracle(folder)
    close(await vectors(client, FEW), model.encode(FEW, prompt_name="document"))
    close(await vectors(client, FEW, prompt_name="query"), model.encode(FEW, prompt_name="query"))


async def test_alone_as_in_a_batch_of_many_lengths(pooling):
    client = await pooling(kit.embedder("qwen3"))
    draw = np.random.default_rng(0)
    inputs = [draw.integers(0, 256, draw.integers(1, 129)).tolist() for _ in range(500)]
    together = await vectors(client, inputs)
    for at in (0, 3, 77, 499):
        np.testing.assert_array_equal(await vectors(client, [inputs[at]]), together[at : at + 1])


async def test_parallel_batches_keep_their_order(pooling):
    client = await pooling(kit.embedder("qwen3"))
    lines = (await vectors(client, [[k] for k in range(256)])).round(5)
    draws = [np.random.default_rng(seed).integers(0, 256, 300) for seed in range(20)]
    found = await asyncio.gather(*[vectors(client, [[int(k)] for k in draw]) for draw in draws])
    for draw, made in zip(draws, found):
        np.testing.assert_allclose(made, lines[draw], atol=2e-5)
    assert not (await quiet(client.state))["backlog"]


async def test_base64_bytes_and_numbers_are_the_same(pooling):
    client = await pooling(kit.embedder("qwen3"))
    plain = await vectors(client, FEW)
    coded = (await client.post("/v1/embeddings", {"input": FEW, "encoding_format": "base64"})).json()["data"]
    read = [np.frombuffer(base64.b64decode(entry["embedding"]), "<f4") for entry in coded]
    np.testing.assert_array_equal(np.array(read), plain)
    raw = await client.post("/v1/embeddings", {"input": FEW, "encoding_format": "bytes"})
    np.testing.assert_array_equal(np.frombuffer(raw.content, "<f4").reshape(plain.shape), plain)
    about = kit.json.loads(raw.reply_headers["metadata"])
    assert [entry["start"] for entry in about["data"]] == [k * 4 * plain.shape[1] for k in range(len(FEW))]
    half = {"input": FEW, "encoding_format": "base64", "embed_dtype": "float16"}
    short = (await client.post("/v1/embeddings", half)).json()["data"][0]["embedding"]
    np.testing.assert_allclose(np.frombuffer(base64.b64decode(short), "<f2"), plain[0], atol=1e-3)


async def test_dimensions_are_cut_and_normalised_again(pooling):
    folder = kit.changed(kit.embedder("qwen3"), "matryoshka", is_matryoshka=True)
    client = await pooling(folder)
    whole = await vectors(client, FEW)
    close(await vectors(client, FEW, dimensions=16), kit.unit(whole[:, :16]))
    refused = await client.post("/v1/embeddings", {"input": "x", "dimensions": 65})
    assert (refused.status, refused.error["param"]) == (400, "dimensions")
    fixed = await pooling(kit.embedder("qwen3"))
    assert (await fixed.post("/v1/embeddings", {"input": "x", "dimensions": 16})).status == 400
    raw = await vectors(fixed, FEW, use_activation=False)
    close(kit.unit(raw), whole)
    assert abs(np.linalg.norm(raw[0]) - 1) > 0.1


async def test_vectors_are_as_long_as_the_checkpoints_files_say(pooling, tmp_path):
    folder = kit.shutil.copytree(kit.embedder("qwen3"), tmp_path / "cut")
    whole = await vectors(await pooling(kit.embedder("qwen3")), FEW)
    kit.write(folder / "config_sentence_transformers.json", {"truncate_dim": 16})
    close(await vectors(await pooling(folder), FEW), kit.unit(whole[:, :16]))
    kit.write(folder / "config_sentence_transformers.json", {"truncate_dim": 65})
    with pytest.raises(ConfigError, match="truncate_dim=65 must be an integer from 1 to 64"):
        load_model_config(folder)


async def test_the_operator_says_how_long_vectors_are(pooling):
    folder = kit.changed(kit.embedder("qwen3"), "matryoshka", is_matryoshka=True)
    whole = await vectors(await pooling(folder), FEW)
    short = await pooling(folder, pooler_config={"dimensions": 16})
    close(await vectors(short, FEW), kit.unit(whole[:, :16]))
    close(await vectors(short, FEW, dimensions=8), kit.unit(whole[:, :8]))
    with pytest.raises(ConfigError, match="pooler-config: dimensions=65 must be an integer from 1 to 64"):
        load_model_config(folder, pooler={"dimensions": 65})


@pytest.mark.parametrize(
    ("name", "free"),
    [
        ("Qwen3-Embedding-0.6B", True),
        ("models--Qwen--Qwen3-Embedding-0.6B/snapshots/0abc", True),
        ("models--x--y/snapshots/0abc", False),
        ("Qwen3-Embedding-0.6B/other", False),
    ],
)
async def test_models_known_by_name_have_any_dimensions_in_the_hubs_cache_too(tmp_path, monkeypatch, name, free):
    folder = kit.shutil.copytree(kit.embedder("qwen3"), tmp_path / name)
    wanted = () if free else None
    assert load_model_config(folder).pooling.dimensions == wanted
    monkeypatch.chdir(folder)
    assert load_model_config(".").pooling.dimensions == wanted


async def test_prompts_of_the_checkpoint_stand_before_texts(pooling):
    client = await pooling(kit.embedder("qwen3", prompts=True))
    named = await vectors(client, "the cat", prompt_name="query")
    plain = await pooling(kit.embedder("qwen3"))
    np.testing.assert_array_equal(named, await vectors(plain, "query: the cat"))
    np.testing.assert_array_equal(await vectors(client, "the cat"), await vectors(plain, "text: the cat"))
    for meant in (
        {"input_type": "search_query"},
        {"task": "retrieval.query"},
        {"input_type": "query", "task": "query"},
    ):
        np.testing.assert_array_equal(await vectors(client, "the cat", **meant), named)
    plain = await vectors(client, "the cat")
    for meant in ({"task": "text-matching"}, {"input_type": "classification"}):
        np.testing.assert_array_equal(await vectors(client, "the cat", **meant), plain)
    refused = await client.post("/v1/embeddings", {"input": "x", "input_type": "other"})
    assert (refused.status, refused.error["param"]) == (400, "input_type")
    assert "must be one of query, document" in refused.error["message"]
    refused = await client.post("/v1/embeddings", {"input": "x", "prompt_name": "other"})
    assert (refused.status, "query, document" in refused.error["message"]) == (400, True)


async def test_words_of_clients_name_prompts_that_are_spelled_otherwise(pooling, tmp_path):
    folder = kit.shutil.copytree(kit.embedder("qwen3"), tmp_path / "spelled")
    prompts = {"query": "ask: ", "Classification": "sort: "}
    kit.write(folder / "config_sentence_transformers.json", {"prompts": prompts})
    client, plain = await pooling(folder), await pooling(kit.embedder("qwen3"))
    for word, before in (("classification", "sort: "), ("search_query", "ask: "), ("clustering", "")):
        found = await vectors(client, "the cat", input_type=word)
        np.testing.assert_array_equal(found, await vectors(plain, f"{before}the cat"))


async def test_longer_inputs_are_refused_by_index_or_cut_where_asked(pooling):
    client = await pooling(kit.embedder("qwen3"))
    long = "a b c d " * 60
    refused = await client.post("/v1/embeddings", {"input": ["x", long]})
    assert (refused.status, refused.error["param"], refused.error["reason"]) == (
        400, "input[1]", "context_length_exceeded",
    )  # fmt: skip
    (ids,) = await ids_of(client, [long])
    cut = await vectors(client, long, truncate_prompt_tokens=-1)
    np.testing.assert_array_equal(cut, await vectors(client, [ids[:128]]))
    left = await vectors(client, long, truncate_prompt_tokens=10, truncation_side="left")
    np.testing.assert_array_equal(left, await vectors(client, [ids[-10:]]))
    raised = await pooling(kit.embedder("qwen3"), max_model_len=512)
    assert (await raised.post("/v1/embeddings", {"input": long})).status == 200


async def test_a_conversation_is_one_input(pooling):
    client = await pooling(kit.embedder("qwen3"))
    messages = [{"role": "user", "content": "the cat"}]
    made = await client.post("/v1/embeddings", {"messages": messages})
    assert (await client.post("/v1/embeddings", {"messages": messages, "input": "x"})).status == 400
    kwargs = {"chat_template_kwargs": {"add_vision_id": True}, "add_generation_prompt": True}
    open_ended = await client.post("/v1/embeddings", {"messages": messages, **kwargs})
    assert open_ended.json()["usage"]["prompt_tokens"] > made.json()["usage"]["prompt_tokens"]
    refused = await client.post("/v1/embeddings", {"messages": messages, "chat_template_kwargs": {"messages": []}})
    assert refused.status == 400
    text = "<|im_start|>user\nthe cat<|im_end|>\n"
    close([made.json()["data"][0]["embedding"]], await vectors(client, text))
    usage = made.json()["usage"]
    assert usage["prompt_tokens"] == usage["total_tokens"] == len(client.state.tokenizer.encode(text))


async def test_fields_of_messages_are_honoured_or_refused_by_name(pooling, monkeypatch):
    """Over a socket, on every route; the lengths are those of the rendered conversation."""
    client = await pooling(kit.embedder("qwen3"))
    state, untrusting = client.state, client.state.renderer
    config = dataclasses.replace(untrusting.config, trust_request_chat_template=True)
    monkeypatch.setattr(state, "renderer", Renderer(state.tokenizer, config, state.pool))
    messages = [{"role": "user", "content": "the cat"}]
    template = (
        "{% for m in messages %}({{ m.content }}{{ mood }}){% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    of_messages = {
        "add_generation_prompt": True,
        "continue_final_message": True,
        "chat_template": template,
        "chat_template_kwargs": {"mood": "!"},
    }
    count = len(client.state.tokenizer.encode("(the cat)"))
    async with listening(client) as url, httpx.AsyncClient(base_url=url) as http:
        for path in ("/v1/embeddings", "/pooling"):
            for fields, wanted in (
                ({}, count),
                ({"add_generation_prompt": True}, count + 1),
                ({"continue_final_message": True}, count - 1),
                ({"chat_template_kwargs": {"mood": "!"}}, count + 1),
            ):
                body = {"messages": messages, "chat_template": template, "add_special_tokens": False, **fields}
                reply = await http.post(path, json=body)
                assert reply.status_code == 200, reply.text
                assert reply.json()["usage"]["prompt_tokens"] == wanted, (path, fields)
            both = {"messages": messages, "add_generation_prompt": True, "continue_final_message": True}
            assert (await http.post(path, json=both)).json()["error"]["param"] == "continue_final_message"
        for path, body in (
            ("/v1/embeddings", {"input": "x"}),
            ("/pooling", {"input": "x"}),
            ("/score", {"text_1": "x", "text_2": "y"}),
            ("/rerank", {"query": "x", "documents": ["y"]}),
        ):
            for name, value in of_messages.items():
                reply = await http.post(path, json={**body, name: value})
                assert (reply.status_code, reply.json()["error"]["param"]) == (400, name), (path, reply.text)
                assert (await http.post(path, json={**body, name: None})).status_code == 200
    monkeypatch.setattr(state, "renderer", untrusting)
    reply = await client.post("/v1/embeddings", {"messages": messages, "chat_template": template})
    assert (reply.status, reply.error["param"]) == (403, "chat_template")


@pytest.mark.parametrize("field", [{"prompt_name": "other"}, {"prompt_name": "query"}, {"input_type": "query"}])
async def test_a_prompt_that_no_conversation_gets_is_refused(pooling, field):
    client = await pooling(kit.embedder("qwen3", prompts=True))
    messages = [{"role": "user", "content": "the cat"}]
    refused = await client.post("/v1/embeddings", {"messages": messages, **field})
    assert (refused.status, refused.error["param"]) == (400, "prompt_name")
    assert (await client.post("/v1/embeddings", {"messages": messages})).status == 200


BAD = {
    "input": [None, [], {}, [[]], ["x", 5], [["x"]], [-1], [320], [[5], [1000]], ["x", ""], [True]],
    "encoding_format": ["floats"], "embed_dtype": ["int4", "float16"], "dimensions": [0, -1],
    "truncate_prompt_tokens": [-2, 129], "truncation_side": ["middle"], "prompt_name": ["x"], "normalize": [True],
    "cache_salt": ["@"], "priority": [1], "request_id": [""], "endianness": ["big"],
}  # fmt: skip


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in BAD.items() for value in values])
async def test_bad_input_is_400_and_says_where(pooling, field, value):
    client = await pooling(kit.embedder("qwen3"))
    body = kit.json.dumps({"input": "x", field: value}).encode()
    refused = await client.post("/v1/embeddings", body=body)
    assert refused.status == 400, refused.content
    assert refused.error["param"].startswith(field), refused.content


async def test_more_inputs_than_allowed_and_more_tokens_than_wait(pooling):
    client = await pooling(kit.embedder("qwen3"))
    refused = await client.post("/v1/embeddings", {"input": ["x"] * 2049})
    assert (refused.status, "2049 inputs; at most 2048" in refused.error["message"]) == (400, True)
    places = client.state.places
    places.take_tokens(places.max_tokens - 10)
    try:
        busy = await client.post("/v1/embeddings", {"input": [[5] * 6] * 2})
        assert busy.status == 429
    finally:
        places.give_tokens(places.max_tokens - 10)
    assert (await client.post("/v1/embeddings", {"input": [[5] * 6] * 2})).status == 200
    assert client.state.places.tokens == client.state.places.taken == 0


@pytest.mark.parametrize("turns", [0, 1, 3, 8])
async def test_a_client_that_leaves_frees_all_its_inputs(pooling, turns):
    client = await pooling(kit.embedder("qwen3"))
    call = client.call("POST", "/v1/embeddings", {"input": [[5] * 100] * 800}).start()
    for _ in range(turns):
        await asyncio.sleep(0.002)
    call.leave()
    await call.finish()
    held = await quiet(client.state)
    assert not any(held[name] for name in ("routes", "live_rows", "backlog", "slots", "waiting"))
    assert client.state.places.taken == client.state.places.tokens == 0
    assert not client.state.live


@pytest.mark.parametrize("by", ["id", "leaving"])
async def test_requests_that_end_early_are_counted_and_those_aborted_by_id_say_so(pooling, by):
    client = await pooling(kit.embedder("qwen3"))
    ended = client.state.metrics.finished
    before = dict(ended)
    call = client.call("POST", "/v1/embeddings", {"input": [[5] * 100] * 800, "request_id": "mine"}).start()
    for _ in range(1000):
        await asyncio.sleep(0.002)
        if client.state.live:
            break
    if by == "id":
        assert (await client.post("/abort_requests", {"request_ids": ["embd-mine"]})).status == 200
    else:
        call.leave()
    await call.finish()
    if by == "id":
        assert (call.status, call.error["type"], call.error["reason"]) == (499, "RequestAbortedError", "aborted")
    assert 0 < ended["abort"] - before["abort"] <= 800
    assert (ended["stop"], ended["error"]) == (before["stop"], before["error"])


async def test_texts_are_made_lower_case_where_the_checkpoint_says_so(pooling, tmp_path):
    folder = kit.shutil.copytree(kit.embedder("qwen3"), tmp_path / "lower")
    kit.write(folder / "sentence_bert_config.json", {"max_seq_length": 128, "do_lower_case": True})
    client, plain = await pooling(folder), await pooling(kit.embedder("qwen3"))
    np.testing.assert_array_equal(await vectors(client, "The CAT"), await vectors(plain, "the cat"))


async def test_an_unknown_model_is_404(pooling):
    client = await pooling(kit.embedder("qwen3"))
    for path in ("/v1/embeddings", "/pooling"):
        assert (await client.post(path, {"input": "x", "model": "other"})).status == 404
    assert (await client.post("/rerank", {"query": "x", "documents": ["x"], "model": "other"})).status == 404


async def test_special_tokens_are_added_unless_refused(pooling):
    client = await pooling(kit.ended(kit.embedder("qwen3")))
    (framed,) = await ids_of(client, ["the cat"])
    bare = client.state.tokenizer.encode("the cat")
    assert framed == [*bare, tiny.IDS["<|endoftext|>"]]
    for special, ids in ((True, framed), (False, bare)):
        made = await vectors(client, "the cat", add_special_tokens=special)
        np.testing.assert_array_equal(made, await vectors(client, [ids]))
    cut = await vectors(client, "a b c d " * 60, truncate_prompt_tokens=3)
    kept = client.state.tokenizer.encode("a b c d")[:2]
    np.testing.assert_array_equal(cut, await vectors(client, [[*kept, tiny.IDS["<|endoftext|>"]]]))
    assert (await vectors(client, [""])).shape == (1, 64)  # special tokens only


async def test_half_of_a_surrogate_pair_is_refused(pooling):
    client = await pooling(kit.embedder("qwen3"))
    refused = await client.post("/v1/embeddings", body=b'{"input": "\\ud800"}')
    assert refused.status == 400


async def test_s42_inputs_count_for_the_key_that_sends_them(pooling):
    client = await pooling(kit.embedder("qwen3"), max_inflight_per_key=3)
    for path in ("/v1/embeddings", "/pooling"):
        refused = await client.post(path, {"input": ["x"] * 4})
        assert (refused.status, refused.error["reason"]) == (429, "key_busy")
        assert (await client.post(path, {"input": ["x"] * 3})).status == 200
    refused = await client.post("/v1/rerank", {"query": "x", "documents": ["x"] * 3})
    assert refused.status == 429
    assert (await client.post("/score", {"text_1": "x", "text_2": ["x"] * 2})).status == 200


async def test_routes_of_the_other_runner_are_501(pooling, client):
    pools = await pooling(kit.embedder("qwen3"))
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/inference/v1/generate"):
        refused = await pools.post(path, {"input": "x"})
        assert (refused.status, "no text" in refused.content.decode()) == (501, True)
    for path in ("/v1/embeddings", "/pooling", "/classify", "/v1/score", "/v2/rerank"):
        assert (await client.post(path, {"input": "x"})).status == 501
    assert (await pools.post("/classify", {"input": "x"})).status == 501  # the model has no classes
    assert (await pools.post("/tokenize", {"prompt": "x"})).status == 200


async def test_the_official_client(pooling):
    client = await pooling(kit.embedder("qwen3"))
    transport = httpx.ASGITransport(Starlette(routes=[]))
    transport.app = client.app
    async with httpx.AsyncClient(transport=transport, base_url="http://test/v1") as http:
        speaker = openai.AsyncOpenAI(api_key="none", base_url="http://test/v1", http_client=http)
        name = client.state.names[0]
        made = await speaker.embeddings.create(model=name, input=FEW)  # this call requests base64
        floats = await speaker.embeddings.create(model=name, input=FEW, encoding_format="float")
    wanted = await vectors(client, FEW)
    np.testing.assert_array_equal(np.array([one.embedding for one in made.data], np.float32), wanted)
    np.testing.assert_array_equal(np.array([one.embedding for one in floats.data], np.float32), wanted)


async def test_tokens_one_by_one(pooling):
    client = await pooling(kit.embedder("qwen3"))
    answer = await client.post("/pooling", {"input": FEW, "task": "token_embed"})
    hidden = kit.body_of(kit.embedder("qwen3"))
    for entry, ids in zip(answer.json()["data"], await ids_of(client, FEW)):
        close(entry["data"], kit.unit(hidden(ids)))
    plain = (await client.post("/pooling", {"input": FEW})).json()["data"]
    np.testing.assert_array_equal(np.array([one["data"] for one in plain], np.float32), await vectors(client, FEW))
    for task, status in (("classify", 400), ("embed&token_classify", 400), ("other", 400)):
        assert (await client.post("/pooling", {"input": "x", "task": task})).status == status


@pytest.mark.parametrize(("body", "name"), [("qwen2", "Qwen2"), ("llama", "Llama")])
@pytest.mark.parametrize("labels", [1, 3])
async def test_classes_are_those_of_transformers(pooling, body, name, labels):
    import torch
    from transformers import AutoModelForSequenceClassification

    folder = kit.classifier(body, f"{name}ForSequenceClassification", labels)
    client = await pooling(folder)
    with tiny.quiet(), torch.no_grad():
        model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
        logits = [model(torch.tensor([ids])).logits[0] for ids in await ids_of(client, FEW)]
    wanted = [(line.sigmoid() if labels == 1 else line.softmax(-1)).numpy() for line in logits]
    data = (await client.post("/classify", {"input": FEW})).json()["data"]
    close([entry["probs"] for entry in data], wanted)
    assert [entry["label"] for entry in data] == [f"kind {int(line.argmax())}" for line in wanted]
    raw = (await client.post("/classify", {"input": FEW, "use_activation": False})).json()["data"]
    close([entry["probs"] for entry in raw], [line.numpy() for line in logits])
    assert (await client.post("/v1/embeddings", {"input": "x"})).status == 501


FIRST = {"idx": 0, "path": "", "type": "x.Transformer"}
HOSTILE = [
    ([FIRST, {"idx": 1, "path": "../1_Pooling", "type": "x.Pooling"}], "leaves"),
    ([FIRST, {"idx": 1, "path": "", "type": "x.WordWeights"}], "WordWeights"),
    ([FIRST, *({"idx": k, "path": "1_Pooling", "type": "x.Pooling"} for k in (1, 2))], "module 2"),
    ([{"idx": 0}], "list of objects"),
    ({"a": 1}, "list of objects"),
]  # fmt: skip


@pytest.mark.parametrize(("modules", "said"), HOSTILE)
async def test_hostile_modules_stop_the_start(tmp_path, modules, said):
    folder = kit.shutil.copytree(kit.embedder("qwen3"), tmp_path / "model")
    kit.write(folder / "modules.json", modules)
    with pytest.raises(ConfigError, match=said):
        load_model_config(folder)


async def test_dense_layers_must_chain_and_activations_be_known(tmp_path):
    folder = kit.shutil.copytree(kit.embedder("qwen3", dense=24), tmp_path / "model")
    settings = kit.read(folder / "2_Dense" / "config.json")
    kit.write(folder / "2_Dense" / "config.json", {**settings, "in_features": 63})
    with pytest.raises(ConfigError, match="in_features=63"):
        load_model_config(folder)
    kit.write(folder / "2_Dense" / "config.json", {**settings, "activation_function": "torch.nn.Mish"})
    with pytest.raises(ConfigError, match="Mish"):
        load_model_config(folder)
    assert load_model_config(folder, runner="generate").pooling is None
    assert load_model_config(tiny.checkpoint("qwen3"), runner="pooling").pooling.kind == "last"
    with pytest.raises(ConfigError, match="pooling_type='SUM'"):
        load_model_config(folder, pooler={"pooling_type": "SUM"})
