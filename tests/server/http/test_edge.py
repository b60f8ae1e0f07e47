"""The HTTP edge: keys, hosts, origins, request ids, phases, probes, models, tokenizer routes, metrics, log lines."""

from __future__ import annotations

import asyncio
import logging
import re
from types import SimpleNamespace

import pytest

from engine.base.errors import ConfigError
from server.http.edge import not_ready
from server.ops.limits import digest_name, named
from server.start.process import reread_keys
from tests.server.conftest import until

pytestmark = pytest.mark.asyncio(loop_scope="session")
BOSS = {"enable_dev_endpoints": True, "admin_api_key": "boss"}


async def test_503_on_every_route_until_ready(serve):
    client = serve(phase="starting")
    got = ("/health", "/health/ready", "/v1/models", "/metrics", "/nothing", "/ping", "/", "/version")
    for method, path in [("POST", "/v1/chat/completions"), *(("GET", path) for path in got)]:
        reply = await client.call(method, path).finish()
        assert reply.status == 503, path
        assert reply.error["reason"] == "starting"
        assert reply.reply_headers["retry-after"]
    assert (await client.get("/health/live")).status == 200


async def test_leaving_servers_still_work_but_are_not_ready(serve):
    client = serve(phase="leaving")
    reply = await client.get("/health")
    assert reply.status == 503
    assert reply.error["reason"] == "draining"
    assert (await client.chat()).status == 200


@pytest.mark.parametrize(("phase", "reason"), [("draining", "draining"), ("dead", "engine_dead")])
async def test_draining_and_dead_servers_refuse_work(serve, phase, reason):
    reply = await serve(phase=phase).chat()
    assert reply.status == 503
    assert reply.error["reason"] == reason
    assert reply.error["type"] == "ServiceUnavailableError"
    if phase == "draining":
        assert reply.reply_headers["connection"] == "close"


async def test_a_silent_device_thread_is_neither_ready_nor_live(serve, monkeypatch):
    client = serve(scheduler={"step_timeout": 1e-9, "max_num_seqs": 16})
    for path in ("/health", "/health/live"):
        reply = await client.get(path)
        assert reply.status == 503
        assert reply.error["reason"] == "stalled"
    assert not_ready("stalled").headers["retry-after"]


async def test_a_pool_half_full_of_stuck_decoders_is_alive_but_not_ready(serve, monkeypatch):
    client = serve(chat={"pool_threads": 4})
    for stuck, status in ((0, 200), (1, 200), (2, 503)):
        monkeypatch.setattr(client.state, "media", SimpleNamespace(stuck_for=lambda seconds, stuck=stuck: stuck))
        reply = await client.get("/health")
        assert reply.status == status
        assert (await client.get("/health/live")).status == 200
    assert reply.error["reason"] == "stalled"
    assert "decoded" in reply.error["message"]


async def test_probes_answer_empty_200(client):
    for path in ("/health", "/health/live", "/health/ready", "/ping"):
        reply = await client.get(path)
        assert (reply.status, reply.content) == (200, b"")
    assert (await client.post("/ping")).status == 200
    assert (await client.get("/")).status == 200
    assert (await client.call("HEAD", "/").finish()).status == 200
    assert (await client.get("/version")).json()["version"]
    assert (await client.get("/load")).json() == {"server_load": 0}


# -- keys


async def test_s02_every_route_but_the_open_ones_needs_a_key(serve):
    client = serve(server={"api_key": ("right", "other")})
    posted = ("/v1/chat/completions", "/tokenize", "/v1/responses", "/abort_requests")
    got = ("/v1/models", "/load", "/nothing", "/about")
    for method, path in [*(("POST", path) for path in posted), *(("GET", path) for path in got)]:
        reply = await client.call(method, path).finish()
        assert reply.status == 401, path
        assert reply.error["reason"] == "invalid_api_key"
        assert reply.reply_headers["www-authenticate"] == "Bearer"
    for method, path in [("GET", "/health"), ("GET", "/ping"), ("GET", "/version"), ("GET", "/metrics"), ("HEAD", "/"),
                         ("OPTIONS", "/v1/chat/completions")]:  # fmt: skip
        assert (await client.call(method, path).finish()).status == 200, path


@pytest.mark.parametrize(
    "header", [{"authorization": "Bearer right"}, {"x-api-key": "other"}, {"authorization": "bearer other"}]
)
async def test_s02_keys_come_in_two_headers(serve, header):
    client = serve(server={"api_key": ("right", "other")})
    assert (await client.get("/v1/models", headers=header)).status == 200


@pytest.mark.parametrize(
    "header",
    [{"authorization": "Bearer wrong"}, {"x-api-key": "righ"}, {"authorization": "Basic right"}, {"x-api-key": ""}],
)
async def test_s02_missing_and_wrong_keys_read_the_same(serve, header):
    client = serve(server={"api_key": ("right",)})
    missing, wrong = await client.get("/v1/models"), await client.get("/v1/models", headers=header)
    assert wrong.status == 401
    assert wrong.error == missing.error


async def test_s02_too_many_wrong_keys_are_429(serve):
    client = serve(server={"api_key": ("right",), "auth_max_failures": 3})
    statuses = [(await client.get("/v1/models", headers={"x-api-key": "no"})).status for _ in range(5)]
    assert statuses == [401, 401, 401, 429, 429]


async def test_s02_a_right_key_is_never_locked_out_by_its_neighbours(serve):
    client = serve(server={"api_key": ("right",), "auth_max_failures": 2, **BOSS})
    for header in ({}, {"x-api-key": "no"}) * 3:
        await client.get("/v1/models", headers=header)
        await client.get("/server_info", headers={"x-api-key": "right"})  # 403: the admin's key is needed
    assert (await client.get("/v1/models", headers={"x-api-key": "no"})).error["reason"] == "too_many_failures"
    assert (await client.get("/v1/models", headers={"x-api-key": "right"})).status == 200
    assert (await client.get("/server_info", headers={"x-api-key": "boss"})).status == 200


async def test_s02_failures_behind_a_trusted_proxy_count_for_its_client(serve):
    listed = {"api_key": ("right",), "auth_max_failures": 1, "trusted_proxies": ("10.0.0.0/24", "192.168.1.9")}
    client = serve(server=listed)

    async def status(*hops):
        headers = {"x-api-key": "no", "x-forwarded-for": ", ".join(hops)}
        return (await client.get("/v1/models", headers=headers)).status

    assert [await status("1.1.1.1"), await status("1.1.1.1")] == [401, 429]
    assert await status("2.2.2.2") == 401
    assert await status("3.3.3.3", "1.1.1.1") == 429, "what stands before the last foreign address is the client's word"
    assert await status("2.2.2.2", "192.168.1.9") == 429, "a listed proxy is passed over"
    assert [await status("nonsense"), await status("unknown")] == [401, 429], "then it is the proxy itself"
    assert [await status("[2001:db8::1]:443"), await status("2001:db8::1")] == [401, 429]
    unlisted = serve(server={**listed, "trusted_proxies": ("10.9.0.0/24",)})
    client = unlisted
    assert [await status("1.1.1.1"), await status("2.2.2.2")] == [401, 429]


BAD_FILES = [
    (b"", "holds no key"),
    (b"# none yet\n\n", "holds no key"),
    (b"\xff\xfe\x00", "is not UTF-8"),
    (b"alice:one\nbob: \n", "line 2 has a name and no key"),
    (None, "No such file"),
    (b"alice:one\nalice:two\n", "line 2: alice names another key already"),
    (b"alice:one\nbob:one\n", "line 2: this key has the name alice already"),
    (b"admin:one\n", "line 1: the name admin is that of --admin-api-key"),
    (f"{digest_name('one')}:two\none\n".encode(), "line 2: key-.* names another key already"),
]


@pytest.mark.parametrize(("content", "why"), BAD_FILES)
async def test_s02_a_bad_key_file_does_not_start_a_server(serve, tmp_path, content, why):
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"--api-key-file .*{why}"):
        serve(server={"api_key_file": str(path)})


@pytest.mark.parametrize(("content", "why"), BAD_FILES)
async def test_s02_a_bad_key_file_changes_nothing_when_it_is_reread(serve, tmp_path, caplog, content, why):
    path = tmp_path / "keys"
    path.write_text("one\n")
    client = serve(server={"api_key_file": str(path)})
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    await reread_keys(client.state)
    assert re.search(why, caplog.text)
    assert (await client.get("/v1/models")).status == 401
    assert (await client.get("/v1/models", headers={"x-api-key": "one"})).status == 200


async def test_s02_a_server_that_was_given_keys_never_answers_without(serve):
    client = serve(server={"api_key": ("right",)})
    client.state.keys._digests.clear()
    for header in ({}, {"x-api-key": "right"}, {"x-api-key": ""}):
        assert (await client.get("/v1/models", headers=header)).status == 401


async def test_s02_key_files_are_reread(serve, tmp_path):
    path = tmp_path / "keys"
    path.write_text("# ours\nalice:one\ntwo\n")
    client = serve(server={"api_key_file": str(path)})
    assert (await client.get("/v1/models", headers={"x-api-key": "one"})).status == 200
    assert (await client.get("/v1/models", headers={"x-api-key": "two"})).status == 200
    path.write_text("bob:three\n")
    client.state.keys.reload()
    assert (await client.get("/v1/models", headers={"x-api-key": "one"})).status == 401
    assert (await client.get("/v1/models", headers={"x-api-key": "three"})).status == 200


async def test_s02_a_key_keeps_its_name_wherever_it_stands(serve, tmp_path):
    path = tmp_path / "keys"
    client = serve(server={"api_key_file": str(path), "api_key": ("flag",)}) if path.write_text("one\ntwo\n") else None
    names = {key: client.state.keys.match(key.encode()) for key in ("flag", "one", "two")}
    assert len(set(names.values())) == 3
    for content in ("two\none\n", "# none\nthree\ntwo\none\nflag\n", "carol:four\none\ntwo\none\n"):
        path.write_text(content)
        client.state.keys.reload()
        assert {key: client.state.keys.match(key.encode()) for key in names} == names
    path.write_text("dave:flag\none\n")
    client.state.keys.reload()
    assert client.state.keys.match(b"flag") == "dave", "a name that was given counts"
    assert named([]) == []


async def test_s36_keys_do_not_share_cached_prompts(serve):
    client = serve(server={"api_key": ("one", "two")})
    text = "a prompt that two people send " * 10
    used = {}
    for key in ("one", "two", "one"):
        reply = await client.post("/v1/completions", {"prompt": text, "max_tokens": 1}, headers={"x-api-key": key})
        used.setdefault(key, []).append(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert used["one"][1] > 0
    assert used["two"] == [0]


async def test_s07_another_key_cannot_abort(serve):
    client = serve(server={"api_key": ("one", "two")})
    fields = {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 4000,
        "ignore_eos": True,
        "request_id": "r",
    }
    call = client.call("POST", "/v1/chat/completions", fields, headers={"x-api-key": "one"}).start()
    await until(lambda: client.state.live)
    await client.post("/abort_requests", {"request_ids": ["chatcmpl-r"]}, headers={"x-api-key": "two"})
    await asyncio.sleep(0.05)
    assert client.state.live, "it goes on"
    await client.post("/abort_requests", {"request_ids": ["chatcmpl-r"]}, headers={"x-api-key": "one"})
    await call.finish()
    assert call.json()["choices"][0]["finish_reason"] == "abort"


async def test_metrics_can_be_guarded(serve):
    client = serve(server={"api_key": ("right",), "metrics_require_key": True})
    assert (await client.get("/metrics")).status == 401
    assert (await client.get("/metrics", headers={"x-api-key": "right"})).status == 200


# -- hosts and origins


async def test_s01_other_hosts_are_refused_when_hosts_are_listed(serve):
    client = serve(server={"allowed_hosts": ("good.example", "[::1]")})
    for host, status in [("good.example", 200), ("GOOD.example:8000", 200), ("[::1]:8000", 200), ("bad.example", 421)]:
        assert (await client.get("/version", headers={"host": host})).status == status, host


async def test_s01_loopback_binds_answer_loopback_names_only(serve):
    client = serve(server={"host": "127.0.0.1"})
    assert (await client.get("/version", headers={"host": "localhost:8000"})).status == 200
    reply = await client.get("/version", headers={"host": "rebound.example"})
    assert reply.status == 421
    assert reply.error["reason"] == "host_not_allowed"
    assert "--allowed-hosts" in reply.error["message"]


async def test_s06_unlisted_origins_are_refused_without_keys(serve):
    evil = {"origin": "https://evil.example"}
    assert (await serve().chat()).status == 200
    reply = await serve().post("/v1/completions", {"prompt": "a", "max_tokens": 1}, headers=evil)
    assert reply.status == 403
    assert reply.error["reason"] == "origin_not_allowed"
    client = serve(server={"api_key": ("right",)})
    reply = await client.post(
        "/v1/completions", {"prompt": "a", "max_tokens": 1}, headers={**evil, "x-api-key": "right"}
    )
    assert reply.status == 200
    assert "access-control-allow-origin" not in reply.reply_headers


async def test_s06_listed_origins_get_their_headers(serve):
    client = serve(server={"allowed_origins": ("https://app.example",), "allow_credentials": True})
    app = {"origin": "https://app.example"}
    reply = await client.get("/v1/models", headers=app)
    assert reply.reply_headers["access-control-allow-origin"] == "https://app.example"
    assert reply.reply_headers["access-control-allow-credentials"] == "true"
    assert reply.reply_headers["vary"] == "origin"
    reply = await client.call(
        "OPTIONS", "/v1/chat/completions", headers={**app, "access-control-request-method": "POST"}
    ).finish()
    assert reply.status == 200
    assert "POST" in reply.reply_headers["access-control-allow-methods"]
    reply = await client.call(
        "OPTIONS", "/v1/models", headers={"origin": "https://x", "access-control-request-method": "POST"}
    ).finish()
    assert "access-control-allow-methods" not in reply.reply_headers
    streamed = await client.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "stream": True}, headers=app)
    assert streamed.reply_headers["access-control-allow-origin"] == "https://app.example"
    refused = await client.post("/v1/completions", {"prompt": 5}, headers=app)
    assert refused.reply_headers["access-control-allow-origin"] == "https://app.example"


@pytest.mark.parametrize(
    ("origin", "host", "status"),
    [
        ("http://192.168.1.5:8000", "192.168.1.5:8000", 200),
        ("http://localhost:8000", "localhost:8000", 200),
        ("http://[::1]:8000", "[::1]:8000", 200),
        ("http://192.168.1.5:8000", "192.168.1.5:9000", 403),
        ("http://rebound.example:8000", "rebound.example:8000", 403),
        ("null", "192.168.1.5:8000", 403),
    ],
)
async def test_s06_the_server_s_own_page_may_ask(serve, origin, host, status):
    headers = {"origin": origin, "host": host}
    reply = await serve().post("/v1/completions", {"prompt": "a", "max_tokens": 1}, headers=headers)
    assert reply.status == status


# Headers that the browser builds of the openai and anthropic clients add to a request.
SENT_FROM_PAGES = [
    "authorization", "content-type", "user-agent", "openai-organization", "openai-project",
    "x-stainless-arch", "x-stainless-helper-method", "x-stainless-lang", "x-stainless-os",
    "x-stainless-package-version", "x-stainless-retry-count", "x-stainless-runtime",
    "x-stainless-runtime-version", "x-stainless-timeout",
    "x-api-key", "anthropic-version", "anthropic-beta", "anthropic-dangerous-direct-browser-access",
]  # fmt: skip


async def test_s06_clients_in_a_page_may_send_their_headers(serve):
    app = {"origin": "https://app.example", "access-control-request-method": "POST"}
    client = serve(server={"allowed_origins": ("https://app.example",)})

    async def allowed(asked):
        reply = await client.call(
            "OPTIONS", "/v1/messages", headers={**app, "access-control-request-headers": asked}
        ).finish()
        return reply.reply_headers["access-control-allow-headers"].split(", ")

    assert set(await allowed(",".join(SENT_FROM_PAGES))) >= set(SENT_FROM_PAGES)
    others = await allowed("X-Stainless-New, cookie, x-other, anthropic-\x80, anthropic-a b, x-stainless-" + "y" * 80)
    assert "x-stainless-new" in others
    assert not any(name.startswith(("cookie", "x-other", "anthropic", "x-stainless-y")) for name in others)
    assert not any("*" in name for name in others)


async def test_s06_a_star_allows_all_headers_by_name(serve):
    """For browsers a star stands for all headers except `authorization`."""
    client = serve(server={"allowed_origins": ("*",), "allowed_headers": ("*",)})
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,x-mine"}
    reply = await client.call("OPTIONS", "/v1/messages", headers={"origin": "https://x", **asked}).finish()
    assert reply.reply_headers["access-control-allow-headers"] == "authorization, x-mine"
    exposed = reply.reply_headers["access-control-expose-headers"].split(", ")
    assert {"retry-after", "request-id"} <= set(exposed)


async def test_s06_any_origin(serve):
    reply = await serve(server={"allowed_origins": ("*",)}).get("/v1/models", headers={"origin": "https://x"})
    assert reply.reply_headers["access-control-allow-origin"] == "*"


async def test_repeated_host_is_refused(client):
    call = client.call("GET", "/version")
    scope = call.scope()
    scope["headers"].append((b"host", b"other"))
    call.scope = lambda: scope  # type: ignore[method-assign]
    assert (await call.finish()).status == 400


# -- request ids


@pytest.mark.parametrize(
    ("given", "kept"),
    [("abc-123", True), ("x" * 128, True), ("x" * 129, False), ("a b", True), ("a\tb", False), ("é", False)],
)
async def test_s07_request_ids_are_labels(client, given, kept):
    reply = await client.get("/version", headers={"x-request-id": given})
    answered = reply.reply_headers["x-request-id"]
    assert (answered == given) is kept
    if not kept:
        assert len(answered) == 32
        int(answered, 16)


async def test_two_requests_may_share_an_id(client):
    replies = await asyncio.gather(*(client.chat(request_id="same") for _ in range(2)))
    assert [reply.json()["id"] for reply in replies] == ["chatcmpl-same"] * 2


# -- models and tokenizer


async def test_models_are_listed_once_per_name(serve, state):
    client = serve(server={"served_model_name": ("a", "org/b")})
    body = (await client.get("/v1/models")).json()
    assert [card["id"] for card in body["data"]] == ["a", "org/b"]
    assert (body["first_id"], body["last_id"], body["has_more"]) == ("a", "org/b", False)
    assert body["data"][0]["max_model_len"] == state.engine.max_model_len
    assert (await client.get("/v1/models/org/b")).json()["id"] == "org/b"
    assert (await client.get("/v1/models/")).json() == (await client.get("/v1/models")).json()
    reply = await client.get("/v1/models/c")
    assert reply.status == 404
    assert reply.error["param"] == "model"
    assert (await client.chat(model="org/b")).json()["model"] == "org/b"
    assert (await client.chat()).json()["model"] == "a"


async def test_tokenize_and_detokenize_go_round(client, state):
    for text in ("hello there", "  spaces\n\n", "é😀漢字", "a\tb"):
        body = (await client.post("/tokenize", {"prompt": text, "add_special_tokens": False})).json()
        assert body["count"] == len(body["tokens"])
        assert body["max_model_len"] == state.engine.max_model_len
        assert (await client.post("/detokenize", {"tokens": body["tokens"]})).json() == {
            "prompt": text,
            "content": text,
        }
    body = (await client.post("/tokenize", {"prompt": "hello", "return_token_strs": True})).json()
    assert len(body["token_strs"]) == body["count"]
    chat = (await client.post("/tokenize", {"messages": [{"role": "user", "content": "hello"}]})).json()
    assert chat["count"] == (await client.chat()).json()["usage"]["prompt_tokens"]
    assert (await client.post("/tokenize", {})).status == 400
    assert (await client.post("/detokenize", {"tokens": [-1]})).error["reason"] == "token_id_out_of_range"


async def test_tokenizer_info_names_tokens_and_no_paths(client, state):
    body = (await client.get("/tokenizer_info")).json()
    assert body["eos_token"] == state.tokenizer.special_tokens["eos_token"]
    assert {"bos_token", "pad_token", "chat_template"} <= set(body)
    assert "/" not in (body.get("name_or_path") or "")


# -- metrics and log


SERIES = """
num_requests_running num_requests_waiting kv_cache_usage_perc prompt_tokens_total generation_tokens_total
num_preemptions_total prefix_cache_queries_total prefix_cache_hits_total cache_config_info
time_to_first_token_seconds_bucket inter_token_latency_seconds_bucket request_time_per_output_token_seconds_sum
e2e_request_latency_seconds_count request_queue_time_seconds_bucket request_inference_time_seconds_bucket
request_prefill_time_seconds_bucket request_decode_time_seconds_bucket request_prompt_tokens_bucket
request_generation_tokens_bucket iteration_tokens_total_bucket request_params_n_bucket
request_params_max_tokens_bucket request_max_num_generation_tokens_bucket
"""


async def test_metrics_show_the_names_that_dashboards_expect(client):
    await client.chat()
    text = (await client.get("/metrics")).content.decode()
    for name in SERIES.split():
        assert f'vllm:{name}{{engine="0"' in text or f"vllm:{name}{{" in text, name
    assert 'vllm:request_success_total{engine="0",finished_reason="length",model_name=""} 1.0' in text
    assert 'http_requests_total{handler="/v1/chat/completions",method="POST",status="2xx"} 1.0' in text
    assert "process_resident_memory_bytes" in text
    assert 'time_to_first_token_seconds_bucket{engine="0",le="0.001",model_name=""}' in text


async def test_s08_labels_come_from_closed_sets(client):
    for at in range(5):
        await client.call(f"BREW{at}", f"/secret/{at}?token=abc").finish()
        await client.get(f"/v1/models/name{at}")
    text = (await client.get("/metrics")).content.decode()
    assert "BREW" not in text
    assert "secret" not in text
    assert "name1" not in text
    assert 'handler="/v1/models/{id}",method="GET",status="4xx"} 5.0' in text


async def test_s09_log_lines_hold_no_text(serve, caplog):
    client = serve(server={"api_key": ("hidden-key",)})
    with caplog.at_level(logging.DEBUG, "omniloop"):
        await client.post(
            "/v1/chat/completions?token=querysecret",
            {"messages": [{"role": "user", "content": "promptsecret"}], "max_tokens": 2},
            headers={"x-api-key": "hidden-key", "x-request-id": "label"},
        )
        await client.get("/v1/models", headers={"x-api-key": "wrong-key"})
    text = caplog.text
    assert "label POST /v1/chat/completions 200" in text
    assert f"key={digest_name('hidden-key')}" in text
    assert "generated=2" in text
    assert "reason=invalid_api_key" in text
    for secret in ("promptsecret", "querysecret", "hidden-key", "wrong-key"):
        assert secret not in text
