"""Ollama's protocol: its own client over a socket, the texts of /v1, lines of streams, refusals."""

from __future__ import annotations

import asyncio

import httpx
import ollama
import orjson
import pytest

from server.errors import ApiError
from tests import pooling_kit
from tests.pooling_kit import close
from tests.server.conftest import until
from tests.server.live import listening, picture, use_gaps, use_template, without_end
from tests.server.scripted import play

pytestmark = pytest.mark.asyncio(loop_scope="session")

SUM = [{"role": "user", "content": "What is 12 + 30?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'


def lines(reply):
    assert reply.reply_headers["content-type"] == "application/x-ndjson"
    return [orjson.loads(line) for line in reply.content.splitlines()]


async def text_of(client, path, body):
    """The whole text of a v1 answer."""
    choice = (await client.post(path, {"temperature": 0, **body})).json()["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


# -- its own client


async def test_its_client_talks_to_the_server(client):
    async with listening(client) as url, ollama.AsyncClient(url) as theirs:
        assert [one.model for one in (await theirs.list()).models] == ["omniloop"]
        running = (await theirs.ps()).models[0]
        assert (running.context_length, running.size_vram) == (client.state.engine.max_model_len, 0)
        shown = await theirs.show("omniloop:latest")
        assert shown.modelinfo["general.architecture"] == "qwen2_5_omni_thinker"
        assert shown.modelinfo["general.parameter_count"] == 11495616
        assert shown.capabilities == ["completion", "tools", "vision", "audio"]
        assert shown.template.startswith("{")
        assert "temperature" in shown.parameters
        whole = await theirs.chat("omniloop", SUM, options={"num_predict": 8, "temperature": 0})
        assert (whole.message.content, whole.done, whole.done_reason) == ("42", True, "stop")
        assert whole.eval_count == 3
        assert whole.total_duration >= whole.eval_duration > 0
        parts = [part async for part in await theirs.chat("omniloop:latest", SUM, stream=True)]
        assert "".join(part.message.content for part in parts) == "42"
        assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
        assert (await theirs.generate("omniloop", "What is 12 + 30?")).response == "42"
        made = [part async for part in await theirs.generate("omniloop", "What is 12 + 30?", stream=True)]
        assert "".join(part.response for part in made) == "42"
        assert (await theirs.chat("omniloop")).done_reason == "load"
        assert (await theirs.generate("omniloop", "")).done_reason == "load"
        with pytest.raises(ollama.ResponseError) as refused:
            await theirs.chat("other", SUM)
        assert (refused.value.status_code, refused.value.error) == (
            404,
            "model other does not exist; this server has omniloop",
        )
        for call in (theirs.pull("other"), theirs.copy("a", "b"), theirs.delete("omniloop"), theirs.push("omniloop")):
            with pytest.raises(ollama.ResponseError) as refused:
                await call
            assert refused.value.status_code == 501
            assert "started with" in refused.value.error


async def test_its_client_embeds(pooling):
    client = await pooling(pooling_kit.changed(pooling_kit.embedder("qwen3"), "matryoshka", is_matryoshka=True))
    wanted = (await client.post("/v1/embeddings", {"input": ["the cat", "a dog"]})).json()
    async with listening(client) as url, ollama.AsyncClient(url) as theirs:
        made = await theirs.embed(client.state.names[0], ["the cat", "a dog"])
        close(made.embeddings, [one["embedding"] for one in wanted["data"]])
        assert made.prompt_eval_count == wanted["usage"]["prompt_tokens"]
        alone = await theirs.embeddings(client.state.names[0], "the cat")
        close([alone.embedding], [wanted["data"][0]["embedding"]])
        assert (await theirs.show(client.state.names[0])).capabilities == ["embedding"]
        shorter = await theirs.embed(client.state.names[0], "the cat", dimensions=8)
        assert len(shorter.embeddings[0]) == 8
        long = "the cat " * client.state.engine.max_model_len
        assert (await theirs.embed(client.state.names[0], long)).prompt_eval_count == client.state.engine.max_model_len
        with pytest.raises(ollama.ResponseError) as refused:
            await theirs.embed(client.state.names[0], long, truncate=False)
        assert refused.value.status_code == 400
    assert (await client.post("/api/embed", {"input": []})).json()["embeddings"] == []
    assert (await client.post("/api/chat", {"messages": SUM})).status == 501


async def test_its_client_gets_calls_and_returns_their_results(client):
    engine = play(client, CALL, f"Both.{CALL}{CALL}", "fine")
    async with listening(client) as url, ollama.AsyncClient(url) as theirs:
        name = client.state.names[0]

        def weather(city: str) -> str:
            """The weather of a city.

            Args:
              city: The city
            """
            return city

        asked = [{"role": "user", "content": "Bonn?"}]
        answer = await theirs.chat(name, asked, tools=[weather])
        assert answer.message.tool_calls[0].function.model_dump() == {"name": "weather", "arguments": {"city": "Bonn"}}
        assert "The city" in engine.prompt()
        parts = [part async for part in await theirs.chat(name, asked, tools=[WEATHER], stream=True)]
        calls = [call for part in parts for call in part.message.tool_calls or ()]
        assert [call.function.arguments for call in calls] == [{"city": "Bonn"}] * 2
        assert "".join(part.message.content for part in parts) == "Both."
        results = [{"role": "tool", "content": text, "tool_name": "weather"} for text in ("rain", "sun")]
        history = [*asked, {"role": "assistant", "tool_calls": [call.model_dump() for call in calls]}, *results]
        assert (await theirs.chat(name, history, tools=[])).message.content == "fine"
        prompt = engine.prompt()
        assert prompt.index("#call_1_0") < prompt.index("tool #call_1_0rain") < prompt.index("tool #call_1_1sun")


async def test_results_belong_to_calls_by_id_or_name_or_order(client):
    engine = play(client, "fine")

    def call(name, call_id=None):
        return {"function": {"name": name}, **({"id": call_id} if call_id else {})}

    def result(content, **fields):
        return {"role": "tool", "content": content, **fields}

    messages = [
        *SUM,
        {"role": "assistant", "thinking": "hm", "tool_calls": [call("a"), call("b"), call("c", "given"), call("b")]},
        result("first b", tool_name="b"),
        result("a or what is left"),
        result("by id", tool_call_id="given"),
        result("second b", tool_name="b"),
    ]
    reply = await client.post("/api/chat", {"messages": messages, "stream": False})
    assert reply.json()["message"]["content"] == "fine"
    prompt = engine.prompt()
    ids = [prompt.partition(text)[0].rpartition("#")[2] for text in ("first b", "a or what", "by id", "second b")]
    assert ids == ["call_1_1", "call_1_0", "given", "call_1_3"]
    assert "<think>hm</think>" in prompt


async def test_its_client_reads_thinking(client):
    engine = play(client, "<think>\nhm\n</think>\n\n42", "<think>\nhm\n</think>\n\n42", "42")
    name = client.state.names[0]
    async with listening(client) as url, ollama.AsyncClient(url) as theirs:
        whole = await theirs.chat(name, SUM, think=True)
        assert (whole.message.thinking.strip(), whole.message.content.strip()) == ("hm", "42")
        parts = [part async for part in await theirs.generate(name, "12 + 30?", stream=True)]
        assert "".join(part.thinking or "" for part in parts).strip() == "hm"
        assert "".join(part.response for part in parts).strip() == "42"
        await theirs.chat(name, SUM, think=False)
        assert engine.prompt().endswith("<think>\n\n</think>\n\n")


async def test_its_client_sends_pictures(client):
    asked = "What is in the picture?"
    url = {"url": f"data:image/png;base64,{picture()}"}
    parts = [{"type": "image_url", "image_url": url}, {"type": "text", "text": asked}]
    wanted = await text_of(client, "/v1/chat/completions", {"messages": [{"role": "user", "content": parts}]})
    async with listening(client) as address, ollama.AsyncClient(address) as theirs:
        said = await theirs.chat("omniloop", [{"role": "user", "content": asked, "images": [picture()]}])
        made = await theirs.generate("omniloop", asked, images=[picture()])
    assert said.message.content == made.response == wanted != ""
    assert said.prompt_eval_count > 10


# -- the texts of /v1


@pytest.mark.parametrize(
    ("options", "ours"),
    [
        ({"temperature": 0}, {}),
        ({"num_predict": 5, "temperature": 1.5, "seed": 7}, {"max_tokens": 5, "temperature": 1.5, "seed": 7}),
        (
            {"num_predict": 6, "temperature": 1.9, "seed": 3, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
            {"max_tokens": 6, "temperature": 1.9, "seed": 3, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
        ),
        (
            {"num_predict": 9, "repeat_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3},
            {"max_tokens": 9, "repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3},
        ),
        ({"num_predict": -1, "stop": ["2"], "num_ctx": 4096, "num_gpu": 99}, {"stop": ["2"]}),
    ],
)
async def test_the_text_is_that_of_v1(client, options, ours):
    body = {"messages": SUM, **ours}
    wanted = await text_of(client, "/v1/chat/completions", body)
    for path, sent in (("/api/chat", {"messages": SUM}), ("/api/generate", {"prompt": SUM[0]["content"]})):
        streamed = lines(await client.post(path, {**sent, "options": options}))
        whole = (await client.post(path, {**sent, "options": options, "stream": False})).json()
        if path == "/api/chat":
            assert "".join(line["message"]["content"] for line in streamed) == whole["message"]["content"] == wanted
        else:
            assert "".join(line["response"] for line in streamed) == whole["response"] == wanted


async def test_a_raw_prompt_is_continued_as_by_completions(client):
    wanted = await text_of(client, "/v1/completions", {"prompt": "1 2 3", "max_tokens": 6})
    body = {"prompt": "1 2 3", "raw": True, "options": {"num_predict": 6}}
    streamed = lines(await client.post("/api/generate", body))
    assert "".join(line["response"] for line in streamed) == wanted
    assert streamed[-1]["done_reason"] == "length"


async def test_a_system_text_precedes_the_prompt(client):
    use_template(client)
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "P"}]
    wanted = await client.post("/v1/chat/completions", {"messages": messages, "max_tokens": 4})
    made = await client.post(
        "/api/generate", {"system": "S", "prompt": "P", "options": {"num_predict": 4}, "stream": False}
    )
    assert made.json()["prompt_eval_count"] == wanted.json()["usage"]["prompt_tokens"]
    assert made.json()["response"] == wanted.json()["choices"][0]["message"]["content"]


async def test_log_probabilities_are_those_of_chat(client):
    ours = await client.post("/v1/chat/completions", {"messages": SUM, "logprobs": True, "top_logprobs": 2})
    wanted = ours.json()["choices"][0]["logprobs"]["content"]
    body = {"messages": SUM, "logprobs": True, "top_logprobs": 2}
    whole = (await client.post("/api/chat", {**body, "stream": False})).json()["logprobs"]
    streamed = [one for line in lines(await client.post("/api/chat", body)) for one in line.get("logprobs", ())]
    for made in (whole, streamed):
        assert [one["token"] for one in made] == [one["token"] for one in wanted]
        assert [len(one["top_logprobs"]) for one in made] == [2] * len(wanted)
        assert [one["logprob"] for one in made] == pytest.approx([one["logprob"] for one in wanted], abs=1e-4)
    refused = await client.post("/api/generate", {"prompt": "a", "top_logprobs": 2})
    assert refused.json()["error"] == "top_logprobs: needs logprobs: true"


@pytest.mark.parametrize("form", ["json", {"enum": ["a", "b"]}])
async def test_the_answer_has_the_format(client, form):
    body = {"prompt": "a or b", "format": form, "options": {"num_predict": 40}, "stream": False}
    made = (await client.post("/api/generate", body)).json()
    if form == "json":
        assert made["response"].startswith("{")
    else:
        assert orjson.loads(made["response"]) in form["enum"]


# -- lines


async def test_lines_are_exactly_these_bytes(client):
    reply = await client.post("/api/chat", {"messages": SUM, "options": {"temperature": 0}})
    first, *_, last = reply.content.split(b"\n")[:-1]
    at = orjson.loads(first)["created_at"]
    head = b'{"model":"omniloop","created_at":"%s",' % at.encode()
    assert first == head + b'"message":{"role":"assistant","content":"4"},"done":false}'
    assert last.startswith(head + b'"done":true,"message":{"role":"assistant","content":""},"done_reason":"stop",')
    assert orjson.loads(last)["prompt_eval_count"] == 20


async def test_an_error_in_a_stream_is_a_line(client):
    without_end(client)
    call = client.call("POST", "/api/generate", {"prompt": "count", "raw": True}).start()
    await until(lambda: call.writes)
    for exchange in list(client.state.open_exchanges):
        exchange.answer_open.fail(ApiError(504, "deadline", "too long"))
    await call.finish()
    assert (call.status, lines(call)[-1]) == (200, {"error": "too long"})


async def test_idle_streams_get_no_comments(serve):
    client = serve(server={"sse_keep_alive_interval": 0.01})
    client.state.engine.pause()
    call = client.call("POST", "/api/chat", {"messages": SUM}).start()
    ours = client.call("POST", "/v1/chat/completions", {"messages": SUM, "stream": True}).start()
    try:
        await until(lambda: any(b"keep-alive" in piece for piece in ours.writes))
    finally:
        client.state.engine.resume()
    await asyncio.gather(call.finish(), ours.finish())
    assert lines(call)[-1]["done"] is True


# -- bodies and refusals


async def test_bodies_without_a_json_type_are_taken_if_no_page_sends_them(client):
    body = orjson.dumps({"prompt": "hi", "stream": False, "options": {"num_predict": 1}})
    for kind in ("application/x-www-form-urlencoded", "text/plain", ""):
        headers = {"content-type": kind}
        assert (await client.post("/api/generate", body=body, headers=headers)).status == 200
        foreign = await client.post("/api/generate", body=body, headers={**headers, "origin": "http://localhost:8000"})
        assert foreign.status == 403
        own = {**headers, "origin": "http://localhost:8000", "host": "localhost:8000"}
        refused = await client.post("/api/generate", body=body, headers=own)
        assert (refused.status, refused.json()) == (
            415,
            {"error": "send the body as Content-Type: application/json"},
        )
        assert (await client.post("/v1/completions", body=b'{"prompt": "hi"}', headers=headers)).status == 415
    packed = await client.post("/api/generate", body=body, headers={"content-encoding": "gzip"})
    assert packed.status == 415


REFUSED = [
    ({"prompt": "a", "options": {"temperature": 9}}, 400, "options.temperature: got 9.0; must be 0 to 2"),
    ({"prompt": "a", "options": {"repeat_penalty": 3}}, 400, "options.repeat_penalty: got 3.0; must be 0 to 2"),
    ({"prompt": "a", "options": {"top_k": "x"}}, 400, "options.top_k: got a string; must be an integer"),
    ({"prompt": "a", "options": {"stop": [""]}}, 400, "options.stop[0]: got 0 bytes; must be a text of 1 to 256 bytes"),
    ({"prompt": "a", "options": {"mirostat": 2}}, 400, "options.mirostat: "),
    ({"prompt": "a", "options": {"repeat_last_n": 64}}, 400, "options.repeat_last_n: got 64; must be -1 or 0: "),
    ({"prompt": "a", "options": {"num_ctx": 0}}, 400, "options.num_ctx: got 0; must be at least 1"),
    ({"prompt": "a " * 20, "options": {"num_ctx": 9}}, 400, "prompt: has "),
    ({"prompt": "a " * 20, "raw": True, "options": {"num_ctx": 9}}, 400, "prompt: has "),
    ({"prompt": "a", "options": 5}, 400, "options: got an integer; must be an object"),
    ({"prompt": "a", "format": "xml"}, 400, "format: got xml; must be json or a JSON schema"),
    ({"prompt": "a", "format": {"type": "objct"}}, 400, "format.type: got objct"),
    ({"prompt": "a", "think": "hard"}, 400, "think: got hard; must be true, false, low, medium, high, max"),
    ({"prompt": "a", "think": True}, 501, "think: this model does not think"),
    ({"prompt": "a", "template": "{{ .Prompt }}"}, 400, "template: "),
    ({"prompt": "a", "context": [1]}, 400, "context: "),
    ({"prompt": "a", "raw": True, "system": "s"}, 400, "system: not together with raw"),
    ({"prompt": "a", "raw": True, "images": ["aGk="]}, 400, "images: not together with raw"),
    ({"prompt": "a", "images": ["aGk="]}, 400, "images[0]: the image is in an unknown format"),
    ({"prompt": 5}, 400, "prompt: got an integer; must be a string"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "status", "text"), REFUSED)
async def test_wrong_bodies_are_refused_by_the_clients_names(client, body, status, text):
    reply = await client.post("/api/generate", body)
    assert reply.status == status
    assert reply.json().keys() == {"error"}
    assert reply.json()["error"].startswith(text), reply.json()


async def test_a_suffix_needs_tokens_for_it(client):
    reply = await client.post("/api/generate", {"prompt": "a", "suffix": "b"})
    assert (reply.status, reply.json()["error"].partition(":")[0]) == (501, "suffix")
    use_gaps(client)
    assert "insert" in (await client.post("/api/show", {})).json()["capabilities"]
    wanted = await text_of(client, "/v1/completions", {"prompt": "1 + 1", "suffix": " = 2", "max_tokens": 6})
    body = {"prompt": "1 + 1", "suffix": " = 2", "options": {"num_predict": 6}}
    streamed = lines(await client.post("/api/generate", body))
    assert "".join(line["response"] for line in streamed) == wanted
    other = await client.post("/api/generate", {**body, "suffix": " = 3", "stream": False})
    plain = await client.post("/api/generate", {**body, "suffix": "", "raw": True, "stream": False})
    counts = [one.json()["prompt_eval_count"] for one in (other, plain)]
    assert counts[0] == streamed[-1]["prompt_eval_count"] > counts[1]


async def test_bad_inputs_of_embeddings_are_named(pooling):
    client = await pooling(pooling_kit.embedder("qwen3"))
    for path, body, status, text in [
        ("/api/embed", {"input": "a", "model": "other"}, 404, "model other"),
        ("/api/embed", {"input": [5]}, 400, "input[0]: got an integer; must be a string"),
        ("/api/embed", {}, 400, "input: is missing"),
        ("/api/embeddings", {"prompt": "a", "model": "other"}, 404, "model other"),
        ("/api/embeddings", {"prompt": 5}, 400, "prompt: got an integer; must be a string"),
    ]:
        reply = await client.post(path, body)
        assert (reply.status, reply.json()["error"][: len(text)]) == (status, text)


async def test_options_are_those_of_the_table(client):
    options = {"n_predict": 3, "numa": True, "nonsense": 1, "mirostat": 0, "mirostat_tau": 5, "min_tokens": 3}
    reply = await client.post("/api/generate", {"prompt": "a", "options": options, "stream": False})
    assert reply.json()["eval_count"] == 3
    assert reply.reply_headers["x-ignored-fields"] == "options.nonsense"
    twice = await client.post("/api/generate", {"prompt": "a", "options": {"n_predict": 3, "num_predict": 4}})
    assert (twice.status, "contradicts" in twice.json()["error"]) == (400, True)


async def test_a_wrong_message_is_named(client):
    pictured = {"role": "user", "content": "a", "images": [picture(), "aGk="]}
    for messages, text in [
        ([{"role": "robot", "content": "a"}], "messages[0].role is 'robot'; "),
        ([*SUM, pictured], "messages[1].images[1]: the image is in an unknown format"),
        ([{"role": "user", "content": 5}], "messages[0].content: got an integer; "),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "messages[0].tool_calls[0].function.name: is "),
    ]:
        reply = await client.post("/api/chat", {"messages": messages})
        assert (reply.status, reply.json()["error"][: len(text)]) == (400, text)


async def test_penalties_of_an_empty_window_have_no_effect(client):
    body = {"messages": SUM, "stream": False}
    plain = await client.post("/api/chat", body)
    off = {"repeat_penalty": 1.9, "repeat_last_n": 0}
    none = await client.post("/api/chat", {**body, "options": off})
    assert none.json()["message"] == plain.json()["message"]


async def test_names_may_have_the_tag_latest(client):
    for name, answered in (
        ("omniloop:latest", 200),
        ("omniloop", 200),
        (None, 200),
        ("omniloop:8b", 404),
        (":latest", 404),
    ):
        reply = await client.post("/api/show", {"model": name})
        assert reply.status == answered, name
    assert (await client.post("/api/show", {"name": "other"})).status == 404
    reply = await client.post("/api/chat", {"model": "omniloop:latest", "messages": SUM, "stream": False})
    assert reply.json()["model"] == "omniloop:latest"


async def test_keys_and_readiness_are_those_of_v1(serve):
    guarded = serve(server={"api_key": ("right",)})
    for method, path in (("GET", "/api/tags"), ("POST", "/api/chat"), ("GET", "/api/version"), ("POST", "/api/pull")):
        reply = await guarded.call(method, path).finish()
        assert (reply.status, reply.json().keys()) == (401, {"error"})
    key = {"authorization": "Bearer right"}
    assert (await guarded.get("/api/version", headers=key)).json() == {"version": "0.40.4"}
    starting = await serve(phase="starting").post("/api/chat", {"messages": SUM})
    assert (starting.status, starting.json()) == (503, {"error": "the model is still being loaded; try again shortly"})


async def test_the_root_greets_clients_of_ollama(client):
    async with listening(client) as url, httpx.AsyncClient() as plain:
        assert (await plain.get(url)).text == "Ollama is running"
        assert "<html" in (await plain.get(url, headers={"accept": "text/html"})).text
